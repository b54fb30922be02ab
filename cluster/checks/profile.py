"""What must be the same on all nodes: as the configuration says, else as most nodes have it. The odd node is named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.access.nodes import fold_nodes
from cluster.checks.finding import Finding, Verdict, worst
from cluster.remote_text import one_line
from engine.config.cluster import ExpectedHardware

# Of these 0 is never right where another node has some.
COUNTS = frozenset({"gpu.count", "ib.count"})
# A difference in these is worth a look, and no reason to leave the node out.
SOFT_CHECKS = frozenset(
    {
        *("gpu.power_limit", "gpu.clocks", "gpu.ecc_mode"),
        *("host.python", "host.docker", "host.nccl_conf"),
    }
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_VALUE_LIMIT = 120


@dataclass(frozen=True)
class Expectation:
    """What the configuration wants of one trait: the words of it, and whether a value is that."""

    text: str
    accepts: Callable[[str], bool]


def configured(expected: ExpectedHardware) -> dict[str, Expectation]:
    """What `cluster.expected` says, by check; what it leaves open is not in it."""
    found: dict[str, Expectation] = {}
    if expected.gpus is not None:
        found["gpu.count"] = Expectation(f"{expected.gpus} (cluster.expected)", _is_number(expected.gpus))
    if expected.gpu_model is not None:
        model = expected.gpu_model
        found["gpu.model"] = Expectation(f"{model} (cluster.expected)", lambda value: model.lower() in value.lower())
    if expected.driver is not None:
        driver = expected.driver
        found["gpu.driver"] = Expectation(f"{driver} (cluster.expected)", lambda value: _begins(value, driver))
    return found


def profile_findings(traits: Mapping[str, Mapping[str, str]], expected: ExpectedHardware) -> list[Finding]:
    """A finding for every trait of every node that was asked. traits: node -> check -> value.

    Nodes with different values and no configured one: most of them are right, and without a majority nobody is (WARN on
    all). A node that does not tell what others tell is UNKNOWN.
    """
    checks = sorted({check for told in traits.values() for check in told})
    wanted = configured(expected)
    findings: list[Finding] = []
    for check in checks:
        values = {node: told.get(check) for node, told in traits.items()}
        expectation = wanted.get(check)
        findings += _compare(check, values) if expectation is None else _hold_against(check, values, expectation)
    return findings


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
        if not untold and (before is None or worst((before, finding.severity)) is not before):
            worse.append(finding)
    failed = {_group(finding.check) for finding in worse if finding.severity is Verdict.FAIL}
    worse = [f for f in worse if f.severity is not Verdict.UNKNOWN or _group(f.check) not in failed]
    replaced = {finding.check for finding in worse}
    kept = [f for f in own if f.check not in replaced or f.severity is not Verdict.OK or f.device is not None]
    return [*kept, *worse]


def _group(check: str) -> str:
    return check.partition(".")[0]


def _hold_against(check: str, values: Mapping[str, str | None], expectation: Expectation) -> Iterable[Finding]:
    for node, value in values.items():
        if value is None:
            yield _untold(check, node, expectation.text)
        elif expectation.accepts(value):
            yield Finding(check, node, Verdict.OK, _short(value), expectation.text)
        else:
            yield Finding(check, node, Verdict.FAIL, _short(value), expectation.text, _remedy(check))


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
        if value is None:
            yield _untold(check, node, expected)
        elif len(ranking) == 1:
            yield Finding(check, node, Verdict.OK, _short(value), "" if len(told) == 1 else expected)
        elif tied or value != usual:
            yield Finding(check, node, odd, _short(value), expected, _remedy(check))
        else:
            yield Finding(check, node, Verdict.OK, _short(value), expected)


def _sides(values: Mapping[str, str | None]) -> str:
    """Who has what, when no value has a majority."""
    sides: dict[str, list[str]] = {}
    for node, value in values.items():
        if value is not None:
            sides.setdefault(value, []).append(node)
    shown = "; ".join(f"{_short(value)} on {fold_nodes(nodes)}" for value, nodes in list(sides.items())[:4])
    return f"the same on all nodes, but no value has a majority: {shown}"


def _untold(check: str, node: str, expected: str) -> Finding:
    return Finding(check, node, Verdict.UNKNOWN, "the node did not tell", expected, "see its other findings")


def _remedy(check: str) -> str:
    name = check.partition(".")[2].replace("_", " ")
    return f"make {name} the same on all nodes, leave the node out, or skip this check: --skip {check}"


def _is_number(number: float) -> Callable[[str], bool]:
    def accepts(value: str) -> bool:
        found = _NUMBER.match(value.strip())
        return found is not None and float(found.group()) == number

    return accepts


def _begins(value: str, prefix: str) -> bool:
    """Whether version `value` is `prefix` or goes on behind it: 550 fits 550.54, and 5 does not."""
    return value == prefix or value.startswith(prefix.rstrip(".") + ".")


def _short(value: str) -> str:
    return one_line(value, _VALUE_LIMIT)
