"""The culprit of recorded hangs: what real ranks said under torchrun and gloo, and the same with parts missing.

A recording holds a `RankEvidence` of every rank: the files of its node after `BURST_FAULT` had made one hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.hang_blame import Culprit, RankEvidence, find_culprit

HANGS = Path(__file__).parent / "hangs"
# Recording -> the ranks to name, whether that is certain, words of the reason, a function among the decisive lines.
EXPECTED = {
    "sleep_in_forward": ((2,), True, "has not entered all_gather", "_sleep_forever"),
    "interpreter_held": ((1,), True, "something holds its interpreter", "_hold_the_interpreter"),
    "stopped": ((1,), True, "SIGSTOP", None),
    "other_collective": ((1,), True, "entered broadcast number 3 of group gradients", "broadcast"),
    "other_order": ((0, 1), False, "wait for each other", "all_reduce"),
    "no_message": ((2,), True, "a message, for which ranks 1 and 3 wait", "no_message"),
    "stuck_loader": ((1,), True, "has not entered all_reduce", "read_batch"),
}


def recorded(name: str) -> list[RankEvidence]:
    entries = json.loads((HANGS / f"{name}.json").read_text(encoding="utf-8"))
    return [RankEvidence(**entry) for entry in entries]


def changed(evidence: list[RankEvidence], **facts: Any) -> list[RankEvidence]:
    return [replace(one, **facts) for one in evidence]


def culprit(evidence: list[RankEvidence]) -> Culprit:
    found = find_culprit(evidence)
    assert found is not None
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_the_culprit_of_a_recorded_hang_is_named(name: str) -> None:
    ranks, certain, words, function = EXPECTED[name]
    found = culprit(recorded(name)[::-1])  # in whichever order evidence comes
    assert (found.ranks, found.certain) == (ranks, certain), found
    assert words in found.reason
    assert function is None or any(line.startswith(function) for line in found.lines), found.lines


@pytest.mark.parametrize("name", ["sleep_in_forward", "interpreter_held", "no_message", "stuck_loader"])
@pytest.mark.parametrize("lost", [("flight",), ("stacks",), ("flight", "status")])
def test_one_kind_of_evidence_less_names_the_same_rank(name: str, lost: tuple[str, ...]) -> None:
    assert culprit(changed(recorded(name), **dict.fromkeys(lost))).ranks == EXPECTED[name][0]


def test_progress_alone_names_the_rank_that_is_behind_as_a_guess() -> None:
    found = culprit(changed(recorded("stuck_loader"), flight=None, stacks=None))
    assert (found.ranks, found.certain) == ((1,), False)
    assert "behind" in found.reason


def test_a_rank_that_trains_while_others_evaluate_is_not_behind() -> None:
    status = {"step": 3, "micro_step": 0}
    phases = ["evaluate", "train", "evaluate"]
    evidence = [RankEvidence(rank, "n1", "S", {**status, "phase": phase}) for rank, phase in enumerate(phases)]
    assert find_culprit(evidence) is None


def test_ranks_that_are_all_in_the_same_place_point_at_the_network_between_their_nodes() -> None:
    evidence = [replace(one, flight=None) for one in recorded("no_message")]
    waiting = evidence[0]
    same = [replace(waiting, rank=rank, host=f"node{rank // 2}") for rank in range(4)]
    found = culprit(same)
    assert (found.ranks, found.certain) == ((0, 1, 2, 3), False)
    assert "is the network between node0 and node1 all right?" in found.reason
    assert "every rank waits in a message of the attention" in found.reason


def test_ranks_that_each_entered_another_operation_are_told_but_no_minority_is_sure() -> None:
    found = culprit([entered(rank, op) for rank, op in enumerate("abc")])
    assert (found.ranks, found.certain) == ((1, 2), False)
    assert "entered b number 1 of group 0 where the others entered a" in found.reason


def entered(rank: int, op: str, sizes: object = None) -> RankEvidence:
    """A rank in its first collective, and in a message, which is numbered by itself."""
    entry = {"seq": 1, "op": f"nccl:{op}", "group": "0", "state": "started", "sizes": sizes}
    return RankEvidence(rank, "node1", "S", flight={"entries": [entry, {**entry, "op": "nccl:send", "p2p": True}]})


def test_other_sizes_are_told_of_operations_that_need_the_same() -> None:
    found = culprit([entered(rank, "all_reduce", [[4 if rank == 2 else 2]]) for rank in range(3)])
    assert (found.ranks, found.certain) == ((2,), True)
    assert found.reason.endswith("entered all_reduce number 1 of group 0 with sizes [[4]], the others with [[2]]")
    assert find_culprit([entered(rank, "alltoall_base", [[rank]]) for rank in range(3)]) is None


def recording(rank: int, seq: int, state: str = "started", peer: int | None = None) -> RankEvidence:
    """A rank whose last collective was this one, or that waits for a message of `peer`."""
    entry = {"seq": seq, "op": "nccl:all_gather", "group": "0", "state": state}
    flight = {"entries": [entry], "groups": {"0": [0, 1, 3]}, "waiting": {"what": "recv", "peer": peer}}
    return RankEvidence(rank, "node1", "S", flight=flight)


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ([recording(0, 2, "completed"), recording(1, 1, "completed")], None),  # nobody waits yet
        (
            [recording(0, 1, "completed", peer=1), RankEvidence(1, "node1", "S")],
            "rank 1 on node1 gives no answer, while rank 0 waits in a message from rank 1",
        ),
        # Of two that are awaited the one of whom it is known.
        (
            [
                recording(0, 1, "completed", peer=2),
                recording(1, 1),
                RankEvidence(2, "node1", "S"),
                recording(3, 0, "completed"),
            ],
            "rank 3 on node1 has not entered all_gather number 1 of group 0, for which rank 1 waits",
        ),
    ],
)
def test_who_waits_and_for_whom_is_read_from_what_ranks_record(
    evidence: list[RankEvidence], reason: str | None
) -> None:
    found = find_culprit(evidence)
    assert (found and found.reason) == reason


def test_a_ring_of_messages_that_stands_still_is_no_circle_of_culprits() -> None:
    evidence = recorded("no_message")
    stuck = [
        replace(one, stacks=evidence[0].stacks, flight={**(one.flight or {}), "waiting": waiting(one.rank)})
        for one in evidence
    ]
    found = culprit([replace(one, host="node2") if one.rank > 1 else one for one in stuck])
    assert not found.certain
    assert "is the network between node1 and node2 all right?" in found.reason


def waiting(rank: int) -> dict[str, Any]:
    return {"what": "send", "peer": (rank + 1) % 4, "age_s": 1.0}


@pytest.mark.parametrize(
    ("state", "words"),
    [("gone", "is gone"), ("Z", "is gone"), ("T", "is stopped"), ("t", "is stopped"), ("D", "uninterruptible")],
)
def test_the_state_of_a_process_comes_before_everything_else(state: str, words: str) -> None:
    evidence = recorded("sleep_in_forward")
    evidence[3] = replace(evidence[3], process_state=state, host="node2", stacks=None)
    found = culprit(evidence)
    assert (found.ranks, found.certain) == ((3,), True)
    assert "rank 3 on node2" in found.reason
    assert words in found.reason


def test_input_or_output_of_a_rank_that_waits_like_the_others_is_no_reason() -> None:
    evidence = recorded("sleep_in_forward")
    evidence[0] = replace(evidence[0], process_state="D")
    assert culprit(evidence).ranks == (2,)


def test_input_or_output_of_all_ranks_at_once_blames_none_of_them() -> None:
    found = culprit(changed(recorded("stuck_loader"), process_state="D", stacks=None))
    assert found.ranks == (1,)
    assert "all_reduce" in found.reason


def test_a_node_without_an_answer_is_a_guess() -> None:
    evidence = recorded("sleep_in_forward")
    evidence[2] = RankEvidence(2, "node7", None)
    found = culprit(evidence)
    assert (found.ranks, found.certain) == ((2,), False)
    assert "rank 2 on node7 gives no answer" in found.reason


def test_a_collective_started_ahead_of_time_does_not_hide_who_hangs_elsewhere() -> None:
    evidence = recorded("other_order")
    asleep = (recorded("sleep_in_forward")[2].stacks or "").replace("_sleep_forever", "compute")
    evidence[1] = replace(evidence[1], stacks=asleep)
    found = culprit(evidence)
    assert (found.ranks, found.certain) == ((1,), True)


def test_ranks_that_compute_are_accused_of_nothing() -> None:
    busy = recorded("sleep_in_forward")[2]
    assert find_culprit([replace(busy, rank=rank) for rank in range(3)]) is None
    assert find_culprit([]) is None


def test_what_a_rank_sends_cannot_forge_output() -> None:
    evil = "\x1b[2Jevil\nline\u202e"
    evidence = [
        replace(one, host=f"node{evil}", stacks=(one.stacks or "").replace("_sleep_forever", f"f{evil[:7]}"))
        for one in recorded("sleep_in_forward")
    ]
    found = culprit(evidence)
    for text in (found.reason, *found.lines):
        assert text.isprintable()
        assert len(text) <= 601


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def with_a_part_replaced(document: Any, path: list[int], value: Any) -> Any:
    """`document` with something in it, found by `path`, replaced by `value`."""
    if not path or not isinstance(document, dict | list) or not document:
        return value
    if isinstance(document, dict):
        key = sorted(document)[path[0] % len(document)]
        return {**document, key: with_a_part_replaced(document[key], path[1:], value)}
    index = path[0] % len(document)
    return [*document[:index], with_a_part_replaced(document[index], path[1:], value), *document[index + 1 :]]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(EXPECTED)), st.integers(0, 3), st.lists(st.integers(0, 20), min_size=1, max_size=6), JSON)
def test_nonsense_from_a_rank_never_breaks_the_analysis(name: str, which: int, path: list[int], value: Any) -> None:
    evidence = recorded(name)
    index = which % len(evidence)
    document = with_a_part_replaced({"flight": evidence[index].flight, "status": evidence[index].status}, path, value)
    facts = document if isinstance(document, dict) else {}
    as_object: Callable[[Any], Any] = lambda part: part if isinstance(part, dict) else None  # noqa: E731
    evidence[index] = replace(
        evidence[index], flight=as_object(facts.get("flight")), status=as_object(facts.get("status"))
    )
    found = find_culprit(evidence)
    assert found is None or (json.dumps(found.reason) and set(found.ranks) <= {one.rank for one in evidence})
