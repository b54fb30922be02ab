"""The RDMA adapters of a node, InfiniBand and RoCE, and whether they reach the memory of GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.remote_text import one_line
from cluster.survey.section import Section, fill, listed, python_question

_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_IPV4_GID = re.compile(r"(0000:){5}ffff:[0-9a-f]{4}:[0-9a-f]{4}")
_STATE = re.compile(r"\d+: *([A-Za-z_]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s\b")
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})

PORTS = python_question(
    "ib.ports",
    25,
    r"""
routes = [line.split()[:2] for line in lines(root / "proc/net/route")]
defaults = [route[0] for route in routes if route[1:] == ["00000000"]]
told = {"ports": [], "broken": {}}
# None of these grows on a sound link, not within a second.
counters = ("link_downed", "link_error_recovery", "symbol_error", "local_link_integrity_errors", "port_rcv_errors")
counters += ("port_rcv_remote_physical_errors", "excessive_buffer_overrun_errors")


def find_netdev(device, number):
    # What the first GID of the port is tied to, else the interface that counts as that port of the device. A partition
    # of InfiniBand (ib0.8001) has a parent; the device's own interface has none.
    tied = tell(device / "ports" / number / "gid_attrs/ndevs/0")
    folders = [one for one in sorted(device.glob("device/net/*")) if not (one / "parent").exists()]
    return tied or next((one.name for one in folders if int(tell(one / "dev_port") or 0) == int(number) - 1), "")


def find_ways(name):
    # Bonds, bridges and VLANs that an interface is below have its packets, too.
    found = [name] if name else []
    for one in found:
        above = [file.name[6:] for file in (root / "sys/class/net" / one).glob("upper_*")]
        found += [name for name in sorted(above) if name not in found]
    return found


def count(port, tree="sys"):
    # A rehearsal tree may hold what has grown meanwhile in a second tree beside sys.
    files = {name: root / tree / port.relative_to(root / "sys") / "counters" / name for name in counters}
    return {name: int(tell(file)) for name, file in files.items() if tell(file).isdecimal()}


for device in sorted(root.glob("sys/class/infiniband/*")):
    ports = sorted(device.glob("ports/*"))
    for port in ports:
        one = {"device": device.name, "port": port.name, "path": place(device / "device"), "counted": count(port)}
        one.update((name, tell(port / name)) for name in ("state", "phys_state", "rate", "link_layer"))
        for name in ("numa_node", "current_link_width", "max_link_width", "current_link_speed"):
            one[name] = tell(device / "device" / name)
        one["is_iwarp"] = tell(device / "node_type").endswith("RNIC")
        one["has_counters"] = (port / "counters").is_dir()
        one["is_virtual_function"] = (device / "device/physfn").exists()
        one["netdev"] = netdev = find_netdev(device, port.name)
        folder = root / "sys/class/net" / (netdev or "none")
        one["is_bond"] = (folder / "master").exists() or (folder / "bonding").exists()
        one["ways"], one["mtu"] = find_ways(netdev), tell(folder / "mtu")
        one["default_route"] = next((way for way in one["ways"] if way in defaults), "")
        gids = {str(index): tell(port / "gids" / str(index)) for index in range(32)}
        types = port / "gid_attrs/types"
        one["gids"] = {index: [tell(types / index), gid] for index, gid in gids.items() if gid.strip("0:")}
        told["ports"].append(one)
    if not ports:
        told["broken"][device.name] = "the adapter shows no port"
for device in sorted(root.glob("sys/bus/pci/devices/*")):
    # An InfiniBand adapter; without that folder no driver offers it.
    if tell(device / "class").startswith("0x0207") and not (device / "infiniband").is_dir():
        told["broken"][device.name] = "the InfiniBand adapter has no driver"
time.sleep(float(os.environ.get("BURST_COUNT_S") or 0) if told["ports"] else 0)
for one in told["ports"]:
    port = root / "sys/class/infiniband" / one["device"] / "ports" / one["port"]
    later = {**count(port), **count(port, "sys-second")}
    one["errors"] = {name: later[name] - value for name, value in one.pop("counted").items() if name in later}
print(json.dumps(told))
""",
)

GPUDIRECT = python_question(
    "ib.gpudirect",
    15,
    r"""
peers = ["sys/module/nvidia_peermem/version", "sys/kernel/mm/memory_peers/nv_mem/version"]
peers.append("sys/kernel/mm/memory_peers/nv_mem_nc/version")
module = (root / "sys/module/nvidia").exists()
symbols = lines(root / "proc/kallsyms") if module else []  # long
print(
    json.dumps(
        {
            "peers": ["/" + name for name in peers if (root / name).exists()],
            "module": module,
            # Only the open kernel modules of NVIDIA export DMA-BUF; its first line names them.
            "driver": tell(root / "proc/driver/nvidia/version"),
            "dmabuf": any(" ib_umem_dmabuf_get" in one for one in symbols) if symbols else None,
        }
    )
)
""",
)


@dataclass(frozen=True)
class HcaPort:
    """One port of one InfiniBand or RoCE adapter, from /sys/class/infiniband.

    device, port: `mlx5_0`, 1. link_layer: InfiniBand or Ethernet. state: ACTIVE, DOWN, INIT, ... phys_state: LinkUp,
    Polling, Disabled, ... rate_gbps: what is set up now. pci_path: PCI addresses from the root complex to the adapter
    (`0000:00:01.0`, ..., the adapter last). netdev: its network interface. ways: that, and the bonds, bridges and VLANs
    above it; default_route: the one of them that has it. gids: index -> (type, address). pcie_gts: GT/s per lane.
    mtu: of netdev. errors: by how much each error counter that can be read grew in BURST_COUNT_S. has_counters: whether
    the kernel makes the folder of these counters. None, or "" for a state: not told.

    is_iwarp: RDMA over TCP. Its link layer is Ethernet, too; only the node type tells it apart (`4: RNIC`, see
    include/rdma/ib_verbs.h of the kernel: siw, cxgb4, irdma and qedr in that mode).
    """

    device: str
    port: int
    link_layer: str
    state: str
    phys_state: str
    rate_gbps: float | None = None
    pci_path: tuple[str, ...] = ()
    netdev: str | None = None
    numa_node: int | None = None
    is_virtual_function: bool = False
    is_bond: bool = False
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    gids: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    ways: tuple[str, ...] = ()
    default_route: str = ""
    pcie_gts: float | None = None
    mtu: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    has_counters: bool = True
    is_iwarp: bool = False

    @property
    def is_active(self) -> bool:
        """Whether traffic can pass: the link is up, and the port was set up (by a subnet manager, or as Ethernet)."""
        return self.state == "ACTIVE" and self.phys_state == "LinkUp"

    @property
    def pci_address(self) -> str | None:
        """Where the adapter itself sits."""
        return self.pci_path[-1] if self.pci_path else None

    @property
    def name(self) -> str:
        """`mlx5_0:1`, as NCCL_IB_HCA spells it."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class Adapters:
    """Section `ib.ports`. broken: adapters that show no port, or PCI addresses of those without driver -> which."""

    ports: tuple[HcaPort, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuDirect:
    """Section `ib.gpudirect`: what NCCL looks at before it lets adapters reach GPU memory.

    peer_memory: the file of a peer memory module, None without one. has_driver: whether a driver of NVIDIA is loaded.
    has_dmabuf: whether it is made of the open modules, and the kernel exports DMA-BUF; None: the kernel hides that.
    """

    peer_memory: str | None
    has_driver: bool
    has_dmabuf: bool | None

    @property
    def works(self) -> bool | None:
        """Whether there is a way; None: not known."""
        return True if self.peer_memory is not None else self.has_dmabuf


def parse_adapters(section: Section) -> Adapters:
    """The adapters of section `ib.ports`. Raises UnreadableError."""

    def take(told: Any) -> Adapters:
        ports = [_port(row) for row in listed(told["ports"])]
        if len({port.name for port in ports}) < len(ports):
            raise ValueError("a port comes twice")
        broken = {_device(name): one_line(text) for name, text in told["broken"].items()}
        return Adapters(tuple(ports), broken)

    return section.read(take)


def parse_gpudirect(section: Section) -> GpuDirect:
    """What section `ib.gpudirect` says. Raises UnreadableError."""

    def take(told: Any) -> GpuDirect:
        driver, dmabuf = str(told["driver"]), told["dmabuf"]
        return GpuDirect(
            peer_memory=next(map(str, told["peers"]), None),
            has_driver=told["module"] is True or bool(driver),
            has_dmabuf=(dmabuf if dmabuf in (True, None) else False) if "Open Kernel Module" in driver else False,
        )

    return section.read(take)


def pci_path(path: str) -> tuple[str, ...]:
    """The PCI addresses in a path below /sys/devices, from the root complex down; () when there are none."""
    return tuple(part for part in path.lower().split("/") if _ADDRESS.fullmatch(part))


def has_roce_gid(port: HcaPort) -> bool:
    """Whether `port` has a GID of RoCE v2 over IPv4: `0000:...:0000:ffff:0a00:0001` is 10.0.0.1."""
    return any(kind == "RoCE v2" and _IPV4_GID.fullmatch(gid) for kind, gid in port.gids.values())


def _port(row: Mapping[str, Any]) -> HcaPort:
    """Raises ValueError, KeyError and TypeError."""
    port: HcaPort = fill(
        HcaPort,
        {
            **row,
            "device": _device(row["device"]),
            "port": int(row["port"]),
            "state": _matched(_STATE, row["state"]) or "",
            "phys_state": _matched(_STATE, row["phys_state"]) or "",
            "rate_gbps": _number(_RATE, row["rate"]),
            "pci_path": [*pci_path(row["path"])],
            "netdev": row["netdev"] or None,
            "numa_node": integer(row["numa_node"]),
            "is_bond": row["is_bond"] or "bond" in row["device"],
            "pcie_width": lanes(row["current_link_width"]),
            "pcie_width_max": lanes(row["max_link_width"]),
            "pcie_gts": _number(_SPEED, row["current_link_speed"]),
            "mtu": integer(row["mtu"]),
        },
    )
    return port


def _device(name: str) -> str:
    """The name of an adapter, or the PCI address of one. Raises ValueError."""
    if not _DEVICE.fullmatch(name) and not _ADDRESS.fullmatch(name):
        raise ValueError(f"{one_line(name)!r} is no name of an adapter")
    return name


def _matched(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.match(text)
    return found[1] if found else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = _matched(pattern, text)
    return float(found) if found is not None and len(found) < 12 else None


def integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def lanes(text: str) -> int | None:
    """Lanes; None for what says nothing: 0, 63 and 255 are how the kernel and adapters write `unknown`."""
    width = integer(text)
    return width if width in _WIDTHS else None


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
