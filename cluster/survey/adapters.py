"""What the sections `ib.*` of the probe say, as values. Nothing is judged, and nothing that was not read is made up.

A row that makes no sense is an UnreadableError: whoever asks for the ports of such an answer gets the reason instead of
fewer ports.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.remote_text import one_line
from cluster.survey.section import Section, UnreadableError, listed
from cluster.survey.sysfs import python_question

_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_STATE = re.compile(r"\d+: *([A-Za-z_]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s\b")
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})

PORTS = python_question(
    "ib.ports",
    20,
    r"""
routes = [line.split()[:2] for line in lines(root / "proc/net/route")]
defaults = [route[0] for route in routes if route[1:] == ["00000000"]]
rows = []


def find_netdev(device, number):
    # What the first GID of the port is tied to, else the interface that counts as that port of the device. A partition
    # of InfiniBand (ib0.8001) has a parent; the device's own interface has none.
    tied = tell(device / "ports" / number / "gid_attrs/ndevs/0")
    folders = [one for one in sorted(device.glob("device/net/*")) if not (one / "parent").exists()]
    return tied or next((one.name for one in folders if int(tell(one / "dev_port") or 0) == int(number) - 1), "")


for device in sorted(root.glob("sys/class/infiniband/*")):
    ports = sorted(device.glob("ports/*"))
    for port in ports:
        told = {"dev": device.name, "port": port.name, "path": place(device / "device")}
        told.update((name, tell(port / name)) for name in ("state", "phys_state", "rate", "link_layer"))
        for name in ("numa_node", "current_link_width", "max_link_width", "current_link_speed"):
            told[name] = tell(device / "device" / name)
        told["physfn"] = (device / "device/physfn").exists()
        netdev = find_netdev(device, port.name)
        if netdev:
            folder = root / "sys/class/net" / netdev
            # An interface that is a part of a bond or a bridge has the routes of that one.
            master = place(folder / "master").rpartition("/")[2]
            told.update(netdev=netdev, netdev_state=tell(folder / "operstate"), netdev_mtu=tell(folder / "mtu"))
            told["bonded"] = bool(master) or (folder / "bonding").exists()
            told["default_route"] = netdev in defaults or master in defaults
        for index in range(32):
            address = tell(port / "gids" / str(index))
            if address.strip("0:"):
                told["gid.%d" % index] = address + " " + tell(port / "gid_attrs/types" / str(index))
        rows.append(["port", told])
    if not ports:
        rows.append(["portless", {"dev": device.name}])
for device in sorted(root.glob("sys/bus/pci/devices/*")):
    # An InfiniBand adapter; without that folder no driver offers it.
    if tell(device / "class").startswith("0x0207") and not (device / "infiniband").is_dir():
        rows.append(["driverless", {"path": place(device)}])
print(json.dumps(rows))
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
            "kernel": os.uname().release,
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
    (`0000:00:01.0`, ..., the adapter last). netdev: its network interface. gids: index -> (type, address).
    pcie_gts: GT/s per lane. None, or "" for a state: the node did not tell.
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
    netdev_is_up: bool | None = None
    has_default_route: bool = False
    netdev_mtu: int | None = None
    pcie_gts: float | None = None

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
    """Section `ib.ports`.

    portless: adapters that show no port. driverless_paths: `pci_path` of InfiniBand adapters that no driver offers.
    """

    ports: tuple[HcaPort, ...] = ()
    portless: tuple[str, ...] = ()
    driverless_paths: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class GpuDirect:
    """Section `ib.gpudirect`: what NCCL looks at before it lets adapters reach GPU memory.

    peer_memory: the file of a peer memory module, None without one. has_driver: whether a driver of NVIDIA is loaded.
    has_open_driver: whether it is made of the open modules, as DMA-BUF needs. kernel_has_dmabuf: None when hidden.
    """

    peer_memory: str | None
    has_driver: bool
    has_open_driver: bool
    kernel: str
    kernel_has_dmabuf: bool | None


def parse_adapters(section: Section) -> Adapters:
    """The adapters of section `ib.ports`. Raises UnreadableError."""
    ports: dict[str, HcaPort] = {}
    portless: list[str] = []
    driverless: list[tuple[str, ...]] = []
    for word, fields in read_rows(section):
        if word == "port":
            port = _port(fields, section.name)
            if port.name in ports:
                raise UnreadableError(f"{section.name}: {port.name} comes twice")
            ports[port.name] = port
        elif word == "portless":
            portless.append(_device(fields, section.name))
        elif word == "driverless":
            driverless.append(pci_path(fields.get("path", "")))
    ordered = sorted(ports.values(), key=lambda port: natural(port.name))
    return Adapters(tuple(ordered), tuple(sorted(portless, key=natural)), tuple(driverless))


def parse_gpudirect(section: Section) -> GpuDirect:
    """What section `ib.gpudirect` says. Raises UnreadableError."""

    def take(told: Any) -> GpuDirect:
        driver = str(told["driver"])
        return GpuDirect(
            peer_memory=next(map(str, told["peers"]), None),
            has_driver=told["module"] is True or bool(driver),
            has_open_driver="Open Kernel Module" in driver,
            kernel=one_line(str(told["kernel"])),
            kernel_has_dmabuf=told["dmabuf"] if isinstance(told["dmabuf"], bool) else None,
        )

    return section.read(take)


def pci_path(path: str) -> tuple[str, ...]:
    """The PCI addresses in a path below /sys/devices, from the root complex down; () when there are none."""
    return tuple(part for part in path.lower().split("/") if _ADDRESS.fullmatch(part))


def ipv4_of_gid(gid: str) -> str | None:
    """The IPv4 address that a GID of RoCE stands for: `0000:...:0000:ffff:0a00:0001` is 10.0.0.1; None for others."""
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped if _GID.fullmatch(gid) else None
    return str(mapped) if mapped is not None else None


def roce_gid_index(port: HcaPort) -> int | None:
    """The lowest GID index of `port` that is RoCE v2 over IPv4, as NCCL_IB_GID_INDEX wants it; None without one."""
    fitting = (index for index, (kind, gid) in port.gids.items() if kind == "RoCE v2" and ipv4_of_gid(gid) is not None)
    return min(fitting, default=None)


def read_rows(section: Section) -> list[tuple[str, dict[str, str]]]:
    """(word, fields) of every row of an answer. Raises UnreadableError."""

    def rows(told: Any) -> list[tuple[str, dict[str, str]]]:
        found = [(word, {key: str(value) for key, value in fields.items()}) for word, fields in listed(told)]
        if not all(isinstance(word, str) for word, _ in found):
            raise TypeError
        return found

    return section.read(rows)


def _port(fields: Mapping[str, str], section: str) -> HcaPort:
    device = _device(fields, section)
    return HcaPort(
        device=device,
        port=_port_number(fields, section),
        link_layer=one_line(fields.get("link_layer", "")),
        state=_matched(_STATE, fields.get("state", "")) or "",
        phys_state=_matched(_STATE, fields.get("phys_state", "")) or "",
        rate_gbps=_number(_RATE, fields.get("rate", "")),
        pci_path=pci_path(fields.get("path", "")),
        netdev=_interface(fields.get("netdev", "")),
        numa_node=integer(fields.get("numa_node", "")),
        is_virtual_function=fields.get("physfn") == "True",
        is_bond="bond" in device or fields.get("bonded") == "True",
        pcie_width=_width(fields.get("current_link_width", "")),
        pcie_width_max=_width(fields.get("max_link_width", "")),
        gids=dict(_gids(fields)),
        netdev_is_up={"up": True, "down": False}.get(fields.get("netdev_state", "")),
        has_default_route=fields.get("default_route") == "True",
        netdev_mtu=integer(fields.get("netdev_mtu", "")),
        pcie_gts=_number(_SPEED, fields.get("current_link_speed", "")),
    )


def _gids(fields: Mapping[str, str]) -> Iterator[tuple[int, tuple[str, str]]]:
    for key, value in fields.items():
        address, _, kind = value.partition(" ")
        if re.fullmatch(r"gid\.\d{1,3}", key) and _GID.fullmatch(address):
            yield int(key[4:]), (one_line(kind), address)


def port_name(fields: Mapping[str, str], section: str) -> str:
    """`mlx5_0:1`. Raises UnreadableError."""
    return f"{_device(fields, section)}:{_port_number(fields, section)}"


def _device(fields: Mapping[str, str], section: str) -> str:
    name = fields.get("dev", "")
    if not _DEVICE.fullmatch(name):
        raise UnreadableError(f"{section}: {one_line(name)!r} is no name of an adapter")
    return name


def _port_number(fields: Mapping[str, str], section: str) -> int:
    number = integer(fields.get("port", ""))
    if number is None or number < 1:
        raise UnreadableError(f"{section}: {one_line(fields.get('port', ''))!r} is no number of a port")
    return number


def _matched(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.match(text)
    return found[1] if found else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = _matched(pattern, text)
    return float(found) if found is not None and len(found) < 12 else None


def integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _width(text: str) -> int | None:
    """Lanes; None for what says nothing: 0, 63 and 255 are how the kernel and adapters write `unknown`."""
    lanes = integer(text)
    return lanes if lanes in _WIDTHS else None


def _interface(text: str) -> str | None:
    return text if re.fullmatch(r"[^\s/\x00]{1,15}", text) else None


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
