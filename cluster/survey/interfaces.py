"""Network interfaces of a node, and which of them the nodes talk over."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.remote_text import one_line
from cluster.survey.adapters import integer
from cluster.survey.section import Section, listed
from cluster.survey.sysfs import python_question

# What container engines and hypervisors make for themselves; other machines cannot be reached over it.
_INTERNAL_NAME = re.compile(
    r"(docker|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|podman|kube|tun|tap|vnet|dummy|ifb|br-[0-9a-f]{12})"
)
_INTERNAL_KINDS = frozenset({"tun", "dummy", "ifb", "sit", "gre", "ipip", "vxlan", "wireguard", "can"})

# Nothing but a JSON list is believed: an ip that does not know -json says so on stdout or with exit code 0, too.
# A node without such an ip, as containers are, tells in the same form what the kernel shows.
LINKS = python_question(
    "net.links",
    15,
    r"""
import fcntl, socket, subprocess

types = {"1": "ether", "32": "infiniband", "772": "loopback"}  # ARPHRD_* of the kernel
marks = {"bridge": "bridge", "bonding": "bond", "tun_flags": "tun"}


def ip(*words):
    try:
        asked = subprocess.run(["ip", "-json", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        told = json.loads(asked.stdout)
    except (OSError, ValueError):
        return None
    return told if asked.returncode == 0 and isinstance(told, list) else None


def look(name):
    folder = pathlib.Path("/sys/class/net", name)
    asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ask = lambda request: fcntl.ioctl(asking, request, name.encode().ljust(40, b"\0"))[16:]
    flags = int.from_bytes(ask(0x8913)[:2], "little")  # SIOCGIFFLAGS: IFF_UP, IFF_RUNNING
    link = {"ifname": name, "flags": [word for bit, word in ((1, "UP"), (64, "LOWER_UP")) if flags & bit]}
    kind = next((kind for file, kind in marks.items() if (folder / file).exists()), types.get(tell(folder / "type")))
    link.update(mtu=int(tell(folder / "mtu")), link_type=kind or "other", addr_info=[])
    if (folder / "master").exists():
        link["master"] = (folder / "master").resolve().name
    try:
        local, mask = (socket.inet_ntoa(ask(request)[4:8]) for request in (0x8915, 0x891B))  # SIOCGIFADDR, NETMASK
    except OSError:
        return link  # it has no IPv4 address
    prefix = bin(int.from_bytes(socket.inet_aton(mask), "big")).count("1")
    return dict(link, addr_info=[{"family": "inet", "local": local, "prefixlen": prefix}])


def route(device, to, gateway, _, __, ___, metric, mask, *____):
    told = {"dst": "default" if to == mask == "00000000" else to, "dev": device, "metric": int(metric)}
    return told if gateway == "00000000" else dict(told, gateway=gateway)


links, routes = ip("-details", "addr", "show"), ip("-4", "route", "show", "table", "all")
if links is None:
    links = [look(name) for _, name in socket.if_nameindex()]
if routes is None:
    rows = pathlib.Path("/proc/net/route").read_text().splitlines()[1:]
    routes = [route(*row.split()) for row in rows]
print(json.dumps({"links": links, "routes": routes}))
""",
)


@dataclass(frozen=True)
class NetInterface:
    """One network interface. addresses: IPv4 with prefix length, `10.0.0.1/24`. kind: ether, loopback, infiniband,
    bridge, bond, veth, tun, vlan, ... is_default_route: IPv4 packets to unknown places leave here. master: the bridge
    or bond that it is a part of. is_up: switched on, and the link is there."""

    name: str
    is_up: bool
    mtu: int | None = None
    kind: str = "ether"
    addresses: tuple[str, ...] = ()
    is_default_route: bool = False
    master: str | None = None


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface that the nodes talk over, or None, and why."""

    interface: NetInterface | None
    reason: str


@dataclass(frozen=True)
class Network:
    """What section `net.links` says. gateways: interfaces by which an IPv4 route of any table leads to a gateway."""

    interfaces: tuple[NetInterface, ...]
    gateways: frozenset[str]


def read_network(section: Section) -> Network:
    """Every interface of the node, in its order. Raises UnreadableError when links or routes cannot be believed."""

    def take(told: Any) -> Network:
        links, hops = _links(told["links"]), [*_hops(told["routes"])]
        if not links:
            raise ValueError("no interface at all, not even lo")
        ways = [(metric, name) for metric, name, is_default, _ in hops if is_default]
        best = min((metric for metric, _ in ways), default=0)
        default = {name for metric, name in ways if metric == best}
        interfaces = tuple(replace(link, is_default_route=link.name in default) for link in links)
        return Network(interfaces, frozenset(name for _, name, _, has_gateway in hops if has_gateway))

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


def _links(document: Any) -> list[NetInterface]:
    """Interfaces of `ip -json -details addr show`."""
    found = []
    for item in listed(document):
        if not item:  # iproute2 5.x prints {} for what a filter drops
            continue
        flags = item["flags"]
        addresses = [
            _address(f"{entry['local']}/{entry['prefixlen']}")
            for entry in item.get("addr_info", [])
            if entry.get("family") == "inet" and entry.get("scope") != "host"
        ]
        kind = item.get("linkinfo", {}).get("info_kind") or item.get("link_type") or "ether"
        found.append(
            NetInterface(
                name=_name(item["ifname"]),
                is_up="UP" in flags and "LOWER_UP" in flags,
                mtu=integer(str(item.get("mtu", ""))),
                kind=one_line(str(kind)),
                addresses=tuple(addresses),
                master=_name(item["master"]) if item.get("master") else None,
            )
        )
    return found


def _hops(document: Any) -> Iterator[tuple[int, str, bool, bool]]:
    """(metric, interface, is a default route of the main table, has a gateway) of every next hop of every route."""
    for item in listed(document):
        if item:
            is_default = item["dst"] == "default" and item.get("table", "main") == "main"
            for hop in item.get("nexthops", ()) or (item,):
                if "dev" in hop:
                    metric, has_gateway = int(item.get("metric", 0)), "gateway" in hop or "via" in hop
                    yield metric, _name(hop["dev"]), is_default, has_gateway


def _address(text: str) -> str:
    """`text` as IPv4 address with prefix length. Raises ValueError."""
    return str(ipaddress.IPv4Interface(text))


def _name(text: object) -> str:
    """`text` as name of an interface. Raises ValueError."""
    if not isinstance(text, str) or not re.fullmatch(r"[^\s/]{1,15}", text):
        raise ValueError(f"{one_line(str(text))!r} is no name of an interface")
    return text
