"""The health gate: what fails stops a launch, what is odd is said, and only what matters for the run is looked at."""

from __future__ import annotations

import pytest

from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.run import CheckOptions
from cluster.preflight.gate import gate_selection, judge_health
from cluster.preflight.judge import UnfitNodesError
from engine.config.cluster import ClusterConfig


def report(**nodes: tuple[Finding, ...]) -> FleetReport:
    return FleetReport({name: NodeReport(name, findings) for name, findings in nodes.items()})


def finding(node: str, severity: Verdict, check: str = "gpu.ecc") -> Finding:
    return Finding(check, node, severity, "3 uncorrectable errors", "none", "reset the GPU", "GPU 1")


def test_gpus_and_adapters_are_looked_at_only_where_nccl_uses_them() -> None:
    for backend, groups in (("gloo", {"net", "host"}), ("nccl", {"gpu", "ib", "net", "host"})):
        asked = CheckOptions(gate_selection(ClusterConfig(backend=backend))).groups
        assert {group.name for group in asked} == groups


def test_what_the_survey_asks_and_what_only_slows_is_left_to_others() -> None:
    selection = gate_selection(ClusterConfig(backend="nccl"))
    assert selection.wants("gpu.xid")
    assert selection.wants("host.memlock")
    assert not any(
        selection.wants(check) for check in ("gpu.busy", "gpu.dcgm_diag", "host.image", "host.memory", "net.pairs")
    )


def test_a_failure_stops_the_launch_and_is_said_once_for_all_its_nodes() -> None:
    found = report(n1=(finding("n1", Verdict.FAIL),), n2=(finding("n2", Verdict.FAIL),))
    with pytest.raises(UnfitNodesError) as caught:
        judge_health(found)
    assert str(caught.value).splitlines() == [
        "n[1-2]: gpu.ecc GPU 1: 3 uncorrectable errors, expected none; reset the GPU",
        "To start all the same, add --force.",
    ]
    assert judge_health(found, force=True) == (
        "n[1-2]: gpu.ecc GPU 1: 3 uncorrectable errors, expected none; reset the GPU",
    )


@pytest.mark.parametrize("severity", [Verdict.WARN, Verdict.UNKNOWN])
def test_what_is_odd_or_unseen_warns(severity: Verdict) -> None:
    (text,) = judge_health(report(n1=(finding("n1", severity),), n2=(finding("n2", Verdict.OK),)))
    assert text.startswith("n1: gpu.ecc GPU 1: ")
