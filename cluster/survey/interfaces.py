"""Network interfaces of a node from the sections `net.*`, and which of them the nodes talk over."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.remote_text import one_line
from cluster.survey.adapters import integer, pci_path
from cluster.survey.section import NodeProbe, Question, UnreadableError, listed
from cluster.survey.sysfs import python_question

# What container engines and hypervisors make for themselves; other machines cannot be reached over it.
_INTERNAL_NAME = re.compile(
    r"(docker|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|podman|kube|tun|tap|vnet|dummy|ifb|br-[0-9a-f]{12})"
)
_INTERNAL_KINDS = frozenset({"tun", "dummy", "ifb", "sit", "gre", "ipip", "vxlan", "wireguard", "can"})

# Nothing but a JSON list is believed: an ip that does not know -json says so on stdout or with exit code 0, too.
# A node without such an ip, as containers are, tells in the same form what Python finds.
LINKS = Question(
    "net.links",
    10,
    r"""
answer=$(ip -json -details addr show 2>/dev/null) && case $answer in '['*) printf '%s\n' "$answer"; exit 0 ;; esac
command -v python3 >/dev/null || exit 127
python3 -I - <<'PYTHON'
import fcntl, json, pathlib, socket

TYPES = {"1": "ether", "32": "infiniband", "772": "loopback"}  # ARPHRD_* of the kernel
FLAGS = {1 << 0: "UP", 1 << 6: "LOWER_UP"}  # IFF_UP, IFF_RUNNING
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
links = []
for _, name in socket.if_nameindex():
    def ask(request):
        return fcntl.ioctl(asking, request, name.encode().ljust(40, b"\0"))[16:]
    def tell(file):
        return pathlib.Path("/sys/class/net", name, file).read_text().strip()
    flags = int.from_bytes(ask(0x8913)[:2], "little")  # SIOCGIFFLAGS
    link = {"ifname": name, "flags": [word for bit, word in FLAGS.items() if flags & bit]}
    link.update(mtu=int(tell("mtu")), link_type=TYPES.get(tell("type"), "other"), addr_info=[])
    try:
        address, mask = (socket.inet_ntoa(ask(request)[4:8]) for request in (0x8915, 0x891B))  # SIOCGIFADDR, NETMASK
        prefix = bin(int.from_bytes(socket.inet_aton(mask), "big")).count("1")
        link["addr_info"].append({"family": "inet", "local": address, "prefixlen": prefix})
    except OSError:
        pass  # it has no IPv4 address
    links.append(link)
print(json.dumps(links))
PYTHON
""",
)

ROUTE = Question(
    "net.route",
    10,
    r"""
answer=$(ip -json route show 2>/dev/null) && case $answer in '['*) printf '%s\n' "$answer"; exit 0 ;; esac
[ -r /proc/net/route ] || exit 127
awk 'BEGIN { printf "[" }
    NR > 1 && $2 $8 == "0000000000000000" {
        printf "%s{\"dst\": \"default\", \"dev\": \"%s\", \"metric\": %d}", comma, $1, $7
        comma = ", "
    }
    END { print "]" }' /proc/net/route
""",
)

SYSFS = python_question(
    "net.sysfs",
    10,
    r"""
told = {}
for folder in root.glob("sys/class/net/*"):
    marks = {"bridge": "bridge", "bonding": "bond", "tun_flags": "tun"}
    kind = next((kind for file, kind in marks.items() if (folder / file).exists()), "")
    master = place(folder / "master").rpartition("/")[2]
    told[folder.name] = {"path": place(folder / "device"), "kind": kind, "master": master}
print(json.dumps(told))
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
    pci_path: tuple[str, ...] = ()
    master: str | None = None


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface that the nodes talk over, or None, and why."""

    interface: NetInterface | None
    reason: str


def read_interfaces(probe: NodeProbe) -> tuple[NetInterface, ...]:
    """Every interface of the node, in its order. Raises UnreadableError when links or routes cannot be believed.

    What /sys adds (speed, where the adapter sits) may be missing without harm.
    """
    try:
        details = probe.section("net.sysfs").read(
            lambda told: {name: {key: str(fact) for key, fact in facts.items()} for name, facts in told.items()}
        )
    except UnreadableError:
        details = {}
    routes = probe.section("net.route").read(_default_routes)
    links = probe.section("net.links").read(_links)
    if not links:
        raise UnreadableError("net.links: no interface at all, not even lo")
    best = min((metric for metric, _ in routes), default=0)
    default = {name for metric, name in routes if metric == best}
    return tuple(_completed(link, details.get(link.name, {}), link.name in default) for link in links)


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


def _completed(interface: NetInterface, details: Mapping[str, str], is_default_route: bool) -> NetInterface:
    """With what /sys and the routes tell."""
    return replace(
        interface,
        # ip does not tell kinds without linkinfo; /sys does.
        kind=details["kind"] if interface.kind == "ether" and details.get("kind") else interface.kind,
        is_default_route=is_default_route,
        pci_path=pci_path(details.get("path", "")),
        master=interface.master or details.get("master") or None,
    )


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


def _default_routes(document: Any) -> list[tuple[int, str]]:
    """(metric, interface) of every default route; a route with several next hops counts for each."""
    found = []
    for item in listed(document):
        if item and item["dst"] == "default":
            metric = int(item.get("metric", 0))
            found += [(metric, _name(hop["dev"])) for hop in item.get("nexthops", ()) or (item,) if "dev" in hop]
    return found


def _address(text: str) -> str:
    """`text` as IPv4 address with prefix length. Raises ValueError."""
    return str(ipaddress.IPv4Interface(text))


def _name(text: object) -> str:
    """`text` as name of an interface. Raises ValueError."""
    if not isinstance(text, str) or not re.fullmatch(r"[^\s/]{1,15}", text):
        raise ValueError(f"{one_line(str(text))!r} is no name of an interface")
    return text
