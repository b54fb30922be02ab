"""Nodes against each other: the odd one is named, ties warn everybody, who does not tell is unknown; and clocks."""

from __future__ import annotations

import pytest
from testkit.check_fakes import told
from testkit.fake_plan import run_config
from whole_node import CLUSTERS, changed, groups, healthy

from cluster.checks.check import Finding, Verdict
from cluster.checks.run import clock_findings, merge_compared, profile_findings
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig

OK, SKIP, WARN, UNKNOWN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL
TIE = "WARN: {}; expected: the same on all nodes, but no value has a majority: {}"
NAMES = ("driver", "power limit", "clocks", "count")
USUAL = "FAIL: b; expected: a, as 2 of 3 nodes have"


@pytest.mark.parametrize(
    ("check", "values", "expected"),
    [
        ("gpu.driver", "abab", [TIE.format(value, "a on n[1,3]; b on n[2,4]") for value in "abab"]),
        ("gpu.driver", "abcde", [TIE.format(one, "a on n1; b on n2; c on n3; d on n4") for one in "abcde"]),
        *((name, "08", ["FAIL: 0; expected: 8, as 1 of 2 nodes have"]) for name in ("gpu.count", "ib.count")),
        ("gpu.driver", "aba", [USUAL]),
        *((name, "aba", [USUAL.replace("FAIL", "WARN")]) for name in ("gpu.clocks", "gpu.power_limit")),
        ("gpu.driver", "aa-", ["UNKNOWN: the node did not tell; expected: a, as 2 of 2 nodes have"]),
        ("gpu.driver", "a", []),
    ],
)
def test_the_odd_node_is_named(check: str, values: str, expected: list[str]) -> None:
    found = profile_findings({f"n{at}": {} if one == "-" else {check: one} for at, one in enumerate(values, start=1)})
    assert len(found) == len(values)
    assert told(found) == [line.replace(":", f" {check}:", 1) for line in expected]
    same = (f"make {name} the same on all nodes, or leave the odd ones out" for name in NAMES)
    assert {one.remedy for one in found if not one.severity.is_fine} <= {*same, "see its other findings"}


def finding(severity: Verdict, check: str = "gpu.driver", device: str | None = None) -> Finding:
    return Finding(check, "n1", severity, "", device=device)


@pytest.mark.parametrize("own", list(Verdict))
@pytest.mark.parametrize("compared", list(Verdict))
def test_merging_keeps_the_worse_and_says_it_once(own: Verdict, compared: Verdict) -> None:
    merged = [one.severity for one in merge_compared([finding(own)], [finding(compared)])]
    order = list(Verdict)
    if own is SKIP and compared in (OK, UNKNOWN):
        assert merged == [SKIP]  # what does not apply needs no value
    else:
        assert max(merged, key=order.index) is max(own, compared, key=order.index)
    assert not (OK in merged and len(merged) > 1)


UNTOLD = [finding(UNKNOWN, f"gpu.{name}") for name in ("driver", "model")]


@pytest.mark.parametrize(
    ("own", "compared", "expected"),
    [
        # Findings of devices are not replaced, and several of one comparison all stay.
        ([finding(OK, device="GPU 0"), finding(OK, device="GPU 1")], [finding(FAIL)], [OK, OK, FAIL]),
        ([], [finding(FAIL, device=name) for name in ("eth0", "eth1")], [FAIL, FAIL]),
        # A group that failed is not unknown for every trait; another group is.
        ([finding(FAIL, "gpu.nvidia_smi")], UNTOLD, [FAIL]),
        ([finding(FAIL, "ib.state")], UNTOLD, [FAIL, UNKNOWN, UNKNOWN]),
        # A node without GPUs among others fails once.
        ([finding(SKIP, "gpu.count")], [finding(FAIL, "gpu.count"), *UNTOLD], [SKIP, FAIL]),
    ],
)
def test_what_comparing_adds_to_what_a_node_says(
    own: list[Finding], compared: list[Finding], expected: list[Verdict]
) -> None:
    assert [one.severity for one in merge_compared(own, compared)] == expected


def nodes(*changes: str) -> list[NodeProbe]:
    return [changed(healthy(), *filter(None, change.split(" & "))) for change in changes]


GIB = 1 << 30
SAME, MEMORY = f"host.system/memory=[{1000 * GIB}, 0]", "host.system/memory=[{}, 0]"
LACKS = "host.image!1 Error: No such image: burst:cuda & host.docker/room.free={}"
FULL = "FAIL host.docker_disk (/var/lib/docker): 35.0 GiB free; expected: 36.0 GiB for burst:cuda"
ODD = "WARN host.memory: {}.0 GiB; expected: 1000.0 GiB, as other nodes have"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([SAME, SAME, SAME, MEMORY.format(970 * GIB)], []),
        *(([SAME, SAME, SAME, MEMORY.format(size * GIB)], [ODD.format(size)]) for size in (969, 1031)),
        ([SAME, SAME, "host.system!1"], ["UNKNOWN host.memory: the node did not tell how much memory it has"]),
        # Who lacks the image must have room for it, if anybody knows its size.
        (["host.docker/room.free=5G", LACKS.format("36G")], []),
        (["host.docker/room.free=5G", LACKS.format("35G")], [FULL]),
        ([LACKS.format("0"), LACKS.format("0")], []),
    ],
)
def test_memory_and_room_for_the_image_are_compared(changes: list[str], expected: list[str]) -> None:
    probes = [NodeProbe(f"n{at}", one.sections) for at, one in enumerate(nodes(*changes))]
    docker, bare = (run_config(cluster=CLUSTERS[name]).cluster for name in ("docker", "bare"))

    def compared(config: ClusterConfig) -> list[Finding]:
        facts = {probe.node: NodeFacts(probe, config) for probe in probes}
        return [finding for group in groups("host") for finding in group.compare(facts)]

    assert told(compared(docker)) == expected
    assert {one.check for one in compared(bare)} == {"host.memory"}


UNTIMED = "the node told no time that makes sense"
SKEW = "{} ssh.clock: its clock is {} {} this machine; expected: within 1 s of this machine"


@pytest.mark.parametrize(
    ("offset_s", "error_s", "expected"),
    [
        (0.9, 0.01, []),
        (-1.2, 0.01, [SKEW.format("WARN", "1.2 s", "behind")]),
        (4.9, 0.01, [SKEW.format("WARN", "4.9 s", "ahead of")]),
        (5.2, 0.01, [SKEW.format("FAIL", "5.2 s", "ahead of")]),
        (-60, 0.01, [SKEW.format("FAIL", "60 s", "behind")]),
        # What the measurement cannot be sure of passes.
        (1.4, 0.5, []),
        (5.4, 0.5, [SKEW.format("WARN", "5.4 s", "ahead of")]),
        (None, 0.0, [f"UNKNOWN ssh.clock: {UNTIMED}; expected: within 1 s of this machine"]),
    ],
)
def test_clocks_against_this_machine(offset_s: float | None, error_s: float, expected: list[str]) -> None:
    found, note = clock_findings([NodeProbe("n1", {}, offset_s, error_s)])
    assert (told(found), len(found), note) == (expected, 1, "")


def test_a_wrong_clock_of_this_machine_does_not_condemn_the_nodes() -> None:
    probes = [*(NodeProbe(f"n{at}", {}, 100.0, 0.01) for at in range(3)), NodeProbe("odd", {}, 0.0, 0.01)]
    found, note = clock_findings(probes)
    said = "FAIL ssh.clock: its clock is 100 s behind most nodes; expected: within 1 s of most nodes"
    assert (told(found), note) == ([said], "the clock of this machine is 100 s behind those of the nodes")
