"""What a rehearsal node has: its GPUs and adapters as values, healthy, and where they sit on the PCI bus.

GPU k and the adapter of its rail sit below one PCI switch: on an h100x8 or h200x8 every GPU has an adapter of its own,
on an a100x8 two GPUs share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

NO_HARDWARE = "none"
# Which mlx5 numbers the compute adapters have, on nodes 1 to 4 and on again: sister nodes differ.
_SISTERS = (
    (0, 1, 2, 5, 6, 7, 8, 11),
    (0, 3, 4, 5, 6, 9, 10, 11),
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 1, 2, 3, 6, 7, 8, 9),
)


@dataclass(frozen=True)
class Model:
    """One kind of machine. switches: PCI bus of every root port, with one adapter and its share of the GPUs below it.

    adapter_rate: of compute adapters. The schema of nvidia-smi follows from the driver.
    """

    name: str
    driver: str
    memory_mib: int
    power_w: int
    sm_mhz: int
    memory_mhz: int
    pcie_generation: int
    nvlinks: int
    nvlink_gbps: str
    pci_device: str
    nvswitch_device: str
    nvswitches: int
    gpu_buses: tuple[str, ...]
    adapter_buses: tuple[str, ...]
    switches: tuple[str, ...]
    adapter_rate: str

    @property
    def generation(self) -> int:
        """Of the driver: 550 of 550.127.05."""
        return int(self.driver.partition(".")[0])

    @property
    def gpus_per_adapter(self) -> int:
        """How many GPUs are below one switch."""
        return len(self.gpu_buses) // len(self.switches)

    @property
    def pcie_speed(self) -> str:
        """Of a lane, as /sys spells it."""
        return {4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}[self.pcie_generation]

    def gpu_path(self, index: int) -> tuple[str, ...]:
        """PCI addresses from the root port to GPU `index`, the GPU last."""
        rail, slot = divmod(index, self.gpus_per_adapter)
        return self._below(rail, slot, self.gpu_buses[index])

    def adapter_path(self, rail: int) -> tuple[str, ...]:
        """PCI addresses from the root port to the adapter of a rail."""
        return self._below(rail, 8, self.adapter_buses[rail])

    def _below(self, rail: int, slot: int, bus: str) -> tuple[str, ...]:
        root = int(self.switches[rail], 16)
        return f"0000:{root:02x}:01.0", f"0000:{root + 1:02x}:00.0", f"0000:{root + 2:02x}:{slot:02x}.0", address(bus)


@dataclass(frozen=True)
class Gpu:
    """One GPU and its state. width: PCIe lanes. inactive_link: an NVLink that is down. xid: of the kernel log.
    is_sick: DCGM says so."""

    address: str
    path: tuple[str, ...]
    uuid: str
    numa_node: int
    used_mib: int = 1
    pid: int | None = None
    uncorrectable: int = 0
    remap_pending: str = "No"
    throttled: tuple[str, ...] = ()
    width: int = 16
    inactive_link: int | None = None
    is_lost: bool = False
    is_listed: bool = True
    xid: str | None = None
    is_sick: bool = False


@dataclass(frozen=True)
class Adapter:
    """One adapter with one port. rail: the switch that it shares with GPUs; None away from all GPUs."""

    name: str
    path: tuple[str, ...]
    rail: int | None
    netdev: str
    rate: str
    speed: str
    numa_node: int
    link_layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    phys_state: str = "5: LinkUp"
    width: int = 16
    mtu: int = 4092
    is_bond: bool = False
    link_downed: int = 0
    is_growing: bool = False
    is_flapping: bool = False
    has_driver: bool = True
    is_there: bool = True

    @property
    def is_up(self) -> bool:
        """Whether its link carries traffic."""
        return self.state == "4: ACTIVE"

    def as_ethernet(self) -> Adapter:
        """The same as a port of RoCE."""
        netdev = self.netdev if self.rail is None else f"rdma{self.rail}"
        return replace(self, link_layer="Ethernet", netdev=netdev, mtu=9000)


_H100 = Model(
    name="NVIDIA H100 80GB HBM3",
    driver="550.127.05",
    memory_mib=81559,
    power_w=700,
    sm_mhz=1980,
    memory_mhz=2619,
    pcie_generation=5,
    nvlinks=18,
    nvlink_gbps="26.562",
    pci_device="0x2330",
    nvswitch_device="0x22a3",
    nvswitches=4,
    gpu_buses=("1b", "43", "52", "61", "9d", "c3", "d1", "df"),
    adapter_buses=("18", "40", "4f", "5e", "9a", "c0", "ce", "dc"),
    switches=("15", "3d", "4c", "5b", "97", "bd", "cb", "d9"),
    adapter_rate="400 Gb/sec (4X NDR)",
)
_H200 = replace(_H100, name="NVIDIA H200", driver="570.86.15", memory_mib=143771, memory_mhz=3201, pci_device="0x2335")
_A100 = Model(
    name="NVIDIA A100-SXM4-80GB",
    driver="525.105.17",
    memory_mib=81920,
    power_w=400,
    sm_mhz=1410,
    memory_mhz=1593,
    pcie_generation=4,
    nvlinks=12,
    nvlink_gbps="25",
    pci_device="0x20b2",
    nvswitch_device="0x1af1",
    nvswitches=6,
    gpu_buses=("07", "0f", "47", "4e", "87", "90", "b7", "bd"),
    adapter_buses=("0c", "4b", "84", "ba"),
    switches=("00", "40", "80", "b0"),
    adapter_rate="200 Gb/sec (4X HDR)",
)
MODELS: Mapping[str, Model] = {"h100x8": _H100, "h200x8": _H200, "a100x8": _A100}


def healthy_gpus(model: Model, node: str) -> list[Gpu]:
    """The GPUs of a node, with UUIDs of their own, the same at every call."""
    found = []
    for index, bus in enumerate(model.gpu_buses):
        digest = hashlib.sha256(f"{node}/{index}/{model.name}".encode()).hexdigest()
        uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        found.append(Gpu(address(bus), model.gpu_path(index), uuid, index * 2 // len(model.gpu_buses)))
    return found


def compute_adapters(profile: str, number: int) -> tuple[str, ...]:
    """Names of the adapters of node `number` (from 1) that training uses, in the order of the GPUs they sit beside."""
    rails = len(MODELS[profile].switches)
    numbers = _SISTERS[(number - 1) % len(_SISTERS)] if rails == len(_SISTERS[0]) else range(rails)
    return tuple(f"mlx5_{one}" for one in numbers)


def healthy_adapters(profile: str, number: int) -> list[Adapter]:
    """The adapters of node `number`, those that training uses first.

    A machine with a rail per GPU has more: two ports of Ethernet, two of InfiniBand without cable, a bond.
    """
    model, names = MODELS[profile], compute_adapters(profile, number)
    speed, count = model.pcie_speed, len(names)
    found = [
        Adapter(name, model.adapter_path(rail), rail, f"ib{rail}", model.adapter_rate, speed, rail * 2 // count)
        for rail, name in enumerate(names)
    ]
    if model.gpus_per_adapter > 1:
        return found
    spare = [name for name in (f"mlx5_{one}" for one in range(12)) if name not in names]
    for slot, name in enumerate([*spare, "mlx5_bond_0"]):
        path = f"0000:e0:{slot + 1:02x}.0", address(f"{0xE1 + slot:02x}")
        one = Adapter(name, path, None, f"ib{8 + slot}", "10 Gb/sec (4X SDR)", speed, 1)
        if name == "mlx5_bond_0":
            one = replace(one.as_ethernet(), netdev="bond0", rate="200 Gb/sec (2X NDR)", is_bond=True)
        elif slot < 2:
            one = replace(one.as_ethernet(), netdev=f"ens{slot + 1}np0", rate="100 Gb/sec (4X EDR)")
        else:
            one = replace(one, state="1: DOWN", phys_state="3: Disabled")
        found.append(one)
    return found


def address(bus: str) -> str:
    """The PCI address of the only device of a bus."""
    return f"0000:{bus}:00.0"
