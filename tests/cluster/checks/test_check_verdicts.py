"""From findings to verdicts, usable nodes and exit codes; and which findings are wanted at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.run import CheckOptions
from cluster.checks.selection import EXPLANATIONS, GROUP_NAMES, GROUPS, read_selection
from cluster.checks.ssh import EXPLANATIONS as SSH
from engine.config.errors import ConfigError

ORDER = [Verdict.SKIP, Verdict.OK, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL]  # nothing seen is UNKNOWN
SEVERITIES = st.lists(st.sampled_from(ORDER), max_size=5)


@given(st.dictionaries(st.sampled_from("abcdef"), SEVERITIES, max_size=5))
@example({})
def test_the_worst_finding_is_the_verdict_and_decides_who_is_usable_and_the_exit_code(
    nodes: dict[str, list[Verdict]],
) -> None:
    found = {name: [Finding("gpu.ecc", name, severity, "") for severity in told] for name, told in nodes.items()}
    checked = FleetReport({name: NodeReport(name, tuple(findings)) for name, findings in found.items()})
    worst = {name: max(told, key=ORDER.index) if told else Verdict.UNKNOWN for name, told in nodes.items()}
    assert {name: node.verdict for name, node in checked.nodes.items()} == worst
    assert checked.usable == tuple(name for name in nodes if worst[name] in ORDER[:3])
    known = 3 if Verdict.UNKNOWN in worst.values() or not nodes else 0
    assert checked.exit_code == (1 if Verdict.FAIL in worst.values() else known)


# What is wanted.


def found(*checks: str) -> list[Finding]:
    return [Finding(check, "n1", Verdict.FAIL, "") for check in checks]


ALL = found("ssh.reach", "ssh.clock", "gpu.busy", "gpu.ecc", "ib.state")


@pytest.mark.parametrize(
    ("only", "skip", "left"),
    [
        ([], [], "ssh.reach ssh.clock gpu.busy gpu.ecc ib.state"),
        (["gpu"], [], "ssh.reach gpu.busy gpu.ecc"),
        (["gpu.busy,ib"], [], "ssh.reach gpu.busy ib.state"),
        ([], ["gpu.busy"], "ssh.reach ssh.clock gpu.ecc ib.state"),
        (["gpu"], ["gpu.busy"], "ssh.reach gpu.ecc"),
        ([], ["gpu", "ib"], "ssh.reach ssh.clock"),
        ([], ["ssh.clock"], "ssh.reach gpu.busy gpu.ecc ib.state"),
    ],
)
def test_only_and_skip_take_groups_and_checks(only: list[str], skip: list[str], left: str) -> None:
    assert [finding.check for finding in read_selection(only, skip).apply("n1", ALL)] == left.split()


def test_nodes_are_asked_only_about_groups_that_matter() -> None:
    def asked(only: list[str], skip: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.name for group in CheckOptions(read_selection(only, skip)).groups))

    assert asked([], []) == GROUP_NAMES == ("gpu", "ib", "net", "host")
    assert asked(["gpu.busy"], []) == ("gpu",)
    assert asked(["ssh"], []) == asked(["ssh.reach"], []) == ()
    assert asked([], ["gpu", "host.disk"]) == ("ib", "net", "host")
    (group,) = CheckOptions(read_selection(["gpu.dcgm_diag"])).groups
    assert [question.name for question in group.questions] == ["gpu.lspci", "gpu.smi", "gpu.dcgm_diag"]


def test_a_check_that_is_asked_for_and_gives_nothing_is_unknown() -> None:
    selection = read_selection(["gpu.xid", "gpu.ecc", "ssh"])
    assert [(f.check, f.severity) for f in selection.apply("n1", ALL[1:])[-1:]] == [("gpu.xid", Verdict.UNKNOWN)]


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
    compared = {
        "gpu.driver",
        "host.memory",
        "host.versions",
        "ib.link_layer",
        "net.mtu",
        "net.pairs",
    }  # which no judge of one node makes
    assert compared == EXPLANATIONS.keys() - {name for group in GROUPS for name in group.checks} - SSH.keys()
    page = Path(__file__).parents[3] / "docs" / "cluster.md"
    assert f"There are {len(EXPLANATIONS)} checks in the" in page.read_text()
