"""The facts of a node from the answer to its probe. What decides and cannot be read is an error, the rest a note."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cluster.env.facts import DriverFacts, NodeEnvironmentFacts, StorageRoute
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import node_command
from cluster.survey.adapters import GPUDIRECT, PORTS
from cluster.survey.facts import NodeFacts
from cluster.survey.interfaces import LINKS, ROUTE, SYSFS, NetInterface
from cluster.survey.nvidia_smi import LSPCI, SMI
from cluster.survey.section import NodeProbe, Question, Section, UnreadableError
from engine.config.cluster import ClusterConfig

_DEVICE = re.compile(r"\bdev (\S+)")
_GATEWAY = re.compile(r"\bvia .*?\bdev (\S+)")

CORES = Question(
    "env.cores",
    10,
    r"""
nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
""",
)

ROUTES = Question(
    "env.routes",
    10,
    r"""
ip -4 route show table all
""",
)

# Servers of mounted network file systems, and the interface that leads to each.
STORAGE = Question(
    "env.storage",
    20,
    r"""
[ -r "$root/proc/mounts" ] || exit 0
count=0
while read -r source folder type options rest; do
    case $type in
        nfs | nfs4 | lustre | ceph | cifs | smb3 | beegfs* | glusterfs | fuse.glusterfs) ;;
        *) continue ;;
    esac
    [ "$count" -lt 32 ] || break
    count=$((count + 1))
    listed=",$options,"
    address=${listed##*,addr=}
    if [ "$address" = "$listed" ]; then
        address=${source#//}
        address=${address%%[:@/,]*}
    else
        address=${address%%,*}
    fi
    route=$(ip -o -4 route get "$address" 2>/dev/null | head -n 1)
    printf 'storage\t%s\t%s\t%s\n' "$folder" "$address" "$route"
done <"$root/proc/mounts"
""",
)

# What lies below bonds, bridges and VLANs.
LOWER = Question(
    "env.lower",
    10,
    r"""
for link in "$root"/sys/class/net/*/lower_*; do
    [ -e "$link" ] || [ -L "$link" ] || continue
    upper=${link%/*}
    printf 'lower\t%s\t%s\n' "${upper##*/}" "${link##*/lower_}"
done
""",
)

ADAPTER_QUESTIONS = (PORTS, LSPCI, STORAGE, LOWER)
FACT_QUESTIONS = (*ADAPTER_QUESTIONS, GPUDIRECT, LINKS, ROUTE, SYSFS, SMI, CORES, ROUTES)


def read_facts(probe: NodeProbe, config: ClusterConfig, reached_by: Sequence[str] = ()) -> NodeEnvironmentFacts:
    """What the node's environment depends on. reached_by: the overrides with which a command reaches it.

    Raises ClusterError when adapters or interfaces cannot be read: a plan made without them would switch InfiniBand off
    on a node that has it.
    """
    facts = NodeFacts(probe, config)
    try:
        _, interfaces = facts.adapters, facts.interfaces
    except UnreadableError as error:
        look = node_command(probe.node, "check-nodes", "--only", "ib,net", reached_by=reached_by)
        raise ClusterError(
            f"{probe.node}: cannot tell what network it has: {error}{f' ({probe.trouble})' if probe.trouble else ''}. "
            f"Look at it with `{look}`"
        ) from error
    storage = facts.section(STORAGE)
    untold = f"ports that lead to storage servers are not known: {storage.trouble()}"
    return replace(
        adapter_facts(facts, interfaces),
        interfaces=interfaces,
        interface=facts.interface.interface,
        interface_reason=facts.interface.reason,
        gateways=_gateways(facts.section(ROUTES)),
        cores=_cores(facts.section(CORES)),
        driver=_driver(facts),
        notes=() if storage.ok else (untold,),
    )


def adapter_facts(facts: NodeFacts, interfaces: Sequence[NetInterface] = ()) -> NodeEnvironmentFacts:
    """What decides which adapters ranks use, and no more; from `ADAPTER_QUESTIONS`. Raises UnreadableError."""
    return NodeEnvironmentFacts(
        facts.node,
        facts.adapters.ports,
        gpus=facts.gpu_addresses,
        storage=_storage(facts.section(STORAGE)),
        lower_interfaces=_lower(facts.section(LOWER), interfaces),
    )


def _gateways(section: Section) -> frozenset[str] | None:
    """Interfaces by which an IPv4 route leads to a gateway, of all tables; None when routes could not be read."""
    return frozenset(_GATEWAY.findall(section.output)) if section.ok else None


def _storage(section: Section) -> tuple[StorageRoute, ...]:
    found = []
    for folder, server, route in _fields(section, "storage", 3):
        device = _DEVICE.search(route)
        if device is not None and device[1] != "lo":
            found.append(StorageRoute(one_line(folder), one_line(server, 80), device[1]))
    return tuple(found)


def _lower(section: Section, interfaces: Sequence[NetInterface]) -> Mapping[str, tuple[str, ...]]:
    below: dict[str, set[str]] = defaultdict(set)
    for upper, lower in _fields(section, "lower", 2):
        below[upper].add(lower)
    for interface in interfaces:
        if interface.master:
            below[interface.master].add(interface.name)
    return {upper: tuple(sorted(names)) for upper, names in below.items()}


def _cores(section: Section) -> int | None:
    text = section.output.strip()
    return int(text) if section.ok and re.fullmatch(r"[1-9]\d{0,5}", text) else None


def _driver(facts: NodeFacts) -> DriverFacts:
    try:
        found = facts.gpudirect
    except UnreadableError:
        return DriverFacts()
    dma_buf = (
        found.has_open_driver if found.kernel_has_dmabuf is None else found.has_open_driver and found.kernel_has_dmabuf
    )
    return DriverFacts(peer_memory=found.peer_memory is not None, dma_buf=dma_buf)


def _fields(section: Section, word: str, count: int) -> Iterator[list[str]]:
    """The tab-separated fields of every line of a good section that begins with `word`."""
    for line in section.output.splitlines() if section.ok else ():
        first, *rest = line.split("\t")
        if first == word and len(rest) == count:
            yield rest
