"""What the sections `ib.*` of the probe say, as values. Nothing is judged, and nothing that was not read is made up.

Every section ends with a line `end`; one without it, or with a line that makes no sense, is an UnreadableError: whoever
asks for the ports of such an answer gets the reason instead of fewer ports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from cluster.parse.fabric import HcaPort
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe, Section
from cluster.remote_text import one_line

_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_STATE = re.compile(r"\d+: *([A-Za-z_]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s\b")
_STAMP = re.compile(r"\[ *(\d{1,12}\.\d{1,9})\]")
_KERNEL_DEVICE = re.compile(r"\bmlx[45]_core ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})
_LARGEST_COUNTER = 1 << 64
_MAX_LINES = 2048  # ports, twice: more than any node has, and few enough to compare each with each


@dataclass(frozen=True)
class Adapters:
    """Section `ib.ports`.

    portless: adapters that show no port. driverless_paths: `pci_path` of InfiniBand adapters that no driver offers.
    gpu_paths: the same of every GPU of NVIDIA.
    """

    ports: tuple[HcaPort, ...] = ()
    portless: tuple[str, ...] = ()
    driverless_paths: tuple[tuple[str, ...], ...] = ()
    gpu_paths: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class CounterSamples:
    """Section `ib.counters`: counters of each port (`mlx5_0:1`) by name, and the same about a second later."""

    first: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    second: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def deltas(self, port: str) -> dict[str, int]:
        """How much each counter of `port` grew; only those that both samples tell. Below zero: it was reset."""
        before, after = self.first.get(port, {}), self.second.get(port, {})
        return {name: after[name] - before[name] for name in before if name in after}


@dataclass(frozen=True)
class KernelEvent:
    """A line of the kernel log about adapters. at_s: seconds after boot. address: the PCI device that it is about."""

    at_s: float | None
    address: str | None
    text: str


@dataclass(frozen=True)
class KernelLog:
    """Section `ib.kernel`: what the drivers of adapters said since boot. uptime_s: None when the node did not tell."""

    events: tuple[KernelEvent, ...]
    uptime_s: float | None


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


def parse_ports(probe: NodeProbe) -> tuple[HcaPort, ...]:
    """Every port of every adapter in the order of their names, with the counters of the last sample.

    () when the section cannot be believed: ask `parse_adapters` where that must not look like no ports.
    """
    try:
        adapters = parse_adapters(probe.section("ib.ports"))
    except UnreadableError:
        return ()
    try:
        counters = parse_counters(probe.section("ib.counters")).second
    except UnreadableError:
        counters = {}
    return tuple(_with_counters(port, counters.get(port.name, {})) for port in adapters.ports)


def parse_adapters(section: Section) -> Adapters:
    """The adapters of section `ib.ports`. Raises UnreadableError."""
    ports: dict[str, HcaPort] = {}
    portless: list[str] = []
    paths: dict[str, list[tuple[str, ...]]] = {"driverless": [], "gpu": []}
    for word, fields in _lines(section):
        if word == "port":
            port = _port(fields, section.name)
            if port.name in ports:
                raise UnreadableError(f"{section.name}: {port.name} comes twice")
            ports[port.name] = port
        elif word == "portless":
            portless.append(_device(fields, section.name))
        elif word in paths:
            paths[word].append(pci_path(fields.get("path", "")))
    ordered = sorted(ports.values(), key=lambda port: _natural(port.name))
    return Adapters(
        tuple(ordered), tuple(sorted(portless, key=_natural)), tuple(paths["driverless"]), tuple(paths["gpu"])
    )


def parse_counters(section: Section) -> CounterSamples:
    """Both samples of section `ib.counters`. Raises UnreadableError, also when they are not about the same ports."""
    samples: dict[str, dict[str, Mapping[str, int]]] = {"sample1": {}, "sample2": {}}
    for word, fields in _lines(section):
        if word in samples:
            port = f"{_device(fields, section.name)}:{_port_number(fields, section.name)}"
            samples[word][port] = {
                name: _counter(text, section.name) for name, text in fields.items() if name not in {"dev", "port"}
            }
    if samples["sample1"].keys() != samples["sample2"].keys():
        raise UnreadableError(f"{section.name}: the two samples are not about the same ports")
    return CounterSamples(samples["sample1"], samples["sample2"])


def parse_kernel(section: Section) -> KernelLog:
    """What section `ib.kernel` says. Raises UnreadableError."""
    lines = _whole(section)
    if not any(line[0] == "first" for line in lines):
        raise UnreadableError(f"{section.name}: no line of a kernel log", one_line(section.output))
    events = []
    for line in lines:
        if line[0] == "line":
            text = one_line(" ".join(line[1:]), 300)
            stamp, address = _STAMP.match(text), _KERNEL_DEVICE.search(text)
            event = KernelEvent(float(stamp[1]) if stamp else None, address[1] if address else None, text)
            events.append(event)
    uptime = next((line[1] for line in lines if line[0] == "uptime" and len(line) == 2), "")
    return KernelLog(tuple(events), float(uptime) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", uptime) else None)


def parse_gpudirect(section: Section) -> GpuDirect:
    """What section `ib.gpudirect` says. Raises UnreadableError."""
    whole = _whole(section)
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
    if not gid.startswith("0000:0000:0000:0000:0000:ffff:") or not _GID.fullmatch(gid):
        return None
    number = int(gid[-9:].replace(":", ""), 16)
    return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))


def roce_gid_index(port: HcaPort) -> int | None:
    """The lowest GID index of `port` that is RoCE v2 over IPv4, as NCCL_IB_GID_INDEX wants it; None without one."""
    fitting = (index for index, (kind, gid) in port.gids.items() if kind == "RoCE v2" and ipv4_of_gid(gid) is not None)
    return min(fitting, default=None)


def _whole(section: Section) -> list[list[str]]:
    """Lines of a section split at tabs, without `end`, which must be the last. Raises UnreadableError."""
    if not section.ok:
        raise UnreadableError(section.trouble())
    lines = [line.split("\t") for line in section.output.splitlines() if line]
    if not lines or [at for at, line in enumerate(lines, start=1) if line[0] == "end"] != [len(lines)]:
        raise UnreadableError(f"{section.name}: cut off")
    return lines[:-1]


def _lines(section: Section) -> Iterator[tuple[str, dict[str, str]]]:
    """(word, fields) of every line; `end` must count them. Raises UnreadableError."""
    lines = _whole(section)
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
        yield word, {key: value.replace("%09", " ").replace("%25", "%").strip() for key, _, value in pairs}


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
        pcie_gts_max=_number(_SPEED, fields.get("speed_max", "")),
    )


def _gids(fields: Mapping[str, str]) -> Iterator[tuple[int, tuple[str, str]]]:
    for key, value in fields.items():
        address, _, kind = value.partition(" ")
        if re.fullmatch(r"gid\.\d{1,3}", key) and _GID.fullmatch(address):
            yield int(key[4:]), (one_line(kind, 32), address)


def _with_counters(port: HcaPort, counters: Mapping[str, int]) -> HcaPort:
    return replace(port, counters=dict(counters))


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


def _counter(text: str, section: str) -> int:
    value = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else _LARGEST_COUNTER
    if value >= _LARGEST_COUNTER:
        raise UnreadableError(f"{section}: {one_line(text, 40)!r} is no counter")
    return value


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
