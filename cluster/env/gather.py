"""The facts of a node from the answer to its probe. What decides and cannot be read is an error, the rest a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.env.facts import NodeEnvironmentFacts, StorageRoute
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import node_command
from cluster.survey.adapters import GPUDIRECT, PORTS
from cluster.survey.facts import NodeFacts
from cluster.survey.interfaces import LINKS
from cluster.survey.nvidia_smi import LSPCI, SMI
from cluster.survey.section import UnreadableError, listed
from cluster.survey.sysfs import python_question

# Servers of mounted network file systems, and the interface to each.
CARRIERS = python_question(
    "env.carriers",
    20,
    r"""
import subprocess

networked = re.compile(r"nfs4?|lustre|ceph|cifs|smb3|beegfs.*|(fuse\.)?glusterfs")
told = {"storage": [], "cores": len(os.sched_getaffinity(0))}
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
FACT_QUESTIONS = (*ADAPTER_QUESTIONS, GPUDIRECT, LINKS, SMI)


def read_facts(facts: NodeFacts, overrides: Sequence[str] = ()) -> NodeEnvironmentFacts:
    """What the node's environment depends on. overrides: see `node_command`.

    Raises ClusterError when adapters or interfaces cannot be read: a plan made without them would switch InfiniBand off
    on a node that has it.
    """
    probe = facts.probe
    try:
        found, network = adapter_facts(facts), facts.network
    except UnreadableError as error:
        look = node_command(probe.node, "check-nodes", "--only", "ib,net", overrides=overrides)
        raise ClusterError(
            f"{probe.node}: cannot tell what network it has: {error}{f' ({probe.trouble})' if probe.trouble else ''}. "
            f"Look at it with `{look}`"
        ) from error
    try:
        has_gpudirect = facts.gpudirect.works
    except UnreadableError:
        has_gpudirect = None
    return replace(
        found,
        interfaces=network.interfaces,
        interface=facts.interface.interface,
        interface_reason=facts.interface.reason,
        gateways=network.gateways,
        has_gpudirect=has_gpudirect,
    )


def adapter_facts(facts: NodeFacts) -> NodeEnvironmentFacts:
    """What decides which adapters ranks use, and no more; from `ADAPTER_QUESTIONS`. Raises UnreadableError."""
    found = NodeEnvironmentFacts(facts.node, facts.adapters.ports, gpus=facts.gpu_addresses)

    def take(told: Any) -> NodeEnvironmentFacts:
        storage = tuple(StorageRoute(*(one_line(word) for word in row)) for row in listed(told["storage"]))
        return replace(found, storage=storage, cores=int(told["cores"]))

    try:
        return facts.section(CARRIERS).read(take)
    except UnreadableError as error:
        return replace(found, notes=(f"ports that lead to storage servers are not known: {error}",))
