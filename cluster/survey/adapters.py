"""What the sections `ib.*` of the probe say, as values. Nothing is judged, and nothing that was not read is made up.

Every section ends with a line `end`; one without it, or with a line that makes no sense, is an UnreadableError: whoever
asks for the ports of such an answer gets the reason instead of fewer ports.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cluster.remote_text import one_line
from cluster.survey.section import Question, Section, UnreadableError

_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_STATE = re.compile(r"\d+: *([A-Za-z_]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s\b")
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})
_MAX_LINES = 2048  # ports, twice: more than any node has, and few enough to compare each with each

PORTS = Question(
    "ib.ports",
    20,
    r"""
tab=$(printf '\t')
lines=0
# first FILE: its first line in $value; empty when it cannot be read.
first() { value=; { IFS= read -r value <"$1"; } 2>/dev/null; }
# put KEY VALUE: one more field of $line. No value of these holds a tab; one that does is no answer.
put() { case $2 in *"$tab"*) ;; *) line="$line$tab$1=$2" ;; esac; }
put_file() { first "$2"; put "$1" "$value"; }
show() { printf '%s\n' "$line"; lines=$((lines + 1)); }
base=$(cd -P "$root/" 2>/dev/null && pwd -P)
[ "$base" = / ] && base=
routes=$root/proc/net/route
[ -r "$routes" ] || routes=/dev/null
# put_path KEY FOLDER: where a link to a device leads, seen from the node's own root.
put_path() { place=$(cd -P "$2" 2>/dev/null && pwd -P); put "$1" "${place#"$base"}"; }

put_device() {
    put_path path "$device/device"
    put_file numa_node "$device/device/numa_node"
    put_file width "$device/device/current_link_width"
    put_file width_max "$device/device/max_link_width"
    put_file speed "$device/device/current_link_speed"
    put_file speed_max "$device/device/max_link_speed"
    if [ -e "$device/device/physfn" ]; then put physfn 1; else put physfn 0; fi
}

# The interface of port $1: what its first GID is tied to, else the one that counts as that port of the device.
put_netdev() {
    first "$device/ports/$1/gid_attrs/ndevs/0"
    netdev=$value
    for folder in "$device/device/net/"*; do
        [ -z "$netdev" ] || break
        # A partition of InfiniBand (ib0.8001) has a parent; the device's own interface has none.
        { [ -d "$folder" ] && [ ! -e "$folder/parent" ]; } || continue
        first "$folder/dev_port"
        [ "${value:-0}" = "$(($1 - 1))" ] && netdev=${folder##*/}
    done
    [ -n "$netdev" ] || return 0
    put netdev "$netdev"
    put_file netdev_state "$root/sys/class/net/$netdev/operstate"
    put_file netdev_mtu "$root/sys/class/net/$netdev/mtu"
    if [ -e "$root/sys/class/net/$netdev/master" ] || [ -e "$root/sys/class/net/$netdev/bonding" ]; then
        put bonded 1
    fi
    if has_default_route "$netdev"; then put default_route 1; fi
}

# has_default_route NETDEV: also when what it is a part of (a bond, a bridge) has it.
has_default_route() {
    place=$(cd -P "$root/sys/class/net/$1/master" 2>/dev/null && pwd -P)
    while read -r name destination rest; do
        [ "$destination" = 00000000 ] || continue
        case $name in "$1" | "${place##*/}") return 0 ;; esac
    done <"$routes"
    return 1
}

put_gids() {
    index=0
    while [ "$index" -lt 32 ] && [ -e "$1/gids/$index" ]; do
        first "$1/gids/$index"
        address=$value
        case $address in
            '' | 0000:0000:0000:0000:0000:0000:0000:0000) ;;
            *)
                # Reading the type of an unused entry is an error of the kernel's: no answer.
                first "$1/gid_attrs/types/$index"
                put "gid.$index" "$address $value"
                ;;
        esac
        index=$((index + 1))
    done
}

for device in "$root/sys/class/infiniband/"*; do
    [ -e "$device" ] || [ -L "$device" ] || continue
    found=0
    for port in "$device/ports/"*; do
        [ -d "$port" ] || continue
        found=1
        line=port
        put dev "${device##*/}"
        put port "${port##*/}"
        for name in state phys_state rate link_layer; do put_file "$name" "$port/$name"; done
        put_device
        put_netdev "${port##*/}"
        put_gids "$port"
        show
    done
    if [ "$found" = 0 ]; then
        line=portless
        put dev "${device##*/}"
        show
    fi
done

for device in "$root/sys/bus/pci/devices/"*; do
    first "$device/class"
    case $value in 0x0207*) ;; *) continue ;; esac
    # An InfiniBand adapter; without this folder no driver offers it.
    [ -d "$device/infiniband" ] && continue
    line=driverless
    put_path path "$device"
    show
done
printf 'end\t%s\n' "$lines"
""",
)

GPUDIRECT = Question(
    "ib.gpudirect",
    15,
    r"""
for file in sys/module/nvidia_peermem/version sys/kernel/mm/memory_peers/nv_mem/version \
    sys/kernel/mm/memory_peers/nv_mem_nc/version sys/module/nvidia; do
    if [ -e "$root/$file" ]; then answer=yes; else answer=no; fi
    printf 'exists\t/%s\t%s\n' "$file" "$answer"
done
# Only the open kernel modules of NVIDIA export DMA-BUF; its first line names them.
driver=
[ -r "$root/proc/driver/nvidia/version" ] && IFS= read -r driver <"$root/proc/driver/nvidia/version"
printf 'driver\t%s\n' "$driver"
printf 'kernel\t%s\n' "$(uname -r)"
grep -q ' ib_umem_dmabuf_get' "$root/proc/kallsyms" 2>/dev/null
case $? in
    0) answer=yes ;;
    1) answer=no ;;
    *) answer=unreadable ;;
esac
printf 'dmabuf\t%s\n' "$answer"
printf 'end\n'
""",
)


@dataclass(frozen=True)
class HcaPort:
    """One port of one InfiniBand or RoCE adapter, from /sys/class/infiniband.

    device, port: `mlx5_0`, 1. link_layer: InfiniBand or Ethernet. state: ACTIVE, DOWN, INIT, ... phys_state: LinkUp,
    Polling, Disabled, ... rate_gbps: what is set up now. pci_path: PCI addresses from the root complex to the adapter
    (`0000:00:01.0`, ..., the adapter last). netdev: its network interface. gids: index -> (type, address).
    pcie_gts: GT/s per lane. None, or "" for a state: the node did not
    tell.
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
    for word, fields in known_lines(section):
        if word == "port":
            port = _port(fields, section.name)
            if port.name in ports:
                raise UnreadableError(f"{section.name}: {port.name} comes twice")
            ports[port.name] = port
        elif word == "portless":
            portless.append(_device(fields, section.name))
        elif word == "driverless":
            driverless.append(pci_path(fields.get("path", "")))
    ordered = sorted(ports.values(), key=lambda port: _natural(port.name))
    return Adapters(tuple(ordered), tuple(sorted(portless, key=_natural)), tuple(driverless))


def parse_gpudirect(section: Section) -> GpuDirect:
    """What section `ib.gpudirect` says. Raises UnreadableError."""
    whole = _whole_lines(section)
    exists = {line[1]: line[2] for line in whole if line[0] == "exists" and len(line) == 3}
    told = {line[0]: line[1] for line in whole if len(line) == 2}
    module, peers = exists.pop("/sys/module/nvidia", None), exists
    if module is None or not peers or not {*peers.values(), module} <= {"yes", "no"} or "dmabuf" not in told:
        raise UnreadableError(f"{section.name}: not what was asked for")
    driver = told.get("driver", "")
    return GpuDirect(
        peer_memory=next((name for name, answer in peers.items() if answer == "yes"), None),
        has_driver=module == "yes" or bool(driver),
        has_open_driver="Open Kernel Module" in driver,
        kernel=one_line(told.get("kernel", ""), 64),
        kernel_has_dmabuf={"yes": True, "no": False}.get(told["dmabuf"]),
    )


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


def _whole_lines(section: Section) -> list[list[str]]:
    """Lines of a section split at tabs, without `end`, which must be the last. Raises UnreadableError."""
    if not section.ok:
        raise UnreadableError(section.trouble())
    lines = [line.split("\t") for line in section.output.splitlines() if line]
    if not lines or [at for at, line in enumerate(lines, start=1) if line[0] == "end"] != [len(lines)]:
        raise UnreadableError(f"{section.name}: cut off")
    return lines[:-1]


def known_lines(section: Section) -> Iterator[tuple[str, dict[str, str]]]:
    """(word, fields) of every line; `end` must count them. Raises UnreadableError."""
    lines = _whole_lines(section)
    told = section.output.rsplit("\n", 1)[-1].split("\t")[1:]
    known = [line for line in lines if len(line) > 1 and all("=" in part for part in line[1:])]
    if told != [str(len(known))]:
        raise UnreadableError(
            f"{section.name}: {len(known)} whole lines where the node sent {one_line(' '.join(told), 20) or '?'}"
        )
    if len(known) > _MAX_LINES:
        raise UnreadableError(f"{section.name}: {len(known)} lines, more than a node can have")
    for word, *parts in known:
        pairs = (part.partition("=") for part in parts)
        yield word, {key: value.strip() for key, _, value in pairs}


def _port(fields: Mapping[str, str], section: str) -> HcaPort:
    device = _device(fields, section)
    return HcaPort(
        device=device,
        port=_port_number(fields, section),
        link_layer=one_line(fields.get("link_layer", ""), 32),
        state=_matched(_STATE, fields.get("state", "")) or "",
        phys_state=_matched(_STATE, fields.get("phys_state", "")) or "",
        rate_gbps=_number(_RATE, fields.get("rate", "")),
        pci_path=pci_path(fields.get("path", "")),
        netdev=_interface(fields.get("netdev", "")),
        numa_node=_integer(fields.get("numa_node", "")),
        is_virtual_function=fields.get("physfn") == "1",
        is_bond="bond" in device or fields.get("bonded") == "1",
        pcie_width=_width(fields.get("width", "")),
        pcie_width_max=_width(fields.get("width_max", "")),
        gids=dict(_gids(fields)),
        netdev_is_up={"up": True, "down": False}.get(fields.get("netdev_state", "")),
        has_default_route=fields.get("default_route") == "1",
        netdev_mtu=_integer(fields.get("netdev_mtu", "")),
        pcie_gts=_number(_SPEED, fields.get("speed", "")),
    )


def _gids(fields: Mapping[str, str]) -> Iterator[tuple[int, tuple[str, str]]]:
    for key, value in fields.items():
        address, _, kind = value.partition(" ")
        if re.fullmatch(r"gid\.\d{1,3}", key) and _GID.fullmatch(address):
            yield int(key[4:]), (one_line(kind, 32), address)


def port_name(fields: Mapping[str, str], section: str) -> str:
    """`mlx5_0:1`. Raises UnreadableError."""
    return f"{_device(fields, section)}:{_port_number(fields, section)}"


def _device(fields: Mapping[str, str], section: str) -> str:
    name = fields.get("dev", "")
    if not _DEVICE.fullmatch(name):
        raise UnreadableError(f"{section}: {one_line(name, 40)!r} is no name of an adapter")
    return name


def _port_number(fields: Mapping[str, str], section: str) -> int:
    number = _integer(fields.get("port", ""))
    if number is None or number < 1:
        raise UnreadableError(f"{section}: {one_line(fields.get('port', ''), 20)!r} is no number of a port")
    return number


def _matched(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.match(text)
    return found[1] if found else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = _matched(pattern, text)
    return float(found) if found is not None and len(found) < 12 else None


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _width(text: str) -> int | None:
    """Lanes; None for what says nothing: 0, 63 and 255 are how the kernel and adapters write `unknown`."""
    lanes = _integer(text)
    return lanes if lanes in _WIDTHS else None


def _interface(text: str) -> str | None:
    return text if re.fullmatch(r"[^\s/\x00]{1,15}", text) else None


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
