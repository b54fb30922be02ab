"""The facts of a node from the answer to its probe. What decides and cannot be read is an error, the rest a note."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.env.facts import NodeEnvironmentFacts, StorageRoute
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import node_command
from cluster.survey.adapters import GPUDIRECT, PORTS
from cluster.survey.facts import NodeFacts
from cluster.survey.interfaces import LINKS, ROUTE, SYSFS, NetInterface
from cluster.survey.nvidia_smi import LSPCI, SMI
from cluster.survey.section import Question, Section, UnreadableError, listed
from cluster.survey.sysfs import python_question

_GATEWAY = re.compile(r"\bvia .*?\bdev (\S+)")

CORES = Question("env.cores", 10, "unset OMP_NUM_THREADS OMP_THREAD_LIMIT\nnproc")  # where a login sets them

ROUTES = Question(
    "env.routes",
    10,
    r"""
ip -4 route show table all
""",
)

# Servers of mounted network file systems, and the interface to each; what lies below bonds, bridges and VLANs.
CARRIERS = python_question(
    "env.carriers",
    20,
    r"""
import subprocess

networked = re.compile(r"nfs4?|lustre|ceph|cifs|smb3|beegfs.*|(fuse\.)?glusterfs")
told = {"storage": [], "lower": [[one.parent.name, one.name[6:]] for one in root.glob("sys/class/net/*/lower_*")]}
for source, folder, kind, options, *_ in mounts(root / "proc/mounts"):
    if networked.fullmatch(kind) and len(told["storage"]) < 32:
        given = re.search(r"(?:^|,)addr=([^,]*)", options)
        server = given[1] if given else re.split("[:@/,]", source.lstrip("/"))[0]
        route = subprocess.run(["ip", "-o", "-4", "route", "get", server], capture_output=True).stdout.decode()
        told["storage"] += [[folder, server, way] for way in re.findall(r"\bdev (\S+)", route)[:1] if way != "lo"]
print(json.dumps(told))
""",
)

ADAPTER_QUESTIONS = (PORTS, LSPCI, CARRIERS)
FACT_QUESTIONS = (*ADAPTER_QUESTIONS, GPUDIRECT, LINKS, ROUTE, SYSFS, SMI, CORES, ROUTES)


def read_facts(facts: NodeFacts, overrides: Sequence[str] = ()) -> NodeEnvironmentFacts:
    """What the node's environment depends on. overrides: see `node_command`.

    Raises ClusterError when adapters or interfaces cannot be read: a plan made without them would switch InfiniBand off
    on a node that has it.
    """
    probe = facts.probe
    try:
        _, interfaces = facts.adapters, facts.interfaces
    except UnreadableError as error:
        look = node_command(probe.node, "check-nodes", "--only", "ib,net", overrides=overrides)
        raise ClusterError(
            f"{probe.node}: cannot tell what network it has: {error}{f' ({probe.trouble})' if probe.trouble else ''}. "
            f"Look at it with `{look}`"
        ) from error
    return replace(
        adapter_facts(facts, interfaces),
        interfaces=interfaces,
        interface=facts.interface.interface,
        interface_reason=facts.interface.reason,
        gateways=_gateways(facts.section(ROUTES)),
        cores=_cores(facts.section(CORES)),
        has_gpudirect=_has_gpudirect(facts),
    )


def adapter_facts(facts: NodeFacts, interfaces: Sequence[NetInterface] = ()) -> NodeEnvironmentFacts:
    """What decides which adapters ranks use, and no more; from `ADAPTER_QUESTIONS`. Raises UnreadableError."""
    storage: tuple[StorageRoute, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        storage = facts.section(CARRIERS).read(
            lambda told: tuple(StorageRoute(*(one_line(word, 200) for word in row)) for row in listed(told["storage"]))
        )
    except UnreadableError as error:
        notes = (f"ports that lead to storage servers are not known: {error}",)
    return NodeEnvironmentFacts(
        facts.node,
        facts.adapters.ports,
        gpus=facts.gpu_addresses,
        storage=storage,
        lower_interfaces=_lower(facts.section(CARRIERS), interfaces),
        notes=notes,
    )


def _gateways(section: Section) -> frozenset[str] | None:
    """Interfaces by which an IPv4 route leads to a gateway, of all tables; None when routes could not be read."""
    return frozenset(_GATEWAY.findall(section.output)) if section.ok else None


def _lower(section: Section, interfaces: Sequence[NetInterface]) -> Mapping[str, tuple[str, ...]]:
    pairs = {(interface.master, interface.name) for interface in interfaces if interface.master}
    with contextlib.suppress(UnreadableError):
        pairs |= section.read(lambda told: {(str(upper), str(lower)) for upper, lower in listed(told["lower"])})
    below: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for upper, lower in sorted(pairs):
        below[upper] += (lower,)
    return below


def _cores(section: Section) -> int | None:
    with contextlib.suppress(UnreadableError):
        return section.read(int)
    return None


def _has_gpudirect(facts: NodeFacts) -> bool | None:
    try:
        found = facts.gpudirect
    except UnreadableError:
        return None
    return found.peer_memory is not None or (found.has_open_driver and found.kernel_has_dmabuf is not False)
