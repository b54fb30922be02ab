"""From findings to verdicts, usable nodes and exit codes; nodes that say the same, once; which checks are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.checks.check import Finding, FleetReport, NodeReport, Verdict, fold_reports
from cluster.checks.run import EXPLANATIONS as SSH
from cluster.checks.run import CheckOptions
from cluster.checks.selection import EXPLANATIONS, GROUP_NAMES, GROUPS, read_selection
from cluster.ssh.hosts import parse_nodes
from engine.config.errors import ConfigError

OK, SKIP, WARN, UNKNOWN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL
ORDER = [SKIP, OK, WARN, UNKNOWN, FAIL]  # nothing seen is UNKNOWN
NODE_NAMES = st.from_regex(r"[a-z][a-z0-9]{0,4}(-[a-z]{1,3})?[0-9]{0,3}(\.lan)?", fullmatch=True)
TEXTS = st.sampled_from(["2 errors", "3 errors", "no tool", "driver 535.104.05", "driver 550.54.15", ""])
TOLD = st.lists(st.tuples(st.sampled_from(["gpu.ecc", "ib.state"]), st.sampled_from(ORDER), TEXTS), max_size=3)


def report(node: str, *told: tuple[str, Verdict, str]) -> NodeReport:
    return NodeReport(node, tuple(Finding(check, node, severity, text) for check, severity, text in told))


@given(st.dictionaries(NODE_NAMES, TOLD, max_size=6))
@example({})
def test_the_worst_decides_who_is_usable_and_every_node_is_in_one_fold(
    nodes: dict[str, list[tuple[str, Verdict, str]]],
) -> None:
    checked = FleetReport({name: report(name, *told) for name, told in nodes.items()})
    worst = {name: max((one[1] for one in told), key=ORDER.index, default=UNKNOWN) for name, told in nodes.items()}
    assert {name: node.verdict for name, node in checked.nodes.items()} == worst
    assert checked.usable == tuple(name for name in nodes if worst[name] in ORDER[:3])
    known = 3 if UNKNOWN in worst.values() or not nodes else 0
    assert checked.exit_code == (1 if FAIL in worst.values() else known)
    folds = fold_reports(checked.nodes.values())
    assert sorted(name for fold in folds for name in fold.names) == sorted(nodes)
    for fold in folds:
        assert set(parse_nodes(fold.nodes, "test").names) == set(fold.names)
        said = {(check, one.severity, one.observed) for one in fold.findings for check in one.check.split(", ")}
        for name in fold.names:
            assert worst[name] is fold.verdict
            assert {one for one in nodes[name] if one[1] not in (OK, SKIP)} <= said


def test_healthy_nodes_are_one_line_whatever_their_figures_and_the_worst_comes_last() -> None:
    fine = [report(f"n{at}", ("ssh.clock", OK, f"{at} ms")) for at in (1, 2, 3)]
    (fold,) = fold_reports(fine)
    assert (fold.nodes, fold.verdict, fold.findings) == ("n[1-3]", OK, ())
    assert len(fold_reports(fine, all_findings=True)) == 3
    timed = FleetReport({"n1": NodeReport("n1", (), 1.23456)}, 2.34567).to_dict()
    assert (timed["elapsed_s"], timed["nodes"]["n1"]["elapsed_s"]) == (2.346, 1.235)
    odd = [report(f"n{at}", ("gpu.ecc", severity, "x")) for at, severity in enumerate((FAIL, OK, UNKNOWN, WARN), 1)]
    assert [one.nodes for one in fold_reports(odd)] == ["n2", "n4", "n3", "n1"]


def test_what_several_devices_or_blind_checks_say_is_said_once() -> None:
    busy = tuple(Finding("gpu.busy", "n1", FAIL, "in use", device=f"GPU {index}") for index in (0, 1))
    told = zip("abcde", (FAIL, FAIL, UNKNOWN, UNKNOWN, WARN), strict=True)
    same = tuple(Finding(f"gpu.{name}", "n1", severity, "no answer", remedy="see there") for name, severity in told)
    (fold,) = fold_reports([NodeReport("n1", (*busy, *same))])
    assert [(one.check, one.device, one.observed) for one in fold.findings] == [
        ("gpu.busy", "GPU 0, GPU 1", "in use"),
        *((name, None, "no answer") for name in ("gpu.a", "gpu.b", "gpu.c, gpu.d", "gpu.e")),
    ]


@pytest.mark.parametrize(
    ("check", "told", "folded"),
    [
        ("net.pairs", ["n1: trust n1.", "n2: trust n2."], "n[1-2]: trust n[1-2]."),
        ("net.pairs", ["n12, n1.lan, xn1, n1-b, n1", "n12, n1.lan, xn1, n1-b, n2"], "n12, n1.lan, xn1, n1-b, n[1-2]"),
        ("ssh.reach", ["10.0.0.1 refuses", "10.0.0.2 refuses"], "10.0.0.1 refuses"),  # the address of the first
    ],
)
def test_names_of_nodes_in_texts_become_the_folded_name(check: str, told: list[str], folded: str) -> None:
    texts = dict(zip(("n1", "n2"), told, strict=True))
    (fold,) = fold_reports(NodeReport(node, (Finding(check, node, FAIL, one),)) for node, one in texts.items())
    assert (fold.nodes, fold.findings[0].observed) == ("n[1-2]", folded)
    remedies = [Finding("gpu.ecc", node, FAIL, "", one, one) for node, one in texts.items()]
    (fold, *_) = fold_reports(NodeReport(one.node, (one,)) for one in remedies)
    assert check == "ssh.reach" or (fold.findings[0].expected, fold.findings[0].remedy) == (folded, folded)


ALL = report("n1", *((name, FAIL, "") for name in ("ssh.reach", "ssh.clock", "gpu.busy", "gpu.ecc", "ib.state")))


@pytest.mark.parametrize(
    ("only", "skip", "left", "asked"),
    [
        ([], [], "ssh.reach ssh.clock gpu.busy gpu.ecc ib.state", "gpu ib net host"),
        (["gpu"], [], "ssh.reach gpu.busy gpu.ecc", "gpu"),
        (["gpu.busy,ib"], [], "ssh.reach gpu.busy ib.state", "gpu ib"),
        (["ssh"], [], "ssh.reach ssh.clock", ""),
        (["ssh.reach"], [], "ssh.reach", ""),
        ([], ["gpu.busy"], "ssh.reach ssh.clock gpu.ecc ib.state", "gpu ib net host"),
        (["gpu"], ["gpu.busy"], "ssh.reach gpu.ecc", "gpu"),
        ([], ["gpu", "host.disk"], "ssh.reach ssh.clock ib.state", "ib net host"),
        ([], ["ssh.clock"], "ssh.reach gpu.busy gpu.ecc ib.state", "gpu ib net host"),
    ],
)
def test_only_and_skip_take_groups_and_checks(only: list[str], skip: list[str], left: str, asked: str) -> None:
    selection = read_selection(only, skip)
    assert [finding.check for finding in selection.apply("n1", ALL.findings)] == left.split()
    groups = CheckOptions(GROUPS, selection).groups
    assert list(dict.fromkeys(group.name for group in groups)) == asked.split()


def test_what_takes_long_is_not_asked_for_others_and_what_is_asked_for_and_gives_nothing_is_unknown() -> None:
    (group,) = CheckOptions(GROUPS, read_selection(["gpu.dcgm_diag"])).groups
    assert [question.name for question in group.questions] == ["gpu.lspci", "gpu.smi", "gpu.dcgm_diag"]
    found = read_selection(["gpu.xid", "gpu.ecc", "ssh"]).apply("n1", ALL.findings[1:])
    assert [(one.check, one.severity) for one in found[-1:]] == [("gpu.xid", UNKNOWN)]


NO_CHECK = r"expected a group \(ssh, gpu, ib, net, host\)"


@pytest.mark.parametrize(
    ("only", "skip", "text"),
    [
        *(
            ([word], [], f"--only '{word}': {NO_CHECK}")
            for word in ("gpus", "gpu.busy;id", "GPU", "-x", "gpu.", ".gpu")
        ),
        ([], ["gpus"], f"--skip 'gpus': {NO_CHECK}"),
        (["gpu.bsy"], [], r"did you mean gpu\.busy\?"),
        *(([], [word], "is not usable") for word in ("ssh", "ssh.reach", "ssh.probe")),
        (["gpu"], ["gpu"], "takes away everything"),
    ],
)
def test_words_that_make_no_sense_are_refused(only: list[str], skip: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_selection(only, skip)


def test_every_check_is_explained_and_has_a_name_of_its_group() -> None:
    assert all(text.endswith(".") for text in EXPLANATIONS.values())
    assert {name.partition(".")[0] for name in EXPLANATIONS} == {"ssh", *GROUP_NAMES}
    compared = EXPLANATIONS.keys() - {name for group in GROUPS for name in group.checks} - SSH.keys()
    assert compared == {
        "gpu.driver",
        "host.memory",
        "host.versions",
        "ib.link_layer",
        "net.machine",
        "net.mtu",
        "net.pairs",
    }
    page = Path(__file__).parents[3] / "docs" / "cluster.md"
    assert f"There are {len(EXPLANATIONS)} checks in the" in page.read_text()
