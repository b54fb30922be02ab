"""The culprit of recorded hangs: what real ranks said under torchrun and gloo, and the same with parts missing.

A recording holds a `RankEvidence` of every rank: the files of its node after `BURST_FAULT` had made one hang.
"""

from __future__ import annotations

import faulthandler
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.check_fakes import with_part

from cluster.control.hang_blame import Culprit, Frame, RankEvidence, find_culprit, parse_stacks, waits_in

HANGS = Path(__file__).parent / "hangs"
EXPECTED = json.loads((HANGS / "expected.json").read_text())  # of each recording the fields of its `Culprit`


def recorded(name: str, **facts: Any) -> list[RankEvidence]:
    """The evidence of a recording, with these facts of every rank."""
    entries = json.loads((HANGS / f"{name}.json").read_text(encoding="utf-8"))
    return [RankEvidence(**{**entry, **facts}) for entry in entries]


def changed(name: str, number: int, **facts: Any) -> list[RankEvidence]:
    """The evidence of a recording, with these facts of one rank."""
    return [replace(one, **facts) if one.rank == number else one for one in recorded(name)]


def with_code(evidence: RankEvidence, function: str) -> str:
    """Its stacks, with `function` in the place of the sleep."""
    return (evidence.stacks or "").replace("_sleep_forever", function)


def all_in_one_place() -> list[RankEvidence]:
    waiting = recorded("no_message", flight=None)[0]
    return [replace(waiting, rank=rank, host=f"node{rank // 2}") for rank in range(4)]


def entered(rank: int, op: str, sizes: object = None) -> RankEvidence:
    """A rank in its first collective, and in a message, which is numbered by itself."""
    entry = {"seq": 1, "op": f"nccl:{op}", "group": "0", "state": "started", "sizes": sizes}
    return RankEvidence(rank, "node1", "S", flight={"entries": [entry, {**entry, "op": "nccl:send", "p2p": True}]})


def recording(rank: int, seq: int, state: str = "started", peer: int | None = None) -> RankEvidence:
    """A rank whose last collective was this one, or that waits for a message of `peer`."""
    entry = {"seq": seq, "op": "nccl:all_gather", "group": "0", "state": state}
    flight = {"entries": [entry], "groups": {"0": [0, 1, 3]}, "waiting": {"what": "recv", "peer": peer}}
    return RankEvidence(rank, "node1", "S", flight=flight)


def at(*places: str) -> list[RankEvidence]:
    """Ranks at these places: step, micro-step and phase."""
    told = [dict(zip(("step", "micro_step", "phase"), place.split(" ", 2), strict=True)) for place in places]
    numbers = [{**one, "step": int(one["step"]), "micro_step": int(one["micro_step"])} for one in told]
    return [RankEvidence(rank, "n1", "S", status) for rank, status in enumerate(numbers)]


SILENT = RankEvidence(1, "node1", "S")
AHEAD = with_code(recorded("sleep_in_forward")[2], "compute")
THIRD = {"host": "node2", "stacks": None}
ABSENT = {"host": "node7", "process_state": None, "status": None, "stacks": None, "flight": None}
WAITING = recorded("sleep_in_forward", flight=None, status=None)
AWAITED = [recording(0, 1, "completed", peer=2), recording(1, 1), replace(SILENT, rank=2), recording(3, 0, "completed")]
BEHIND = "? rank 1 on n1 is behind in the same step; last seen at step 3, phase"
GONE, STOPPED = "its process is gone", "its process is stopped, by SIGSTOP or a debugger"
STUCK = "its process is in uninterruptible input or output: a disk or network file system does not answer"
ALL_WAIT = "? every rank waits in a message of the attention;"
LOADER = "! rank 1 on node1 has not entered all_reduce number 4 of group default_pg, for which ranks 0 and 2 wait"
AHEAD_OF = "! rank 1 on node1 has not entered all_reduce number 1 of group first, for which rank 0 waits"
BUSY = "in no collective, while ranks 0 and 1 wait; it is in _sleep_forever (engine/run/faults.py:171)"
OTHERS_WAIT = "while ranks 0, 1 and 3 wait in all_gather number 64 of group default_pg"
ONE = "number 1 of group 0"
# What ranks leave, and who is named: surely, or by a guess; None: nobody.
CASES: dict[str, tuple[list[RankEvidence], str | None]] = {
    "progress alone": (
        recorded("stuck_loader", flight=None, stacks=None),
        "? rank 1 on node1 is behind in the same step; last seen at step 4, phase load batch",
    ),
    "one trains while others evaluate": (at("3 0 evaluate", "3 0 train", "3 0 evaluate"), None),
    "one is behind the phase of all": (at("3 0 train", "3 0 forward", "3 0 evaluate"), f"{BEHIND} forward"),
    "one is a micro-step behind": (at("3 1 forward", "3 0 backward"), f"{BEHIND} backward"),
    "one is not through all of them": (at("3 0 optimizer", "3 1 backward"), f"{BEHIND} backward"),
    "one is a step behind": (
        at("4 0 forward", "3 0 optimizer"),
        "? rank 1 on n1 is at step 3, the others at 4; last seen at step 3, phase optimizer",
    ),
    "one says what nobody knows": (at("3 0 forward", "3 0 dreaming"), None),
    "one computes": (WAITING[:3], f"! rank 2 on node1 is {BUSY}"),
    "two compute": ([*WAITING[:3], replace(WAITING[2], rank=3)], f"? ranks 2 and 3 on node1 are {BUSY}"),
    "one shows nothing": (
        [*WAITING[:2], replace(SILENT, rank=2)], "? rank 2 on node1 gave no stacks, while ranks 0 and 1 wait",
    ),
    "all in one place": (all_in_one_place(), f"{ALL_WAIT} is the network between node0 and node1 all right?"),
    "all on one node": (all_in_one_place()[:2], f"{ALL_WAIT} no rank is behind the others"),
    "no circle": ([recording(rank, 1, "completed", peer=1 - rank) for rank in (0, 1)], None),  # but a ring of messages
    "three operations": (
        [entered(rank, op) for rank, op in enumerate("abc")],
        f"? ranks 1 and 2 on node1 entered b {ONE} where the others entered a",
    ),
    "other sizes": (
        [entered(rank, "all_reduce", [[4 if rank == 2 else 2]]) for rank in range(3)],
        f"! rank 2 on node1 entered all_reduce {ONE} with sizes [[4]], the others with [[2]]",
    ),
    "sizes that may differ": ([entered(rank, "alltoall_base", [[rank]]) for rank in range(3)], None),
    "nobody waits yet": ([recording(0, 2, "completed"), recording(1, 1, "completed")], None),
    "a message of who is elsewhere": (
        [recording(0, 1, "completed", peer=1), recording(1, 1, "completed")],
        "! rank 1 on node1 has not sent a message, for which rank 0 waits",
    ),
    "a message of who is silent": (
        [recording(0, 1, "completed", peer=1), SILENT],
        "? rank 1 on node1 gives no answer, while rank 0 waits in a message from rank 1",
    ),
    "of two that are awaited the one of whom it is known": (
        AWAITED, f"! rank 3 on node1 has not entered all_gather {ONE}, for which rank 1 waits",
    ),
    **{
        f"a process in state {state}": (
            changed("sleep_in_forward", 3, **{**THIRD, "process_state": state}), f"! rank 3 on node2: {words}",
        )
        for state, words in {"gone": GONE, "Z": GONE, "T": STOPPED, "t": STOPPED, "D": STUCK}.items()
    },
    **{
        f"{count} processes": (
            [RankEvidence(rank, "n1", "X") for rank in range(count)],
            f"! ranks 0, 1, 2, 3, 4, 5, 6 and {last} on n1: {GONE}",
        )
        for count, last in ((8, "7"), (9, "2 more"))
    },
    "input or output of one that waits": (
        changed("sleep_in_forward", 0, process_state="D"), f"! {EXPECTED['sleep_in_forward']['reason']}",
    ),
    "input or output of all": (
        recorded("stuck_loader", process_state="D", stacks=None), f"{LOADER}; step 4, phase load batch",
    ),
    "a node without an answer": (
        changed("sleep_in_forward", 2, **ABSENT), f"? rank 2 on node7 gives no answer, {OTHERS_WAIT}",
    ),
    "started ahead of time by who hangs elsewhere": (
        changed("other_order", 1, stacks=AHEAD),
        f"{AHEAD_OF}; it is in compute (engine/run/faults.py:171), step 1, phase forward",
    ),
    "all compute": ([replace(recorded("sleep_in_forward")[2], rank=rank) for rank in range(3)], None),
    "nobody": ([], None),
}  # fmt: skip


def culprit(evidence: list[RankEvidence]) -> Culprit:
    found = find_culprit(evidence)
    assert found is not None
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_the_culprit_of_a_recorded_hang_is_named(name: str) -> None:
    found = culprit(recorded(name)[::-1])  # in whichever order evidence comes
    assert json.loads(json.dumps(asdict(found))) == EXPECTED[name]


@pytest.mark.parametrize("name", ["sleep_in_forward", "interpreter_held", "no_message", "stuck_loader"])
@pytest.mark.parametrize("lost", [("flight",), ("stacks",), ("flight", "status")])
def test_one_kind_of_evidence_less_names_the_same_rank(name: str, lost: tuple[str, ...]) -> None:
    assert culprit(recorded(name, **dict.fromkeys(lost))).ranks == tuple(EXPECTED[name]["ranks"])


@pytest.mark.parametrize("name", CASES)
def test_who_holds_up_the_others_is_told_as_far_as_it_is_known(name: str) -> None:
    evidence, told = CASES[name]
    found = find_culprit(evidence)
    assert (found and f"{'!' if found.certain else '?'} {found.reason}") == told


def test_what_a_rank_sends_cannot_forge_output() -> None:
    evil = "\x1b[2Jevil\nline\u202e"
    evidence = recorded("sleep_in_forward", host=f"node{evil}")
    found = culprit([replace(one, stacks=with_code(one, f"f{evil[:7]}")) for one in evidence])
    for text in (found.reason, *found.lines):
        assert text.isprintable()
        assert len(text) <= 601


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(EXPECTED)), st.integers(0, 3), st.lists(st.integers(0, 20), min_size=1, max_size=6), JSON)
def test_nonsense_from_a_rank_never_breaks_the_analysis(name: str, which: int, path: list[int], value: Any) -> None:
    evidence = recorded(name)
    index = which % len(evidence)
    document = with_part({"flight": evidence[index].flight, "status": evidence[index].status}, path, value)
    parts = (
        {name: part for name, part in document.items() if isinstance(part, dict)} if isinstance(document, dict) else {}
    )
    evidence[index] = replace(evidence[index], flight=parts.get("flight"), status=parts.get("status"))
    found = find_culprit(evidence)
    assert found is None or (json.dumps(found.reason) and set(found.ranks) <= {one.rank for one in evidence})


# --- faulthandler's output --------------------------------------------------------------------------------------------

DUMP = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/b/engine/parallel/collectives.py", line 14 in sum_over_ranks
  File "/b/engine/train.py", line 41 in <module>
"""
OTHER = DUMP.replace("0x00007f000000000", "0x00007f111111111")
NAMED = DUMP.replace("0001 (most", "0001 [rank-report] (most").replace("0002 (most", "0002 [MainThread] (most")
SWAPPED = DUMP.replace("Current thread", "Thread").replace("Thread 0x00007f0000000001", "Current thread 0x01")
BACKWARD = """\
Thread 0x01 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 10 in reduce_scatter_single
  File "/x/torch/autograd/function.py", line 20 in apply

Current thread 0x02 (most recent call first):
  File "/x/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/b/engine/train.py", line 41 in <module>
"""
STACKS = recorded("sleep_in_forward")[0].stacks or ""


@pytest.mark.parametrize(
    "earlier", ["", DUMP.replace("line 14 in sum", "line 99 in sum"), f"# rank 0, pid 7\n{OTHER}# rank 0, pid 8\n"]
)
@pytest.mark.parametrize("dump", [DUMP, NAMED, SWAPPED])
def test_the_last_dump_becomes_threads_first_the_one_that_began_in_a_module(earlier: str, dump: str) -> None:
    main, other = parse_stacks(earlier + dump)
    assert (len(main), len(other)) == (4, 2)
    assert main[2] == Frame("/b/engine/parallel/collectives.py", "14", "sum_over_ranks")
    assert str(main[0]) == "all_reduce (torch/distributed/distributed_c10d.py:3252)"


def test_a_rank_waits_where_its_main_thread_does_or_on_a_gpu_that_of_backward() -> None:
    assert waits_in(parse_stacks(DUMP)) == "all_reduce"
    assert parse_stacks(DUMP + "\n" * 1_000_000) == []  # what lies so far back is not looked for
    assert waits_in(parse_stacks(DUMP.replace("torch/distributed/", "numpy/"))) is None
    assert waits_in(parse_stacks(BACKWARD)) == "reduce_scatter_single"
    leading = ("_ops", "utils/_contextlib", "distributed/c10d_logger", "distributed/_tools/a")
    names = [*(f"torch/{name}" for name in leading), "engine/distributed/waits", "lib/contextlib"]
    above = [Frame(f"/x/{name}.py", "1", "f") for name in names]
    for path, function, place in (
        ("engine/attention/transport", "wait", "a message of the attention"),
        ("engine/attention/streams", "wait", "a message of the attention"),
        ("torch/distributed/rendezvous", "_create_c10d_store", "the rendezvous"),
        ("torch/distributed/_functional_collectives", "all_reduce", "all_reduce"),
        ("torch/distributed/rendezvous", "wait", None),
    ):
        assert waits_in([[*above, Frame(f"/x/{path}.py", "1", function)]]) == place
    assert waits_in([above]) is None


def test_what_this_interpreter_writes_is_read(tmp_path: Path) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="a [name] (with) marks")
    thread.start()
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        faulthandler.dump_traceback(file, all_threads=True)
    release.set()
    thread.join()
    main, *others = parse_stacks((tmp_path / "stacks").read_text())
    assert sum(frame.function == "test_what_this_interpreter_writes_is_read" for frame in main) == 1
    assert any(frame.function == "wait" for other in others for frame in other)


@given(st.integers(0, len(STACKS)), st.integers(0, len(STACKS)), st.text())
def test_any_text_is_read_and_one_cut_anywhere_as_far_as_it_goes(first: int, last: int, text: str) -> None:
    for thread in parse_stacks(STACKS[first:last]):
        assert all(frame.file for frame in thread)
    parse_stacks(text + DUMP)
    waits_in(parse_stacks(DUMP + text))
