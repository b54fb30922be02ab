"""Names of nodes, from wherever somebody lists them: an option, a hostfile, the configuration, Slurm's environment.

All of these use ClusterShell's NodeSet grammar: `node[1-4,7]`, `node[1-9]!node3`, `rack[1-2]n[01-16]`. Group names
(`@all`) are refused: what they mean depends on files of this machine that burst knows nothing of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from cluster.errors import HostsError
from cluster.remote_text import one_line
from cluster.ssh.hosts import is_host_name

MAX_NODES = 16384
_SLURM_NODES = "SLURM_JOB_NODELIST"
# An entry of a hostfile. What MPI launchers allow after a name says how many ranks a node takes, which is
# cluster.ranks_per_node here.
_ENTRY = re.compile(r"(\S+)(\s+(slots|max[-_]slots)=\d+)*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")


@dataclass(frozen=True)
class NodeList:
    """Names without duplicates, and where they came from, in words."""

    names: tuple[str, ...]
    source: str


def parse_nodes(text: str, source: str) -> NodeList:
    """The nodes that `text` names, in the order of NodeSet (by name, then by number). Raises HostsError.

    `source` says in messages where the text was given.
    """
    where = f"{source}: {one_line(text)!r}"
    if not text.strip():
        raise HostsError(f"{source}: no node is named; expected names such as node1 or node[1-4]")
    if "@" in text:
        raise HostsError(
            f"{where}: groups (@NAME) are not known here, and a login is set by cluster.ssh.user=NAME; "
            f"expected names of nodes, such as node[1-4]"
        )
    for pattern in re.split(r"[,&!^\s]+(?![^\[]*\])", text):
        # Before NodeSet makes the names: it holds every one of them in memory.
        spans = (
            sum(int(last) - int(first) + 1 for first, last in _RANGE.findall(ranges))
            for ranges in _BRACKETS.findall(pattern)
        )
        if (count := math.prod(max(1, span) for span in spans)) > MAX_NODES:
            raise HostsError(f"{where}: about {count} nodes, more than the {MAX_NODES} that burst handles")
    try:
        names = tuple(map(str, NodeSet(text, resolver=RESOLVER_NOGROUP)))
    except (NodeSetException, AssertionError, ValueError) as error:
        said = one_line(str(error))
        raise HostsError(f"{where}: not in the grammar of node lists ({said}); expected such as node[1-4,7]") from error
    for name in names:
        if not is_host_name(name):
            text = "expected letters, digits and . _ - with no dash in front; a port is set by cluster.ssh.port=N"
            raise HostsError(f"{where}: {one_line(name)!r} is no host name; {text} or in your SSH configuration")
    if not 0 < len(names) <= MAX_NODES:
        raise HostsError(f"{where}: {len(names)} nodes; expected at least one and at most {MAX_NODES}")
    return NodeList(names, source)


def read_hostfile(path: Path) -> NodeList:
    """The nodes of a hostfile in its order: one entry per line, in NodeSet grammar; `#` begins a comment."""
    source = f"hostfile {path}"
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise HostsError(f"{source}: {error.strerror or error}; expected a file with one node per line") from error
    found: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (given := line.partition("#")[0].strip()):
            continue
        entry = _ENTRY.fullmatch(given)
        if entry is None:
            told = one_line(given)
            raise HostsError(f"{source}, line {number}: {told!r}: expected one entry per line, at most with slots=N")
        found.update(dict.fromkeys(parse_nodes(entry[1], f"{source}, line {number}").names))
    if not found:
        raise HostsError(f"{source}: names no node; expected one name per line, such as node1 or node[1-4]")
    return NodeList(tuple(found), source)


def slurm_nodes(environment: Mapping[str, str]) -> NodeList | None:
    """The nodes of the Slurm allocation that this process runs in; None outside of one."""
    text = environment.get(_SLURM_NODES)
    return parse_nodes(text, f"Slurm ({_SLURM_NODES})") if text else None


def fold_nodes(names: Iterable[str]) -> str:
    """`names` in short: `node[1-3,7]`."""
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))
