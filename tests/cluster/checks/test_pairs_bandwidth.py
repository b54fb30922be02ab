"""The bandwidth matrix: its schedule, what it calls odd, how it looks, and real transfers on this machine."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from testkit.local_connection import LocalConnection

from burst_cli.bandwidth_view import bandwidth_table, bandwidth_text
from cluster.checks.bandwidth import BandwidthMatrix, PairRate, bandwidth_findings, measure_bandwidth, plan_rounds
from cluster.checks.finding import Verdict

OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
NODES = ("a", "b", "c", "d")
FAST = 10.0


def matrix(
    slow: Mapping[tuple[str, str], float | None], *, nodes: tuple[str, ...] = NODES, absent: str = ""
) -> BandwidthMatrix:
    """All directions at 10 Gbit/s but these."""
    rates = {}
    for way in ((one, other) for one in nodes for other in nodes if one != other):
        rate = slow.get(way, FAST)
        rates[way] = PairRate(*way, rate, "" if rate else "timeout no answer")
    why = {absent: "python3 is not installed"} if absent else {}
    return BandwidthMatrix(nodes, rates, 2.0, 4, absent=why)


def of_node(node: str, rate: float, nodes: tuple[str, ...] = NODES) -> dict[tuple[str, str], float | None]:
    """Every direction from and to a node at `rate`."""
    return {way: rate for other in nodes if other != node for way in ((node, other), (other, node))}


def verdicts(found: BandwidthMatrix, expected_gbps: float | None = None) -> list[Verdict]:
    return [one.severity for one in bandwidth_findings(found, expected_gbps=expected_gbps)]


@given(count=st.integers(2, 40))
def test_every_pair_is_measured_once_and_no_node_twice_in_a_round(count: int) -> None:
    nodes = [f"n{at}" for at in range(count)]
    rounds = plan_rounds(nodes)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    for present in rounds:
        seen = [node for pair in present for node in pair]
        assert len(seen) == len(set(seen))
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)


def test_one_at_a_time_has_a_pair_per_round() -> None:
    rounds = plan_rounds(NODES, at_once=False)
    assert [len(pairs) for pairs in rounds] == [1] * 6
    assert plan_rounds(NODES)[0] == [("a", "d"), ("b", "c")]


def test_equal_links_are_fine() -> None:
    found = matrix({})
    assert verdicts(found) == [OK] * 4
    assert (found.minimum_gbps, found.median_gbps, found.usual_gbps) == (FAST, FAST, FAST)
    assert (found.odd_nodes(), found.odd_pairs()) == ((), ())


@pytest.mark.parametrize(("rate", "expected"), [(7.0, OK), (6.99, WARN), (3.5, WARN), (3.49, FAIL)])
def test_a_slow_direction_is_told_at_both_its_ends(rate: float, expected: Verdict) -> None:
    found = matrix({("b", "c"): rate})
    assert verdicts(found) == [OK, expected, expected, OK]
    if expected is not OK:
        assert "b → c" in bandwidth_findings(found)[1].observed
        assert [(one.source, one.target) for one in found.odd_pairs()] == [("b", "c")]


@pytest.mark.parametrize(("rate", "expected"), [(7.0, OK), (6.99, WARN), (3.49, FAIL)])
@pytest.mark.parametrize("nodes", [("a", "b", "c"), NODES, ("a", "b", "c", "d", "e")])
def test_a_slow_node_bears_the_blame_alone(rate: float, expected: Verdict, nodes: tuple[str, ...]) -> None:
    found = matrix(of_node("b", rate, nodes), nodes=nodes)
    assert verdicts(found) == [expected if node == "b" else OK for node in nodes]
    assert found.usual_gbps == FAST
    assert found.odd_pairs() == ()


def test_the_plain_median_would_not_see_a_slow_node_of_four() -> None:
    found = matrix(of_node("b", 5.0))
    assert found.median_gbps == 7.5
    assert found.odd_nodes() == ("b",)


def test_of_two_nodes_the_slower_direction_is_odd() -> None:
    assert verdicts(matrix({("a", "b"): 2.0}, nodes=("a", "b"))) == [FAIL, FAIL]


@pytest.mark.parametrize(("expected_gbps", "verdict"), [(14.0, OK), (14.5, WARN)])
def test_equally_slow_links_are_seen_only_against_what_is_expected(expected_gbps: float, verdict: Verdict) -> None:
    assert verdicts(matrix({}), expected_gbps) == [verdict] * 4


def test_what_was_not_measured_is_unknown_at_both_ends() -> None:
    found = matrix({("b", "c"): None}, absent="e")
    assert verdicts(found) == [OK, UNKNOWN, UNKNOWN, OK, UNKNOWN]
    assert "timeout no answer" in bandwidth_findings(found)[1].observed
    nothing = matrix(dict.fromkeys(matrix({}).rates))
    assert verdicts(nothing) == [UNKNOWN] * 4
    assert nothing.usual_gbps is None


def test_the_dictionary_holds_plain_values() -> None:
    told = matrix({("b", "c"): 2.0, ("a", "d"): None}).to_dict()
    assert told["gbps"][1] == [FAST, None, 2.0, FAST]
    assert told["odd_pairs"] == [{"source": "b", "target": "c", "gbps": 2.0}]
    assert told["unmeasured"] == [{"source": "a", "target": "d", "problem": "timeout no answer"}]


def test_without_colours_marks_say_what_is_slow() -> None:
    lines = bandwidth_text(matrix({("b", "c"): 6.0, ("c", "a"): 2.0, ("a", "d"): None})).splitlines()
    assert [" ".join(line.split()) for line in lines[:5]] == [
        "a b c d",
        "a · 10.0 10.0 ?",
        "b 10.0 · ! 6.00 10.0",
        "c !! 2.00 10.0 · 10.0",
        "d 10.0 10.0 10.0 ·",
    ]
    assert len({len(line) for line in lines[:5]}) == 1
    assert "c → a is slow: 2.00 Gbit/s" in lines
    assert "a → d not measured: timeout no answer" in lines


def shown(found: BandwidthMatrix, width: int, *, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colours, color_system="truecolor" if colours else None
    )
    console.print(bandwidth_table(found))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_has_colours_and_the_same_marks() -> None:
    found = matrix({("b", "c"): 6.0, ("c", "a"): 2.0})
    assert "! 6.00" in shown(found, 80)
    assert "!! 2.00" in shown(found, 80)
    coloured = shown(found, 80, colours=True)
    assert "\x1b[1;37;41m!! 2.00" in coloured
    assert "\x1b[1;33m! 6.00" in coloured
    assert coloured.count("\x1b[92m") == 10


def test_a_matrix_too_wide_for_the_screen_becomes_a_line_per_node() -> None:
    nodes = tuple(f"node{at:03}" for at in range(40))
    text = shown(matrix(of_node("node017", 2.0, nodes), nodes=nodes), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[2].split()[:3] == ["node017", "!!", "2.00"]
    assert "node017 is slow with most others" in text


def test_names_are_never_markup() -> None:
    nodes = ("[red]x[/red]", "[/]")
    assert "[red]x[/red]" in shown(matrix({}, nodes=nodes), 80)


def test_no_node_at_all_is_said() -> None:
    empty = BandwidthMatrix((), {}, 2.0, 4, absent={"a": "no python3"})
    for text in (shown(empty, 80), bandwidth_text(empty)):
        assert "No pair of nodes could be measured." in text
        assert "a took no part: no python3" in text


@pytest.fixture
def nodes() -> Iterator[dict[str, LocalConnection]]:
    connections = {node: LocalConnection(node) for node in ("a", "b", "c")}
    yield connections
    for connection in connections.values():
        for process in connection.processes:
            process.end()


ADDRESSES = {"a": "127.0.0.31", "b": "127.0.0.32", "c": "127.0.0.33"}


def test_real_transfers_fill_the_matrix_and_tell_of_every_direction(nodes: dict[str, LocalConnection]) -> None:
    told: list[PairRate] = []
    found = measure_bandwidth(nodes, ADDRESSES, seconds=0.2, streams=2, on_pair=told.append)
    assert {(one.source, one.target) for one in told} == set(found.rates)
    assert len(found.rates) == 6
    assert all((one.gbps or 0.0) > 0.1 for one in told)
    assert {connection.processes[0].popen.wait(200) for connection in nodes.values()} == {0}


def test_a_node_that_takes_no_part_is_named(nodes: dict[str, LocalConnection]) -> None:
    found = measure_bandwidth(nodes, {**ADDRESSES, "b": "192.0.2.7"}, seconds=0.1, streams=1)
    assert found.nodes == ("a", "c")
    assert set(found.rates) == {("a", "c"), ("c", "a")}
    assert "192.0.2.7" in found.absent["b"]


def test_one_node_alone_has_nothing_to_measure(nodes: dict[str, LocalConnection]) -> None:
    found = measure_bandwidth({"a": nodes["a"]}, ADDRESSES, seconds=0.1)
    assert verdicts(found) == [UNKNOWN]
