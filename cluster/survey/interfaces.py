"""Network interfaces of a node, and which of them the nodes talk over."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.survey.section import Section, fill, listed
from cluster.survey.sysfs import python_question

# What container engines and hypervisors make for themselves; other machines cannot be reached over it.
_INTERNAL_NAME = re.compile(
    r"(docker|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|podman|kube|tun|tap|vnet|dummy|ifb|br-[0-9a-f]{12})"
)
_INTERNAL_KINDS = frozenset({"tun", "tunnel", "vxlan", "wireguard", "can"})

# From the kernel itself, in the node's own network namespace. No tool is needed; of several addresses of an interface
# the first one is told.
LINKS = python_question(
    "net.links",
    15,
    r"""
import fcntl, socket, subprocess

types = {"1": "ether", "32": "infiniband", "772": "loopback", "280": "can"}  # ARPHRD_* of the kernel
marks = {"bridge": "bridge", "bonding": "bond", "tun_flags": "tun"}
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
told = {"links": [], "routes": []}
for _, name in socket.if_nameindex():
    folder = pathlib.Path("/sys/class/net", name)
    ask = lambda request: fcntl.ioctl(asking, request, name.encode().ljust(40, b"\0"))[16:]
    kinds = [kind for file, kind in marks.items() if (folder / file).exists()]
    kinds += [line[8:] for line in lines(folder / "uevent") if line.startswith("DEVTYPE=")]
    link = {"name": name, "kind": [*kinds, types.get(tell(folder / "type"), "tunnel")][0]}
    link["mtu"] = int(tell(folder / "mtu") or 0) or None
    link["is_up"] = int.from_bytes(ask(0x8913)[:2], "little") & 65 == 65  # SIOCGIFFLAGS: IFF_UP, IFF_RUNNING
    link["master"] = (folder / "master").resolve().name if (folder / "master").exists() else None
    try:
        address, mask = (ask(request)[4:8] for request in (0x8915, 0x891B))  # SIOCGIFADDR, SIOCGIFNETMASK
        link["addresses"] = ["%s/%d" % (socket.inet_ntoa(address), bin(int.from_bytes(mask, "big")).count("1"))]
    except OSError:
        link["addresses"] = []
    told["links"].append(link)
for row in pathlib.Path("/proc/net/route").read_text().splitlines()[1:]:
    device, to, gateway, _, _, _, metric, mask = row.split()[:8]
    told["routes"].append([device, to == mask == "00000000", gateway != "00000000", int(metric)])
try:  # the kernel lists its main table alone; rails have tables of their own
    said = subprocess.run(["ip", "-4", "route", "show", "table", "all"], stdout=subprocess.PIPE, text=True).stdout
    told["routes"] += [[device, False, True, 0] for device in set(re.findall(r"\bvia .*?\bdev (\S+)", said))]
except OSError:
    pass
print(json.dumps(told))
""",
)


@dataclass(frozen=True)
class NetInterface:
    """One network interface. addresses: IPv4 with prefix length, `10.0.0.1/24`. kind: ether, loopback, infiniband,
    bridge, bond, veth, tun, vlan, ... is_default_route: IPv4 packets to unknown places leave here. master: the bridge
    or bond that it is a part of. is_up: switched on, and the link is there.

    Raises ValueError for a name or address that is none.
    """

    name: str
    is_up: bool
    mtu: int | None = None
    kind: str = "ether"
    addresses: tuple[str, ...] = ()
    is_default_route: bool = False
    master: str | None = None

    def __post_init__(self) -> None:
        for name in (self.name, self.master or "-"):
            if not re.fullmatch(r"[^\s/]{1,15}", name):
                raise ValueError(f"{name!r} is no name of an interface")
        for address in self.addresses:
            ipaddress.IPv4Interface(address)


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface that the nodes talk over, or None, and why."""

    interface: NetInterface | None
    reason: str


@dataclass(frozen=True)
class Network:
    """What section `net.links` says. gateways: interfaces by which an IPv4 route leads to a gateway."""

    interfaces: tuple[NetInterface, ...]
    gateways: frozenset[str]


def read_network(section: Section) -> Network:
    """Every interface of the node, in its order. Raises UnreadableError when links or routes cannot be believed."""

    def take(told: Any) -> Network:
        routes = fill(tuple[tuple[str, bool, bool, int], ...], told["routes"])
        best = min((metric for _, is_default, _, metric in routes if is_default), default=0)
        default = {name for name, is_default, _, metric in routes if is_default and metric == best}
        links = [{**row, "is_default_route": row["name"] in default} for row in listed(told["links"])]
        interfaces = fill(tuple[NetInterface, ...], links)
        if not interfaces:
            raise ValueError("no interface at all, not even lo")
        return Network(interfaces, frozenset(name for name, _, has_gateway, _ in routes if has_gateway))

    return section.read(take)


def explain_interface(interfaces: Iterable[NetInterface], wanted: str | None = None) -> InterfaceChoice:
    """The interface named `wanted`, else that of the default route, else the only one that fits, and why.

    Never lo, never one without IPv4 or link, and never one that a container engine or hypervisor made for itself.
    """
    interfaces = tuple(interfaces)
    if wanted is not None:
        named = next((interface for interface in interfaces if interface.name == wanted), None)
        if named is None:
            return InterfaceChoice(None, f"there is no interface {wanted}; there are {_names(interfaces)}")
        trouble = unfit(named)
        return InterfaceChoice(None if trouble else named, trouble or "named by cluster.interface")
    fitting = [interface for interface in interfaces if not unfit(interface)]
    for interface in fitting:
        if interface.is_default_route:
            return InterfaceChoice(interface, "the default route leaves here")
    # A bridge that leads nowhere by default is a network of this machine only.
    fitting = [interface for interface in fitting if interface.kind != "bridge"]
    if len(fitting) == 1:
        return InterfaceChoice(fitting[0], "the only interface with a link and an IPv4 address")
    if fitting:
        return InterfaceChoice(None, f"{_names(fitting)} would do and none has the default route")
    return InterfaceChoice(None, f"none of {_names(interfaces)} has a link and an IPv4 address that others can reach")


def unfit(interface: NetInterface) -> str:
    """Why nodes cannot talk over `interface`; empty when they can."""
    name = interface.name
    if interface.kind == "loopback" or name == "lo":
        return f"{name} does not leave the machine"
    if _INTERNAL_NAME.match(name) or interface.kind in _INTERNAL_KINDS:
        return f"{name} ({interface.kind}) belongs to containers or virtual machines on this node"
    if interface.master:
        return f"{name} is a part of {interface.master}"
    if not interface.is_up:
        return f"{name} is down"
    if not interface.addresses:
        return f"{name} has no IPv4 address"
    if all(address.startswith("169.254.") for address in interface.addresses):
        return f"{name} has no IPv4 address but {interface.addresses[0]}, which it gave itself"
    return ""


def _names(interfaces: Sequence[NetInterface]) -> str:
    shown = ", ".join(interface.name for interface in interfaces[:12])
    return f"{shown}, ..." if len(interfaces) > 12 else shown or "nothing"
