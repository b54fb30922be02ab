"""Group host over several nodes: memory within a tolerance, room for the image, who lacks it."""

from __future__ import annotations

import pytest
from host_sections import BARE, DOCKER, GROUP, HEALTHY, healthy, room
from testkit.check_fakes import changed_section, told

from cluster.checks.finding import Verdict
from cluster.survey.section import NodeProbe

ABSENT = "Error: No such image: burst:cuda"
GIB, OK, WARN, UNKNOWN = 1 << 30, Verdict.OK, Verdict.WARN, Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ((1000, 1000, 1000, 970), [(OK, "970.0 GiB")] * 4),
        ((1000, 1000, 1000, 969), [(OK, "")] * 3 + [(WARN, "969.0 GiB, the usual node has 1000.0 GiB")]),
        ((1000, 1000, 1000, 1031), [(OK, "")] * 3 + [(WARN, "1031.0 GiB, the usual node has 1000.0 GiB")]),
        # Who tells nothing does not count.
        ((1000, 1000, None), [(OK, ""), (OK, ""), (UNKNOWN, "the node did not tell how much memory it has")]),
        ((), []),
    ],
)
def test_memory_may_differ_by_three_percent(
    totals: tuple[int | None, ...], expected: list[tuple[Verdict, str]]
) -> None:
    nodes = {}
    for at, total in enumerate(totals):
        told = {**HEALTHY["host.system"], "memory": [(total or 0) * GIB, 0]}
        nodes[f"n{at}"] = healthy(f"n{at}", system=told) if total else NodeProbe(f"n{at}")
    found = GROUP.compare(nodes, BARE)
    assert [finding.severity for finding in found] == [severity for severity, _ in expected]
    assert all(text in ("", finding.observed) for finding, (_, text) in list(zip(found, expected, strict=True))[-1:])
    usual = "" if len(totals) < 2 else "1000.0 GiB within 3%"
    assert all(finding.expected == usual for finding in found)


def node(name: str, free_gib: int, *, has_image: bool) -> NodeProbe:
    probe = healthy(name, docker={**HEALTHY["host.docker"], "room": room(free_gib << 30)})
    return probe if has_image else changed_section(probe, "host.image", output=ABSENT, exit_code=1)


FULL = "FAIL host.docker_disk (/var/lib/docker): {}.0 GiB free; expected: at least {}.0 GiB free for burst:cuda"
LACKS = "FAIL host.image: burst:cuda is on {} of {} nodes and not on this one"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([(18, True)], []),  # its image is of 18 GiB: it must hold it once more
        ([(17, True)], [FULL.format(17, 18)]),
        ([(100, True), (36, False)], [LACKS.format(1, 2)]),  # without it twice
        ([(100, True), (35, False), (100, True)], [FULL.format(35, 36), LACKS.format(2, 3)]),
        ([(100, False), (0, False)], []),  # that nobody has it is no difference
    ],
)
def test_the_image_is_on_all_nodes_or_has_room(nodes: list[tuple[int, bool]], expected: list[str]) -> None:
    probes = {f"n{at}": node(f"n{at}", free, has_image=has) for at, (free, has) in enumerate(nodes)}
    assert told(GROUP.compare(probes, DOCKER)) == expected
    assert {one.check for one in GROUP.compare(probes, BARE)} == {"host.memory"}  # without containers nobody's matter
