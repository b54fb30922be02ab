"""Network interfaces of a node from the sections `net.*`, and which of them the nodes talk over."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.remote_text import one_line
from cluster.survey.adapters import pci_path
from cluster.survey.section import NodeProbe, Question, Section, UnreadableError

_MAX_INTERFACES = 4096
_MAX_PROC_LINES = 256
_MAX_ADDRESSES = 64
# What container engines and hypervisors make for themselves; other machines cannot be reached over it.
_INTERNAL_NAME = re.compile(
    r"(docker|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|podman|kube|tun|tap|vnet|dummy|ifb|br-[0-9a-f]{12})"
)
_INTERNAL_KINDS = frozenset({"tun", "dummy", "ifb", "sit", "gre", "ipip", "vxlan", "wireguard", "can"})
_TYPES = {"1": "ether", "32": "infiniband", "772": "loopback", "776": "sit", "778": "gre"}  # ARPHRD_* of the kernel

LINKS = Question(
    "net.links",
    10,
    r"""
# Nothing but a JSON list is believed: an ip that does not know -json says so on stdout or with exit code 0, too.
if answer=$(ip -json -details addr show 2>/dev/null) && case $answer in '['*) ;; *) false ;; esac then
    printf 'json\n%s\n' "$answer"
    exit 0
fi
[ -r "$root/proc/net/fib_trie" ] || exit 127
printf 'proc\n'
# "32 host LOCAL" follows the address of this node that it is about.
while read -r first second third rest; do
    case $first in
        '|--') address=$second ;;
        /32) if [ "$second $third" = 'host LOCAL' ]; then printf 'local\t%s\n' "$address"; fi ;;
    esac
done <"$root/proc/net/fib_trie" || exit 1
printf 'end\n'
""",
)

ROUTE = Question(
    "net.route",
    10,
    r"""
if answer=$(ip -json route show 2>/dev/null) && case $answer in '['*) ;; *) false ;; esac then
    printf 'json\n%s\n' "$answer"
    exit 0
fi
[ -r "$root/proc/net/route" ] || exit 127
printf 'proc\n'
cat "$root/proc/net/route" || exit 1
printf 'end\n'
""",
)

SYSFS = Question(
    "net.sysfs",
    10,
    r"""
tab=$(printf '\t')
lines=0
first() { value=; { IFS= read -r value <"$1"; } 2>/dev/null; }
put() {
    # No value of these holds a tab; one that does is no answer.
    case $2 in *"$tab"*) return 0 ;; esac
    line="$line$tab$1=$2"
}
put_file() { first "$2"; put "$1" "$value"; }
base=$(cd -P "$root/" 2>/dev/null && pwd -P)
[ "$base" = / ] && base=
for folder in "$root/sys/class/net/"*; do
    [ -d "$folder" ] || continue
    line="interface${tab}name=${folder##*/}"
    for name in operstate carrier mtu type; do put_file "$name" "$folder/$name"; done
    place=$(cd -P "$folder/device" 2>/dev/null && pwd -P)
    put path "${place#"$base"}"
    kind=
    [ -d "$folder/bridge" ] && kind=bridge
    [ -d "$folder/bonding" ] && kind=bond
    [ -e "$folder/tun_flags" ] && kind=tun
    put kind "$kind"
    if [ -e "$folder/master" ]; then
        place=$(cd -P "$folder/master" 2>/dev/null && pwd -P)
        put master "${place##*/}"
    fi
    printf '%s\n' "$line"
    lines=$((lines + 1))
done
printf 'end\t%s\n' "$lines"
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
    details = _read_sysfs(probe.section("net.sysfs"))
    routes = _read(probe.section("net.route"), {"json": _json_routes, "proc": _proc_routes})
    section = probe.section("net.links")
    if section.ok and section.output.startswith("proc\n"):
        links = _proc_links(section, details, probe.section("net.route"))
    else:
        links = _read(section, {"json": _json_links})
    if not links:
        raise UnreadableError(f"{section.name}: no interface at all, not even lo")
    best = min((metric for metric, _ in routes), default=0)
    default = {name for metric, name in routes if metric == best}
    return tuple(_completed(link, details.get(link.name, {}), link.name in default) for link in links[:_MAX_INTERFACES])


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
        addresses=interface.addresses[:_MAX_ADDRESSES],
        is_default_route=is_default_route,
        pci_path=pci_path(details.get("path", "")),
        master=interface.master or details.get("master") or None,
    )


def _read(section: Section, formats: Mapping[str, Callable[[str], Any]]) -> Any:
    """What the reader of the section's own format makes of the rest. Raises UnreadableError."""
    if not section.ok:
        raise UnreadableError(section.trouble())
    name, _, rest = section.output.partition("\n")
    if name not in formats:
        raise UnreadableError(f"{section.name}: {one_line(name, 40)!r} is no format that was asked for")
    try:
        return formats[name](_whole(rest) if name != "json" else rest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UnreadableError(f"{section.name}: {one_line(str(error), 120)}") from None


def _whole(text: str) -> str:
    body, _, end = text.rstrip("\n").rpartition("\n")
    if end != "end":
        raise ValueError("cut off")
    return body


def _list(text: str) -> list[Any]:
    document = json.loads(text)
    if not isinstance(document, list):
        raise ValueError(f"{one_line(text, 40)!r} is no list")
    return document


def _json_links(text: str) -> list[NetInterface]:
    """Interfaces of `ip -json -details addr show`."""
    found = []
    for item in _list(text):
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
                mtu=_integer(str(item.get("mtu", ""))),
                kind=one_line(str(kind), 32),
                addresses=tuple(addresses),
                master=_name(item["master"]) if item.get("master") else None,
            )
        )
    return found


def _proc_links(section: Section, details: Mapping[str, Mapping[str, str]], routes: Section) -> list[NetInterface]:
    """Interfaces of /sys, each with those addresses of this node that lie in a network which its routes lead to."""

    def read(text: str) -> list[NetInterface]:
        # The kernel lists an address in more than one of its tables.
        told = dict.fromkeys(line.split("\t")[1] for line in text.splitlines() if line.startswith("local\t"))
        local = [ipaddress.IPv4Address(address) for address in list(told)[:_MAX_PROC_LINES]]
        networks = _read(routes, {"proc": _proc_networks})[:_MAX_PROC_LINES]
        return [
            NetInterface(
                name=name,
                is_up=fields.get("carrier") == "1",
                mtu=_integer(fields.get("mtu", "")),
                kind=fields.get("kind") or _TYPES.get(fields.get("type", ""), "other"),
                addresses=tuple(
                    f"{address}/{network.prefixlen}"
                    for device, network in networks
                    for address in local
                    if device == name and network.prefixlen and address in network
                ),
            )
            for name, fields in details.items()
        ]

    links: list[NetInterface] = _read(section, {"proc": read})
    return links


def _json_routes(text: str) -> list[tuple[int, str]]:
    """(metric, interface) of every default route; a route with several next hops counts for each."""
    found = []
    for item in _list(text):
        if item and item["dst"] == "default":
            metric = int(item.get("metric", 0))
            found += [(metric, _name(hop["dev"])) for hop in item.get("nexthops", ()) or (item,) if "dev" in hop]
    return found


def _proc_routes(text: str) -> list[tuple[int, str]]:
    rows = [line.split() for line in text.splitlines()[1:]]
    return [(int(row[6]), _name(row[0])) for row in rows if row[1] == "00000000" and row[7] == "00000000"]


def _proc_networks(text: str) -> list[tuple[str, ipaddress.IPv4Network]]:
    """(interface, network) of every line of /proc/net/route, whose numbers are little endian."""
    found = []
    for line in text.splitlines()[1:]:
        row = line.split()
        address, mask = (ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(row[at]), "little")) for at in (1, 7))
        found.append((_name(row[0]), ipaddress.IPv4Network(f"{address}/{mask}")))
    return found


def _read_sysfs(section: Section) -> dict[str, dict[str, str]]:
    """Fields by interface of `net.sysfs`; {} when the section cannot be believed."""
    lines = [line.split("\t") for line in section.output.splitlines()]
    if not section.ok or not lines or lines[-1] != ["end", str(len(lines) - 1)]:
        return {}
    found = {}
    for _, *parts in lines[:-1]:
        fields = {key: value for key, _, value in (part.partition("=") for part in parts)}
        if re.fullmatch(r"[^\s/]{1,15}", fields.get("name", "")):
            found[fields["name"]] = fields
    return found


def _address(text: str) -> str:
    """`text` as IPv4 address with prefix length. Raises ValueError."""
    return str(ipaddress.IPv4Interface(text))


def _name(text: object) -> str:
    """`text` as name of an interface. Raises ValueError."""
    if not isinstance(text, str) or not re.fullmatch(r"[^\s/]{1,15}", text):
        raise ValueError(f"{one_line(str(text), 40)!r} is no name of an interface")
    return text


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
