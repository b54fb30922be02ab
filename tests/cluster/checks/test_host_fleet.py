"""Group host over several nodes: memory within a tolerance, room for the image, who lacks it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from host_sections import BARE, DOCKER, HEALTHY, healthy, room
from testkit.check_fakes import Groups

from cluster.checks.finding import Finding, Verdict
from cluster.survey.section import NodeProbe, Section, SectionState

GROUP = Groups("host")

ABSENT = Section("host.image", "Error: No such image: burst:cuda", 1, SectionState.ENDED)
IMAGE_GIB = 18


def nodes_with_memory(*totals: int) -> dict[str, NodeProbe]:
    names = [f"node{at}" for at in range(1, len(totals) + 1)]
    told = [{**HEALTHY["host.system"], "memory": [total, total]} for total in totals]
    return {name: healthy(name, system=one) for name, one in zip(names, told, strict=True)}


def node(name: str, free_gib: int, *, has_image: bool) -> NodeProbe:
    probe = healthy(name, docker={**HEALTHY["host.docker"], "room": room(free_gib << 30)})
    return probe if has_image else NodeProbe(name, {**probe.sections, "host.image": ABSENT})


def failed(probes: Mapping[str, NodeProbe], check: str) -> dict[str, Finding]:
    return {
        one.node: one for one in GROUP.compare(probes, DOCKER) if (one.check, one.severity) == (check, Verdict.FAIL)
    }


@pytest.mark.parametrize(("odd", "expected"), [(970, Verdict.OK), (969, Verdict.WARN), (1031, Verdict.WARN)])
def test_memory_may_differ_by_three_percent(odd: int, expected: Verdict) -> None:
    found = GROUP.compare(nodes_with_memory(1000, 1000, 1000, odd), BARE)
    assert [one.severity for one in found] == [Verdict.OK, Verdict.OK, Verdict.OK, expected]


def test_a_node_that_tells_no_memory_is_unknown_and_does_not_count() -> None:
    probes = {**nodes_with_memory(1000, 1000), "node9": NodeProbe("node9")}
    assert [one.severity for one in GROUP.compare(probes, BARE)] == [Verdict.OK, Verdict.OK, Verdict.UNKNOWN]
    assert GROUP.compare({}, BARE) == []


@pytest.mark.parametrize(("free", "fails"), [(2 * IMAGE_GIB - 1, True), (2 * IMAGE_GIB, False)])
def test_a_node_without_the_image_must_hold_it_twice(free: int, fails: bool) -> None:
    probes = {"node1": node("node1", 100, has_image=True), "node2": node("node2", free, has_image=False)}
    assert ("node2" in failed(probes, "host.docker_disk")) is fails
    assert "node1" not in failed(probes, "host.docker_disk")


@pytest.mark.parametrize(("free", "fails"), [(IMAGE_GIB - 1, True), (IMAGE_GIB, False)])
def test_a_node_with_the_image_must_hold_it_once_more(free: int, fails: bool) -> None:
    assert ("node1" in failed({"node1": node("node1", free, has_image=True)}, "host.docker_disk")) is fails


def test_who_lacks_the_image_that_others_have_fails() -> None:
    probes = {name: node(name, 100, has_image=name != "node2") for name in ("node1", "node2", "node3")}
    found = failed(probes, "host.image")
    assert list(found) == ["node2"]
    assert "2 of 3 nodes" in found["node2"].observed


def test_an_image_that_nobody_has_is_no_difference() -> None:
    probes = {name: node(name, 100, has_image=False) for name in ("node1", "node2")}
    assert not failed(probes, "host.image")


def test_without_containers_the_image_is_nobody_s_matter() -> None:
    probes = {"node1": node("node1", 0, has_image=True), "node2": node("node2", 0, has_image=False)}
    assert {one.check for one in GROUP.compare(probes, BARE)} == {"host.memory"}
