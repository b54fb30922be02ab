"""What must be the same on all nodes, where the configuration does not say what is right. The odd node is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cluster.checks.finding import Check, Finding, Verdict, worst
from cluster.remote_text import one_line
from cluster.ssh.nodes import fold_nodes

# Of these 0 is never right where another node has some.
COUNTS = frozenset({"gpu.count", "ib.count"})
# A difference in these makes a run slow, and is no reason to leave the node out.
SOFT_CHECKS = frozenset({"gpu.power_limit", "gpu.clocks"})
_VALUE_LIMIT = 120


def profile_findings(traits: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """A finding for every trait of every node that was asked. traits: node -> check -> value.

    Of different values those of most nodes are right, and without a majority nobody is (WARN on all). A node that does
    not tell what others tell is UNKNOWN.
    """
    checks = sorted({check for told in traits.values() for check in told})
    return [
        finding
        for check in checks
        for finding in _compare(check, {node: told.get(check) for node, told in traits.items()})
    ]


def merge_compared(own: Sequence[Finding], compared: Iterable[Finding]) -> list[Finding]:
    """The node's `own` findings with what comparing nodes says of it, without saying the same thing twice.

    Its own check looked closer: what that found stays, unless the comparison finds worse; only an OK gives way. Where a
    value is missing, that is UNKNOWN unless the check does not apply there (SKIP), or its group has already said why.
    """
    known = {check: worst(f.severity for f in own if f.check == check) for check in {f.check for f in own}}
    in_trouble = {_group(finding.check) for finding in own if finding.severity in (Verdict.FAIL, Verdict.UNKNOWN)}
    worse = []
    for finding in compared:
        before = known.get(finding.check)
        untold = finding.severity is Verdict.UNKNOWN and (before is Verdict.SKIP or _group(finding.check) in in_trouble)
        if not untold and (before is None or max(before.rank, Verdict.OK.rank) < finding.severity.rank):
            worse.append(finding)
    failed = {_group(finding.check) for finding in worse if finding.severity is Verdict.FAIL}
    worse = [f for f in worse if f.severity is not Verdict.UNKNOWN or _group(f.check) not in failed]
    replaced = {finding.check for finding in worse}
    kept = [f for f in own if f.check not in replaced or f.severity is not Verdict.OK or f.device is not None]
    return [*kept, *worse]


def _group(check: str) -> str:
    return check.partition(".")[0]


def _compare(check: str, values: Mapping[str, str | None]) -> Iterable[Finding]:
    told = [value for value in values.values() if value is not None]
    ranking = Counter(told).most_common(2)
    usual, votes = ranking[0]
    tied = len(ranking) == 2 and ranking[1][1] == votes
    if tied and "0" in told and check in COUNTS:
        # Nothing against something is no matter of taste, whatever the number of nodes on each side.
        usual, votes = next(item for item in ranking if item[0] != "0")
        tied = False
    expected = _sides(values) if tied else f"{_short(usual)}, as {votes} of {len(told)} nodes have"
    odd = Verdict.WARN if tied or check in SOFT_CHECKS else Verdict.FAIL
    for node, value in values.items():
        report = Check(node, check, "" if len(values) == 1 else expected)
        if value is None:
            yield report.unknown("the node did not tell", "see its other findings")
        elif value != usual or tied:
            yield report.finding(odd, _short(value), _remedy(check))
        else:
            yield report.ok(_short(value))


def _sides(values: Mapping[str, str | None]) -> str:
    """Who has what, when no value has a majority."""
    sides: dict[str, list[str]] = {}
    for node, value in values.items():
        if value is not None:
            sides.setdefault(value, []).append(node)
    shown = "; ".join(f"{_short(value)} on {fold_nodes(nodes)}" for value, nodes in list(sides.items())[:4])
    return f"the same on all nodes, but no value has a majority: {shown}"


def _remedy(check: str) -> str:
    name = check.partition(".")[2].replace("_", " ")
    return f"make {name} the same on all nodes, or leave the odd ones out"


def _short(value: str) -> str:
    return one_line(value, _VALUE_LIMIT)
