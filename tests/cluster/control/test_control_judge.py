"""Whom several nodes together blame: the cause stays the cause, whatever else the nodes say and in whichever order."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.link import NodeStatus
from cluster.failure import Death, Failure, NodeEvidence, failure_from_dict, find_failure, first_death

NODES, LOCAL_RANKS = 4, 2
CULPRIT = 5  # on the third node
SECOND_NS = 1_000_000_000
START_NS = 1_700_000_000 * SECOND_NS


def error(rank: int, kind: str = "exception", at_s: float = 0.0, **more: Any) -> dict[str, Any]:
    own = {"rank": rank, "kind": kind, "type": "ValueError", "message": f"error of rank {rank}", "exit_code": 1}
    return {**own, "time_ns": START_NS + int(at_s * SECOND_NS), **more}


@st.composite
def echo(draw: st.DrawFn, rank: int) -> tuple[list[dict[str, Any]], Death | None, int]:
    """(errors, what torchrun named, its exit code) of a rank that only noticed that another one was gone."""
    at_s = draw(st.floats(0.01, 30.0))
    which = draw(st.sampled_from(["peer_lost", "aborted", "terminated", "stopped"]))
    if which == "peer_lost":
        return [error(rank, "peer_lost", at_s)], Death(rank, 1), 1
    if which == "aborted":
        return [], Death(rank, -signal.SIGABRT, at_ns=START_NS + int(at_s * SECOND_NS)), 1
    if which == "terminated":
        return [], Death(rank, -signal.SIGTERM), 1
    return [], None, 1


def cause(kind: str) -> NodeEvidence:
    """The third node, whose rank 5 (or which itself) failed first."""
    if kind == "killed":
        return NodeEvidence("n2", (), Death(CULPRIT, -signal.SIGKILL, at_ns=START_NS), exit_code=1)
    if kind == "crashed":
        return NodeEvidence("n2", (), Death(CULPRIT, -signal.SIGSEGV), exit_code=1)
    if kind == "seen by the supervisor alone":
        return NodeEvidence("n2", (), None, (Death(CULPRIT, -signal.SIGKILL, at_ns=START_NS),), exit_code=1)
    if kind == "raised":
        return NodeEvidence("n2", [error(CULPRIT)], Death(CULPRIT, 1), exit_code=1)
    if kind == "exited":
        return NodeEvidence("n2", (), Death(CULPRIT, 7), exit_code=1)
    if kind == "left early":
        return NodeEvidence("n2", (), None, (Death(CULPRIT, 0, at_ns=START_NS),), exit_code=1)
    if kind == "lost":
        return NodeEvidence("n2", lost="nothing was heard of it", lost_at_ns=START_NS)
    return NodeEvidence("n2", exit_code=-signal.SIGKILL)


KINDS = ("killed", "crashed", "seen by the supervisor alone", "raised", "exited", "left early", "lost", "agent killed")


def is_blamed(failure: Failure, kind: str) -> bool:
    rank = None if kind in ("lost", "agent killed") else CULPRIT
    return (failure.rank, failure.host) == (rank, "n2")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_echoes_never_change_the_blame_whatever_they_say_and_in_whichever_order(kind: str, data: st.DataObject) -> None:
    nodes = [cause(kind)]
    for number in (0, 1, 3):
        errors, death, code = data.draw(echo(LOCAL_RANKS * number))
        more, _, _ = data.draw(echo(LOCAL_RANKS * number + 1))
        nodes.append(NodeEvidence(f"n{number}", data.draw(st.permutations(errors + more)), death, exit_code=code))
    assert is_blamed(find_failure(data.draw(st.permutations(nodes))), kind)


@given(times=st.lists(st.floats(0, 100), min_size=2, max_size=6, unique_by=lambda at_s: int(at_s * SECOND_NS)))
def test_earliest_of_several_own_errors_is_the_cause(times: list[float]) -> None:
    nodes = [NodeEvidence(f"n{rank}", [error(rank, at_s=at_s)]) for rank, at_s in enumerate(times)]
    first = min(range(len(times)), key=lambda rank: times[rank])
    assert find_failure(nodes).rank == find_failure(nodes[::-1]).rank == first


@given(order=st.permutations(range(4)))
def test_without_times_the_verdict_does_not_depend_on_the_order_of_nodes(order: list[int]) -> None:
    nodes = [NodeEvidence(f"n{rank}", (), Death(rank, 3), exit_code=1) for rank in range(4)]
    assert find_failure([nodes[number] for number in order]).rank == 0


def test_errors_after_the_loss_of_a_node_are_its_echo_and_those_before_are_not() -> None:
    lost = NodeEvidence("n2", lost="silent", lost_at_ns=START_NS + 5 * SECOND_NS)
    assert find_failure([lost, NodeEvidence("n0", [error(0, at_s=9.0)])]).host == "n2"
    assert find_failure([lost, NodeEvidence("n0", [error(0, at_s=1.0)])]).host == "n0"


def test_ranks_that_died_with_their_torchrun_are_not_blamed_for_it() -> None:
    dead = tuple(Death(rank, -signal.SIGKILL, at_ns=START_NS) for rank in (0, 1))
    failure = find_failure([NodeEvidence("n0", (), None, dead, -signal.SIGKILL)])
    assert (failure.kind, failure.rank, failure.host) == ("launcher", None, "n0")
    assert "torchrun" in failure.message


def test_error_marked_as_an_echo_is_one_whatever_its_kind() -> None:
    late = error(0, is_echo=True, at_s=-1.0)
    assert find_failure([NodeEvidence("n0", [late]), NodeEvidence("n1", (), Death(2, 7), exit_code=1)]).rank == 2
    assert find_failure([NodeEvidence("n0", [late])]).rank == 0


def test_first_to_vanish_is_named_when_nobody_knows_how() -> None:
    seen = (Death(3, None, at_ns=START_NS), Death(2, None, at_ns=START_NS + SECOND_NS))
    failure = find_failure([NodeEvidence("n1", (), None, seen, 1), NodeEvidence("n0", [error(0, "peer_lost", 0.2)])])
    assert (failure.type, failure.rank) == ("Vanished", 3)


def test_two_that_vanished_together_are_not_told_apart() -> None:
    seen = (Death(3, None, at_ns=START_NS), Death(2, None, at_ns=START_NS))
    failure = find_failure([NodeEvidence("n1", (), None, seen, 1), NodeEvidence("n0", [error(0, "peer_lost", 0.2)])])
    assert failure.kind == "peer_lost"


def test_rank_of_a_node_is_counted_from_its_first() -> None:
    assert first_death("failed (exitcode: -9) local_rank: 1 (pid: 6) of binary", 4) == Death(5, -9, 6)


@given(
    st.dictionaries(
        st.sampled_from(["rank", "kind", "type", "message", "step", "phase", "exit_code", "memory", "time_ns"]),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.booleans(),
    )
)
def test_error_files_may_hold_anything(document: dict[str, Any]) -> None:
    failure = find_failure([NodeEvidence("n0", [document])])
    assert failure.exit_code in (1, 2)
    assert isinstance(failure.to_dict(), dict)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (None, None),
        ({"cause": "exit", "exit_code": 0}, "ended"),
        ({"cause": "exit", "exit_code": 7}, "ended with exit code 7"),
        ({"cause": "exit", "exit_code": -9}, "ended by signal 9"),
        ({"cause": "exit", "exit_code": None, "error": "it fell"}, "ended: it fell"),
        ({"cause": "lease", "exit_code": 0}, "stopped by itself, because it heard nothing of its launcher"),
        ({"cause": "start_failed", "exit_code": None, "error": "no python"}, "could not start: no python"),
        ({"cause": "stop", "exit_code": -15, "stop_cause": "Ctrl-C"}, "stopped (Ctrl-C)"),
        ({"cause": "stop", "exit_code": 0}, "stopped"),
    ],
)
def test_end_of_a_node_is_said_in_a_few_words(outcome: dict[str, Any] | None, end: str | None) -> None:
    assert NodeStatus("n1", "ended", outcome).end == end


def test_failure_survives_run_json() -> None:
    failure = Failure("hang", "Hang", "rank 1 is stopped", 1, "n0", details=("a line",), stacks="/x")
    assert failure_from_dict(failure.to_dict()) == failure
    assert failure_from_dict({"kind": "nonsense"}) is None
    assert failure_from_dict(None) is None
