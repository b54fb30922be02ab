"""Traits: the odd node is named, ties warn everybody, and who does not tell is unknown."""

from __future__ import annotations

import pytest

from cluster.checks.compare import merge_compared, profile_findings
from cluster.checks.finding import Finding, Verdict


def judge(check: str, values: dict[str, str | None]) -> dict[str, Finding]:
    traits = {node: {} if value is None else {check: value} for node, value in values.items()}
    return {finding.node: finding for finding in profile_findings(traits)}


def severities(found: dict[str, Finding]) -> dict[str, Verdict]:
    return {node: finding.severity for node, finding in found.items()}


def test_a_tie_warns_all_and_says_who_has_what() -> None:
    tie = "the same on all nodes, but no value has a majority: "
    for values, sides in (("abab", "a on n[1,3]; b on n[2,4]"), ("abcde", "a on n1; b on n2; c on n3; d on n4")):
        found = judge("gpu.driver", {f"n{at}": value for at, value in enumerate(values, start=1)})
        assert [(one.severity, one.observed, one.expected) for one in found.values()] == [
            (Verdict.WARN, value, tie + sides) for value in values
        ]


@pytest.mark.parametrize("check", ["gpu.count", "ib.count"])
def test_none_against_some_fails_even_in_a_tie(check: str) -> None:
    found = judge(check, {"n1": "0", "n2": "8"})
    assert severities(found) == {"n1": Verdict.FAIL, "n2": Verdict.OK}


@pytest.mark.parametrize(
    ("check", "odd"),
    [("gpu.driver", Verdict.FAIL), ("gpu.clocks", Verdict.WARN), ("gpu.power_limit", Verdict.WARN)],
)
def test_the_odd_node_is_named_and_who_does_not_tell_is_unknown(check: str, odd: Verdict) -> None:
    found = severities(judge(check, {"n1": "a", "n2": "b", "n3": "a", "n4": None}))
    assert found == {"n1": Verdict.OK, "n2": odd, "n3": Verdict.OK, "n4": Verdict.UNKNOWN}


def finding(severity: Verdict, check: str = "gpu.driver", device: str | None = None, text: str = "") -> Finding:
    return Finding(check, "n1", severity, text, device=device)


@pytest.mark.parametrize("own", list(Verdict))
@pytest.mark.parametrize("compared", list(Verdict))
def test_merging_keeps_the_worse_and_says_it_once(own: Verdict, compared: Verdict) -> None:
    merged = [f.severity for f in merge_compared([finding(own)], [finding(compared)])]
    order = list(Verdict)
    if own is Verdict.SKIP and compared in (Verdict.OK, Verdict.UNKNOWN):
        assert merged == [Verdict.SKIP]  # what does not apply needs no value
    else:
        assert max(merged, key=order.index) is max(own, compared, key=order.index)
    assert not (Verdict.OK in merged and len(merged) > 1)


def test_findings_of_devices_are_not_replaced() -> None:
    own = [finding(Verdict.OK, device="GPU 0"), finding(Verdict.OK, device="GPU 1")]
    assert len(merge_compared(own, [finding(Verdict.FAIL)])) == 3


def test_several_findings_of_one_comparison_all_stay() -> None:
    compared = [finding(Verdict.FAIL, "ib.state", device) for device in ("eth0", "eth1")]
    assert merge_compared([], compared) == compared


def test_a_group_that_already_failed_is_not_unknown_for_every_trait() -> None:
    own = [finding(Verdict.FAIL, "gpu.nvidia_smi")]
    compared = [finding(Verdict.UNKNOWN, f"gpu.{name}") for name in ("driver", "model")]
    assert merge_compared(own, compared) == own
    assert len(merge_compared([finding(Verdict.FAIL, "ib.state")], compared)) == 3


def test_a_node_without_gpus_among_others_fails_once() -> None:
    own = [finding(Verdict.SKIP, "gpu.count")]
    compared = [finding(Verdict.FAIL, "gpu.count"), finding(Verdict.UNKNOWN, "gpu.model")]
    assert [f.severity for f in merge_compared(own, compared)] == [Verdict.SKIP, Verdict.FAIL]
