"""Adapters of a rehearsal node: /sys/class/infiniband with all that it leads to, and the kernel's words about it.

Every GPU of an h100x8 or h200x8 node has an adapter below the same PCI switch; on an a100x8 node two GPUs share a
switch with one adapter. `cluster.testbed.hardware.gpus` says where.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.testbed.hardware.files import FakeFile
from cluster.testbed.hardware.gpus import adapter_pci_path
from engine.errors import ConfigError

PROFILES = ("h100x8", "h200x8", "a100x8", "none")
FAULTS = {
    "port_down": "DEV: its port is down and switched off, while its rate still reads 40 Gb/s",
    "polling": "DEV: its port looks for the other end of the cable",
    "slow_port": "DEV: its port came up at half its rate",
    "narrow_pcie": "DEV: it has 8 of its 16 PCIe lanes, and the kernel said so",
    "flapping": "DEV: its link went down and up three times",
    "counters": "DEV: its link_downed stands at 255, the end of that counter",
    "growing": "DEV: errors are being counted right now",
    "driverless": "DEV: it is on the PCI bus, but no driver offers it",
    "gone": "DEV: it is nowhere",
    "roce": "compute ports speak Ethernet (RoCE v2)",
    "no_peermem": "no module lets adapters reach GPU memory",
}
_GPUS_PER_ADAPTER = {"h100x8": 1, "h200x8": 1, "a100x8": 2}
# Which mlx5 numbers the compute adapters have, on nodes 1 to 4 and on again: sister nodes differ.
_COMPUTE_NUMBERS = (
    (0, 1, 2, 5, 6, 7, 8, 11),
    (0, 3, 4, 5, 6, 9, 10, 11),
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 1, 2, 3, 6, 7, 8, 9),
)
_COUNTERS = (
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "symbol_error",
)
_HARDWARE_COUNTERS = ("local_ack_timeout_err", "out_of_sequence", "packet_seq_err")


@dataclass(frozen=True)
class _Adapter:
    """One adapter with one port. rail: the switch that it shares with GPUs; None away from all GPUs."""

    name: str
    pci_path: tuple[str, ...]
    rail: int | None
    netdev: str
    rate: str
    hca_type: str = "MT4129"
    firmware: str = "28.41.1000"
    board_id: str = "MT_0000000838"
    link_layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    phys_state: str = "5: LinkUp"
    numa_node: int = 0
    speed: str = "32.0 GT/s PCIe"
    width: int = 16
    mtu: int = 4092
    is_bond: bool = False
    link_downed: int = 0
    is_growing: bool = False
    has_driver: bool = True


def compute_adapters(profile: str, node: int) -> tuple[str, ...]:
    """Names of the adapters of node `node` (from 1) that training uses, in the order of the GPUs they sit beside."""
    if profile == "none":
        return ()
    if profile == "a100x8":
        return tuple(f"mlx5_{number}" for number in range(4))
    return tuple(f"mlx5_{number}" for number in _COMPUTE_NUMBERS[(node - 1) % len(_COMPUTE_NUMBERS)])


def fabric_files(profile: str, node: int, faults: Iterable[str] = ()) -> dict[str, FakeFile]:
    """The files of node `node` (from 1) by path, `root/...`. `faults`: see FAULTS, `NAME` or `NAME:VALUE`; instead of
    DEV, `railN` is the compute adapter number N from 0. Raises ConfigError for a profile or fault that makes no sense.
    """
    if profile not in PROFILES:
        raise ConfigError(f"no hardware profile {profile!r}; there are {', '.join(PROFILES)}")
    adapters = {adapter.name: adapter for adapter in _healthy(profile, node)}
    has_peermem, log = profile != "none", _boot_log(adapters.values())
    for fault in sorted(faults, key=lambda fault: fault != "roce"):
        name, _, value = fault.partition(":")
        if name not in FAULTS:
            raise ConfigError(f"no fault {fault!r} of adapters; there are {', '.join(FAULTS)}")
        if bool(value) != (":" in FAULTS[name]):
            raise ConfigError(f"fault {fault!r} makes no sense. {name}: {FAULTS[name]}; there are {', '.join(FAULTS)}")
        if name == "no_peermem":
            has_peermem = False
        elif name == "roce":
            adapters = {key: _as_roce(one) if one.rail is not None else one for key, one in adapters.items()}
        elif name == "gone":
            del adapters[_named(adapters, value, fault).name]
        else:
            adapter = _damaged(name, _named(adapters, value, fault))
            adapters[adapter.name] = adapter
            log += _log_of(name, adapter)
    files = {"root/var/log/kernel-fabric.log": FakeFile("".join(f"{line}\n" for line in log))}
    for adapter in adapters.values():
        files |= _adapter_files(adapter, node)
    if profile != "none":
        files["root/sys/module/nvidia/initstate"] = FakeFile("live\n")
        # Without the symbol of DMA-BUF, whatever kernel the rehearsal runs on.
        files["root/proc/kallsyms"] = FakeFile("0000000000000000 T vfs_read\n")
    if has_peermem:
        files["root/sys/module/nvidia_peermem/version"] = FakeFile("550.54.15\n")
    return files


def _healthy(profile: str, node: int) -> list[_Adapter]:
    if profile == "none":
        return []
    names = compute_adapters(profile, node)
    compute = [
        _Adapter(
            name=name,
            pci_path=adapter_pci_path(profile, rail * _GPUS_PER_ADAPTER[profile]),
            rail=rail,
            netdev=f"ib{rail}",
            rate="400 Gb/sec (4X NDR)",
            numa_node=rail * 2 // len(names),
        )
        for rail, name in enumerate(names)
    ]
    if profile == "a100x8":
        return [
            replace(
                adapter,
                rate="200 Gb/sec (4X HDR)",
                hca_type="MT4123",
                firmware="20.39.1002",
                board_id="MT_0000000223",
                speed="16.0 GT/s PCIe",
            )
            for adapter in compute
        ]
    spare = sorted({f"mlx5_{number}" for number in range(12)} - set(names), key=lambda name: int(name[5:]))
    return compute + _beside(spare)


def _beside(names: list[str]) -> list[_Adapter]:
    """What else such a node has: two Ethernet ports, two InfiniBand ports without cable, a bond for management."""
    found = []
    for slot, name in enumerate(names):
        adapter = _Adapter(
            name=name,
            pci_path=(f"0000:e0:{slot + 1:02x}.0", f"0000:{0xE1 + slot:02x}:00.0"),
            rail=None,
            netdev=f"ib{8 + slot}",
            rate="10 Gb/sec (4X SDR)",
            state="1: DOWN",
            phys_state="3: Disabled",
            numa_node=1,
        )
        if slot < 2:
            adapter = _as_roce(replace(adapter, netdev=f"ens{slot + 1}np0", rate="100 Gb/sec (4X EDR)"))
            adapter = replace(adapter, state="4: ACTIVE", phys_state="5: LinkUp")
        found.append(adapter)
    bond = replace(
        _as_roce(found[0]),
        name="mlx5_bond_0",
        pci_path=("0000:e0:0f.0", "0000:ef:00.0"),
        netdev="bond0",
        rate="200 Gb/sec (2X NDR)",
        hca_type="MT41692",
        firmware="32.39.2048",
        board_id="MT_0000000884",
        is_bond=True,
    )
    return [*found, bond]


def _as_roce(adapter: _Adapter) -> _Adapter:
    netdev = f"rdma{adapter.rail}" if adapter.rail is not None else adapter.netdev
    return replace(adapter, link_layer="Ethernet", netdev=netdev, mtu=9000)


def _damaged(fault: str, adapter: _Adapter) -> _Adapter:
    if fault == "port_down":
        return replace(adapter, state="1: DOWN", phys_state="3: Disabled", rate="40 Gb/sec (4X QDR)")
    if fault == "polling":
        return replace(adapter, state="1: DOWN", phys_state="2: Polling", rate="10 Gb/sec (4X SDR)")
    if fault == "slow_port":
        rate = int(adapter.rate.split(" ", 1)[0]) // 2
        return replace(adapter, rate=f"{rate} Gb/sec (4X)")
    if fault == "narrow_pcie":
        return replace(adapter, width=8)
    if fault == "counters":
        return replace(adapter, link_downed=255)
    if fault == "growing":
        return replace(adapter, is_growing=True)
    if fault == "driverless":
        return replace(adapter, has_driver=False)
    return adapter  # flapping shows in the log alone


def _named(adapters: Mapping[str, _Adapter], name: str, fault: str) -> _Adapter:
    for adapter in adapters.values():
        if adapter.name == name or (adapter.rail is not None and f"rail{adapter.rail}" == name):
            return adapter
    raise ConfigError(f"fault {fault!r}: no adapter {name!r} on this node; there are {', '.join(adapters)}")


def _boot_log(adapters: Iterable[_Adapter]) -> list[str]:
    lines = ["[    0.000000] Linux version 5.15.0-105-generic (build@host) (gcc 11.4.0) #115-Ubuntu SMP"]
    for adapter in adapters:
        head = f"mlx5_core {adapter.pci_path[-1]}:"
        link = f"{adapter.speed} x{adapter.width} link"
        lines += [
            f"[   12.100000] {head} firmware version: {adapter.firmware}",
            f"[   12.100100] {head} {_pcie_gbps(adapter):.3f} Gb/s available PCIe bandwidth ({link})",
        ]
        if adapter.state == "4: ACTIVE":
            lines.append(f"[   21.500000] mlx5_core {adapter.pci_path[-1]} {adapter.netdev}: Link up")
    return lines


def _pcie_gbps(adapter: _Adapter) -> float:
    """What 16 lanes carry, as the kernel reckons it."""
    return 504.112 if adapter.speed.startswith("32") else 252.048


def _log_of(fault: str, adapter: _Adapter) -> list[str]:
    """What the kernel says about a fault."""
    address = adapter.pci_path[-1]
    if fault == "narrow_pcie":
        gbps, speed = _pcie_gbps(adapter), adapter.speed
        return [
            f"[   12.100100] mlx5_core {address}: {gbps / 2:.3f} Gb/s available PCIe bandwidth, limited by {speed} x8 "
            f"link at {adapter.pci_path[-2]} (capable of {gbps:.3f} Gb/s with {speed} x16 link)"
        ]
    if fault == "flapping":
        # In the last hours of the ten days that fake GPUs say the node has been up.
        words = [(860000.0 + 60 * turn, word) for turn in range(3) for word in ("down", "up")]
        return [f"[{at:12.6f}] mlx5_core {address} {adapter.netdev}: Link {word}" for at, word in words]
    return []


def _adapter_files(adapter: _Adapter, node: int) -> dict[str, FakeFile]:
    """The PCI device, the adapter and its interface below it, and the links of /sys/class and /sys/bus to them."""
    device = f"root/sys/devices/pci{adapter.pci_path[0][:7]}/{'/'.join(adapter.pci_path)}"
    is_ethernet = adapter.link_layer == "Ethernet"
    texts = {
        "vendor": "0x15b3",
        "class": "0x020000" if is_ethernet else "0x020700",
        "numa_node": str(adapter.numa_node),
        "current_link_width": str(adapter.width),
        "max_link_width": "16",
        "current_link_speed": adapter.speed,
        "max_link_speed": adapter.speed,
    }
    links = {f"root/sys/bus/pci/devices/{adapter.pci_path[-1]}": device}
    if adapter.has_driver:
        verbs = f"{device}/infiniband/{adapter.name}"
        texts |= {f"infiniband/{adapter.name}/{name}": text for name, text in _verbs_texts(adapter, node).items()}
        links |= {
            f"root/sys/class/infiniband/{adapter.name}": verbs,
            f"{verbs}/device": device,
            f"root/sys/class/net/{adapter.netdev}": f"{device}/net/{adapter.netdev}",
            f"{device}/net/{adapter.netdev}/device": device,
        }
        is_up = adapter.state == "4: ACTIVE"
        netdev = {
            "mtu": str(adapter.mtu),
            "operstate": "up" if is_up else "down",
            "carrier": "1" if is_up else "0",
            "speed": adapter.rate.split(" ", 1)[0] + "000",
            "type": "1" if is_ethernet else "32",
            "dev_port": "0",
        }
        if adapter.is_bond:
            netdev["bonding/mode"] = "802.3ad 4"
        texts |= {f"net/{adapter.netdev}/{name}": text for name, text in netdev.items()}
    files = {f"{device}/{name}": FakeFile(f"{text}\n") for name, text in texts.items()}
    if adapter.is_growing:
        port = f"root/sys-second/class/infiniband/{adapter.name}/ports/1"
        files[f"{port}/counters/symbol_error"] = FakeFile("4711\n")
        files[f"{port}/counters/port_rcv_errors"] = FakeFile("12\n")
    for place, target in links.items():
        files[place] = FakeFile(link_to=posixpath.relpath(target, posixpath.dirname(place)))
    return files


def _verbs_texts(adapter: _Adapter, node: int) -> dict[str, str]:
    """Files of /sys/class/infiniband/NAME."""
    values = dict.fromkeys((*(f"counters/{name}" for name in _COUNTERS),), 0)
    values |= {f"hw_counters/{name}": 0 for name in _HARDWARE_COUNTERS}
    values["counters/link_downed"] = adapter.link_downed
    port = {
        "state": adapter.state,
        "phys_state": adapter.phys_state,
        "rate": adapter.rate,
        "link_layer": adapter.link_layer,
        **{name: str(value) for name, value in values.items()},
        **_gid_texts(adapter, node),
    }
    return {
        "fw_ver": adapter.firmware,
        "hca_type": adapter.hca_type,
        "board_id": adapter.board_id,
        "node_type": "1: CA",
        **{f"ports/1/{name}": text for name, text in port.items()},
    }


def _gid_texts(adapter: _Adapter, node: int) -> dict[str, str]:
    number = int(adapter.pci_path[-1][5:7], 16)
    local = f"fe80:0000:0000:0000:5200:{node:04x}:00{number:02x}:0001"
    if adapter.link_layer != "Ethernet":
        return {"gids/0": local, "gid_attrs/types/0": "IB/RoCE v1", "gids/1": ":".join(["0000"] * 8)}
    mapped = f"0000:0000:0000:0000:0000:ffff:0a{number:02x}:{node:04x}"
    texts: dict[str, str] = {}
    for index, (address, kind) in enumerate(
        (address, kind) for address in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")
    ):
        texts |= {
            f"gids/{index}": address,
            f"gid_attrs/types/{index}": kind,
            f"gid_attrs/ndevs/{index}": adapter.netdev,
        }
    return texts
