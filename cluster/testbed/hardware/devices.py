"""What a rehearsal node has: GPUs and adapters as values, where they sit on the PCI bus, and what is wrong with them.

GPU k and the adapter of its rail sit below one PCI switch: on an h100x8 or h200x8 every GPU has an adapter of its own,
on an a100x8 two GPUs share one. Machines and faults are data: hardware.yaml.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError

NO_HARDWARE = "none"


@dataclass(frozen=True)
class Model:
    """One kind of machine; see hardware.yaml."""

    name: str
    driver: str
    memory_mib: int
    power_w: int
    sm_mhz: int
    memory_mhz: int
    pcie_speed: str
    pcie_generation: int
    nvlinks: int
    nvlink_gbps: str
    pci_device: str
    nvswitch_device: str
    nvswitches: int
    gpu_buses: list[str]
    adapter_buses: list[str]
    switches: list[str]
    adapter_rate: str

    @property
    def generation(self) -> int:
        """Of the driver: 550 of 550.127.05."""
        return int(self.driver.partition(".")[0])

    @property
    def gpus_per_adapter(self) -> int:
        """How many GPUs are below one switch."""
        return len(self.gpu_buses) // len(self.switches)

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

    @property
    def address(self) -> str:
        """Its own on the PCI bus."""
        return self.path[-1]


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


@dataclass(frozen=True)
class Fault:
    """One kind of what can be wrong; see hardware.yaml."""

    help: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """`GPU N`, `DEV`, `VERSION`, `CODE or CODE:N`; empty for the whole node."""
        return self.help.partition(": ")[0] if ": " in self.help else ""


@dataclass
class Hardware:
    """The hardware of one node. flags: faults of the node as a whole."""

    model: Model
    gpus: list[Gpu]
    adapters: list[Adapter]
    driver: str
    flags: set[str] = field(default_factory=set)


@functools.cache
def _data() -> Mapping[str, Any]:
    import yaml  # not where tests run with nothing but the engine's packages

    found: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
    return found


def models() -> dict[str, Model]:
    """The kinds of machines by the names of `--hardware`."""
    return {name: Model(**row) for name, row in _data()["models"].items()}


def faults() -> dict[str, Fault]:
    """What can be wrong, by name."""
    return {name: Fault(**row) for name, row in _data()["faults"].items()}


def build_hardware(profile: str, node: str, number: int, wrong: Iterable[str]) -> Hardware:
    """What `node`, the testbed's `number`-th from 1, has; `wrong` are `NAME` or `NAME:VALUE` of `faults`, and `railN`
    stands for the compute adapter number N from 0. Raises ConfigError for a fault that makes no sense.
    """
    model = models()[profile]
    hardware = Hardware(model, _healthy_gpus(model, node), _healthy_adapters(profile, number), model.driver)
    for fault in wrong:
        _apply(hardware, fault)
    if "roce" in hardware.flags:
        hardware.adapters = [one if one.rail is None else one.as_ethernet() for one in hardware.adapters]
    return hardware


def compute_adapters(profile: str, number: int) -> tuple[str, ...]:
    """Names of the adapters of node `number` (from 1) that training uses, in the order of the GPUs they sit beside."""
    rails, sisters = len(models()[profile].switches), _data()["sisters"]
    numbers = sisters[(number - 1) % len(sisters)] if rails == len(sisters[0]) else range(rails)
    return tuple(f"mlx5_{one}" for one in numbers)


def address(bus: str) -> str:
    """The PCI address of the only device of a bus."""
    return f"0000:{bus}:00.0"


def _healthy_gpus(model: Model, node: str) -> list[Gpu]:
    """With UUIDs of their own, the same at every call."""
    found = []
    for index in range(len(model.gpu_buses)):
        digest = hashlib.sha256(f"{node}/{index}/{model.name}".encode()).hexdigest()
        uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        found.append(Gpu(model.gpu_path(index), uuid, index * 2 // len(model.gpu_buses)))
    return found


def _healthy_adapters(profile: str, number: int) -> list[Adapter]:
    """Those that training uses first.

    A machine with a rail per GPU has more: two ports of Ethernet, two of InfiniBand without cable, a bond.
    """
    model, names = models()[profile], compute_adapters(profile, number)
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


def _apply(hardware: Hardware, fault: str) -> None:
    name, _, value = fault.partition(":")
    kind = faults().get(name)
    if kind is None:
        raise ConfigError(f"no fault {fault!r} of hardware; there are {', '.join(faults())}")
    nonsense = ConfigError(f"{fault!r} makes no sense ({len(hardware.gpus)} GPUs). {name}: {kind.help}")
    if kind.about == "" and ":" not in fault:
        hardware.flags.add(name)
    elif kind.about == "VERSION" and re.fullmatch(r"[0-9]+(\.[0-9]+)*", value):
        hardware.driver = value
    elif kind.about == "DEV":
        named = [k for k, one in enumerate(hardware.adapters) if value in (one.name, f"rail{one.rail}")]
        if not named:
            names = ", ".join(one.name for one in hardware.adapters)
            raise ConfigError(f"fault {fault!r}: no adapter {value!r} on this node; there are {names}")
        hardware.adapters[named[0]] = replace(hardware.adapters[named[0]], **kind.changes)
    elif found := re.fullmatch(r"([0-9]+)(?::([0-9]+))?" if name == "xid" else r"()([0-9]+)", value):
        index, changes = int(found[2] or 0), {"xid": found[1]} if name == "xid" else kind.changes
        if kind.about in ("", "VERSION") or index >= len(hardware.gpus):
            raise nonsense
        hardware.gpus[index] = replace(hardware.gpus[index], **changes)
    else:
        raise nonsense
