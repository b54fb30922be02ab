"""What only several nodes together tell: who differs, whose clock is off, who cannot talk to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.access.connection import Connection
from cluster.checks.finding import Finding, Verdict
from cluster.checks.groups import LoadedGroup
from cluster.checks.profile import merge_compared, profile_findings
from cluster.checks.ssh import clock_findings
from cluster.probe.section import NodeProbe
from cluster.remote_text import one_line
from engine.config_cluster import ClusterConfig

PAIRS = "net.pairs"
SHARED = "host.shared"


@dataclass(frozen=True)
class NodeView:
    """What is known of one node. probe: None when it could not be asked. traits: what all nodes must have alike."""

    findings: tuple[Finding, ...]
    probe: NodeProbe | None = None
    traits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """Findings by node, completed. notes: what is wrong with this machine, not with a node."""

    findings: Mapping[str, tuple[Finding, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Which tests between nodes are to be made."""

    pairs: bool = True
    shared: bool = True

    @property
    def any(self) -> bool:
        """Whether connections are needed after the nodes' own checks."""
        return self.pairs or self.shared


def compare_nodes(
    views: Mapping[str, NodeView], groups: Sequence[LoadedGroup], config: ClusterConfig, *, clocks: bool = True
) -> Compared:
    """The findings of nodes with what a look at all of them adds; only nodes that answered are compared."""
    probes = {node: view.probe for node, view in views.items() if view.probe is not None}
    profile = profile_findings({node: views[node].traits for node in probes}, config.expected)
    skews, note = clock_findings(list(probes.values())) if clocks else ([], "")
    added = by_node([*profile, *_of_groups(probes, groups, config), *skews])
    merged = {node: tuple(merge_compared(view.findings, added.get(node, ()))) for node, view in views.items()}
    return Compared(merged, (note,) if note else ())


def by_node(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """The findings of each node; nodes without any are left out."""
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        found.setdefault(finding.node, []).append(finding)
    return found


def read_traits(probe: NodeProbe, groups: Sequence[LoadedGroup]) -> Mapping[str, str]:
    """The traits that a node tells."""
    told: dict[str, str] = {}
    for loaded in groups:
        try:
            told |= loaded.group.traits(probe)
        except Exception:
            # Its check breaks on the same answer and says so; without a value the node is UNKNOWN where others tell.
            continue
    return told


def _of_groups(probes: Mapping[str, NodeProbe], groups: Sequence[LoadedGroup], config: ClusterConfig) -> list[Finding]:
    found: list[Finding] = []
    for loaded in groups:
        try:
            found += loaded.check_fleet(probes, config)
        except Exception as error:
            text = one_line(f"comparing nodes broke: {type(error).__name__}: {error}", 300)
            found += [Finding(loaded.name, node, Verdict.UNKNOWN, text, "a result") for node in probes]
    return found


def check_between(
    connections: Mapping[str, Connection],
    views: Mapping[str, NodeView],
    config: ClusterConfig,
    wanted: Wanted,
) -> list[Finding]:
    """The tests that need several nodes at once, over their open connections; with fewer than two there are none."""
    probes = {name: view.probe for name, view in views.items() if view.probe is not None}
    reached = {name: connections[name] for name in probes if name in connections}
    if len(reached) < 2:
        return []
    addresses = node_addresses({name: probes[name] for name in reached}, config)
    found: list[Finding] = []
    if wanted.pairs:
        found += _guarded(PAIRS, reached, lambda: _test_pairs(reached, addresses))
    if wanted.shared and config.shared_folder is not None:
        folder = config.shared_folder
        found += _guarded(SHARED, reached, lambda: _test_shared_folder(reached, folder))
    return found


def _guarded(check: str, nodes: Iterable[str], test: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of `test`; when it breaks, UNKNOWN for every node, and what is known already is not lost."""
    try:
        return test()
    except Exception as error:
        text = one_line(f"the test between nodes broke: {type(error).__name__}: {error}", 300)
        return [Finding(check, node, Verdict.UNKNOWN, text, "a result") for node in nodes]


def _test_pairs(reached: Mapping[str, Connection], addresses: Mapping[str, str]) -> list[Finding]:
    from cluster.checks.pairs import check_pairs

    able = {name: reached[name] for name in addresses}
    lost = [name for name in reached if name not in addresses]
    text, expected = "no address that others could connect to", "an interface with IPv4"
    return [
        *(check_pairs(able, addresses) if len(able) > 1 else ()),
        *(Finding(PAIRS, name, Verdict.UNKNOWN, text, expected) for name in lost),
    ]


def _test_shared_folder(reached: Mapping[str, Connection], folder: str) -> list[Finding]:
    from cluster.checks.storage import check_shared_folder

    return check_shared_folder(reached, folder)


def node_addresses(probes: Mapping[str, NodeProbe], config: ClusterConfig) -> dict[str, str]:
    """IPv4 address of each node on the interface that the nodes talk over; nodes without one are left out."""
    from cluster.parse.interfaces import choose_interface, parse_interfaces

    found: dict[str, str] = {}
    for name, probe in probes.items():
        interface = choose_interface(parse_interfaces(probe), config.interface)
        if interface is not None and interface.addresses:
            found[name] = interface.addresses[0].partition("/")[0]
    return found
