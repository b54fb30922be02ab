"""Which node is to blame for broken pairs, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cluster.checks.finding import Finding, Verdict
from cluster.checks.pairs import Link, cut_off_nodes, judge_pairs, read_links
from cluster.checks.pairs_agents import AgentError

OK, FAIL, UNKNOWN = Verdict.OK, Verdict.FAIL, Verdict.UNKNOWN
NODES = ("a", "b", "c", "d")


def judge(
    broken: Iterable[tuple[str, str]], *, kind: str = "timeout", nodes: tuple[str, ...] = NODES, absent: str = ""
) -> dict[str, Finding]:
    """The findings when these directions are broken and all others work."""
    there = [node for node in nodes if node != absent]
    ways = [(one, other) for one in there for other in there if one != other]
    links = [Link(*way, kind if way in set(broken) else "ok", delay_ms=0.5) for way in ways]
    why = {absent: AgentError("python3 is not installed", "install python3")} if absent else {}
    return {finding.node: finding for finding in judge_pairs(nodes, links, why)}


def severities(found: dict[str, Finding]) -> list[Verdict]:
    return [finding.severity for finding in found.values()]


def both(one: str, other: str) -> list[tuple[str, str]]:
    return [(one, other), (other, one)]


def test_a_cut_pair_is_named_at_both_ends_in_both_directions() -> None:
    found = judge(both("b", "d"))
    assert severities(found) == [OK, FAIL, OK, FAIL]
    for node in ("b", "d"):
        assert "b → d timeout" in found[node].observed
        assert "d → b timeout" in found[node].observed


def test_a_pair_cut_in_one_direction_tells_which() -> None:
    found = judge([("b", "d")], kind="refused")
    assert severities(found) == [OK, FAIL, OK, FAIL]
    assert "b → d refused" in found["d"].observed
    assert "d → b" not in found["d"].observed


def test_a_node_that_is_cut_off_bears_the_blame_alone() -> None:
    found = judge([way for other in "abd" for way in both("c", other)])
    assert severities(found) == [OK, OK, FAIL, OK]
    assert "cut off from 3 of 3 others" in found["c"].observed
    assert "c cut off" in found["a"].observed
    assert "reaches 2 of 3" in found["a"].observed


def test_a_node_cut_off_and_a_broken_pair_are_two_findings() -> None:
    nodes = ("a", "b", "c", "d", "e", "f")
    broken = [way for other in "abdef" for way in both("c", other)] + both("a", "b")
    assert severities(judge(broken, nodes=nodes)) == [FAIL, FAIL, FAIL, OK, OK, OK]


def test_two_halves_that_do_not_see_each_other_are_all_named() -> None:
    broken = [way for one in "ab" for other in "cd" for way in both(one, other)]
    found = judge(broken)
    assert severities(found) == [FAIL] * 4
    assert "cut off" not in found["a"].observed


def test_a_node_with_half_of_its_pairs_broken_is_not_blamed_alone() -> None:
    found = judge([*both("b", "a"), *both("b", "c")], nodes=("a", "b", "c", "d", "e"))
    assert severities(found) == [FAIL, FAIL, FAIL, OK, OK]


def test_two_nodes_cut_off_from_everybody_leave_the_other_three_fine() -> None:
    nodes = ("a", "b", "c", "d", "e")
    broken = {way for one in "de" for other in nodes if one != other for way in both(one, other)}
    assert severities(judge(broken, nodes=nodes)) == [OK, OK, OK, FAIL, FAIL]


def test_of_two_nodes_nobody_is_blamed_alone() -> None:
    assert severities(judge(both("a", "b"), nodes=("a", "b"))) == [FAIL, FAIL]


def test_a_node_without_agent_is_unknown_and_no_part_of_pairs() -> None:
    found = judge([], absent="b")
    assert severities(found) == [OK, UNKNOWN, OK, OK]
    assert "reaches 2 of 2" in found["a"].observed


def test_a_node_that_did_not_say_what_it_reaches_is_unknown() -> None:
    links = [Link(one, other, "not tried" if one == "a" else "ok") for one in NODES for other in NODES if one != other]
    found = judge_pairs(NODES, links, {})
    assert [finding.severity for finding in found] == [UNKNOWN, OK, OK, OK]
    assert "cut off" not in found[1].observed


def test_the_last_node_left_has_nobody_to_talk_to() -> None:
    assert severities(judge([], nodes=("a", "b"), absent="b")) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_one_cut_pair_never_makes_a_node_cut_off(count: int) -> None:
    assert cut_off_nodes(range(count), [frozenset((0, 1))]) == frozenset()  # type: ignore[arg-type,list-item]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"results": None},
        {"results": "ok"},
        {"results": [["b", "ok", ""], ["c", "ok", "", "fast"], 7, ["d", "ok", "", 1.0]]},
        {"results": [["stranger", "ok", "", 1.0], [["b"], "ok", "", 1.0]]},
        {"error": "error", "detail": "KeyError"},
    ],
)
def test_what_an_agent_does_not_tell_was_not_tried(answer: dict[str, object]) -> None:
    links = read_links("a", ["b", "c"], answer)
    assert [(link.target, link.works) for link in links] == [("b", False), ("c", False)]
    assert {link.kind for link in links} == {"not tried"}


def test_words_of_an_agent_are_cleaned() -> None:
    (link,) = read_links("a", ["b"], {"results": [["b", "refused", "\x1b[31mred\nline", 1]]})
    assert link.detail == "red line"
