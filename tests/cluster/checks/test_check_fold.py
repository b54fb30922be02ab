"""Identical nodes are said once, different ones never together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.checks.finding import Finding, NodeReport, Verdict
from cluster.checks.fold import fold_reports
from cluster.ssh.nodes import parse_nodes

NODE_NAMES = st.from_regex(r"[a-z][a-z0-9]{0,4}(-[a-z]{1,3})?[0-9]{0,3}(\.lan)?", fullmatch=True)
TEXTS = st.sampled_from(["2 errors", "3 errors", "no tool", "driver 535.104.05", "driver 550.54.15", ""])
SEVERITIES = st.sampled_from([Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL])
TOLD = st.lists(st.tuples(st.sampled_from(["gpu.ecc", "ib.state"]), SEVERITIES, TEXTS), max_size=3)


def report(node: str, *told: tuple[str, Verdict, str]) -> NodeReport:
    return NodeReport(node, tuple(Finding(check, node, severity, text) for check, severity, text in told))


OK = ("ssh.reach", Verdict.OK, "reached")


def test_healthy_nodes_are_one_line_whatever_their_figures_unless_all_findings_are_asked_for() -> None:
    reports = [report(f"bjdx{n}", OK, ("ssh.clock", Verdict.OK, f"{n} ms")) for n in (1, 2, 3)]
    (fold,) = fold_reports(reports)
    assert (fold.nodes, fold.verdict, fold.findings) == ("bjdx[1-3]", Verdict.OK, ())
    assert len(fold_reports(reports, all_findings=True)) == 3


def test_the_worst_comes_last() -> None:
    reports = [
        report("n1", ("gpu.ecc", Verdict.FAIL, "x")),
        report("n2", OK),
        report("n3", ("gpu.ecc", Verdict.UNKNOWN, "x")),
        report("n4", ("gpu.ecc", Verdict.WARN, "x")),
    ]
    assert [fold.nodes for fold in fold_reports(reports)] == ["n2", "n4", "n3", "n1"]


def test_what_several_devices_or_blind_checks_say_is_said_once() -> None:
    busy = tuple(Finding("gpu.busy", "n1", Verdict.FAIL, "in use", device=f"GPU {index}") for index in (0, 1))
    told = [
        (Verdict.FAIL, "a"),
        (Verdict.FAIL, "b"),
        (Verdict.UNKNOWN, "c"),
        (Verdict.UNKNOWN, "d"),
        (Verdict.WARN, "e"),
    ]
    same = tuple(Finding(f"gpu.{name}", "n1", severity, "no answer", remedy="see there") for severity, name in told)
    (fold,) = fold_reports([NodeReport("n1", (*busy, *same))])
    assert [(one.check, one.device, one.observed) for one in fold.findings] == [
        ("gpu.busy", "GPU 0, GPU 1", "in use"),
        ("gpu.a", None, "no answer"),
        ("gpu.b", None, "no answer"),
        ("gpu.c, gpu.d", None, "no answer"),
        ("gpu.e", None, "no answer"),
    ]


def test_names_of_nodes_in_texts_become_the_folded_name() -> None:
    findings = [
        Finding("ssh.reach", f"n{n}", Verdict.FAIL, f"n{n}: unknown key", remedy=f"burst hosts trust n{n}.")
        for n in (1, 2)
    ]
    (fold,) = fold_reports(NodeReport(finding.node, (finding,)) for finding in findings)
    assert fold.findings[0].remedy == "burst hosts trust n[1-2]."
    assert fold.findings[0].observed == "n[1-2]: unknown key"


def test_nodes_that_are_not_reached_for_one_reason_are_said_once_by_the_address_of_the_first() -> None:
    reports = [report(f"n{n}", ("ssh.reach", Verdict.FAIL, f"10.0.0.{n} port 22 refuses connections")) for n in (1, 2)]
    (fold,) = fold_reports([*reports])
    assert (fold.nodes, fold.findings[0].observed) == ("n[1-2]", "10.0.0.1 port 22 refuses connections")


def test_a_name_within_another_name_stays() -> None:
    (fold,) = fold_reports(
        [report("n1", ("net.pairs", Verdict.FAIL, "cannot reach n12, n1.lan, xn1 and n1-b from n1"))]
    )
    assert fold.findings[0].observed == "cannot reach n12, n1.lan, xn1 and n1-b from n1"
    two = [report(n, ("net.pairs", Verdict.FAIL, f"no n12 from {n}")) for n in ("n1", "n2")]
    assert fold_reports(two)[0].findings[0].observed == "no n12 from n[1-2]"


@given(st.dictionaries(NODE_NAMES, TOLD, min_size=1, max_size=8))
def test_every_node_is_in_exactly_one_fold_with_its_own_verdict(
    fleet: dict[str, list[tuple[str, Verdict, str]]],
) -> None:
    reports = {name: report(name, *told) for name, told in fleet.items()}
    folds = fold_reports(reports.values())
    assert sorted(name for fold in folds for name in fold.names) == sorted(fleet)
    for fold in folds:
        assert set(parse_nodes(fold.nodes, "test").names) == set(fold.names)
        for name in fold.names:
            assert reports[name].verdict is fold.verdict
            bad = [f for f in reports[name].findings if f.severity not in (Verdict.OK, Verdict.SKIP)]
            told = {(check, f.severity, f.observed) for f in fold.findings for check in f.check.split(", ")}
            assert {(f.check, f.severity, f.observed) for f in bad} <= told
