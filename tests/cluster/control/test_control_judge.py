"""Whom several nodes together blame: the cause stays the cause, whatever else the nodes say and in whichever order."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.judge import advice
from cluster.control.link import NodeStatus
from cluster.failure import Death, Failure, KillFacts, Kind, NodeEvidence, failure_from_dict, find_failure, first_death
from engine.config.settings import RunConfig

LOCAL_RANKS = 2
CULPRIT = 5  # on the third of four nodes
SECOND_NS = 1_000_000_000
START_NS = 1_700_000_000 * SECOND_NS


def error(rank: int, kind: str = "exception", at_s: float = 0.0, **more: Any) -> dict[str, Any]:
    own = {"rank": rank, "kind": kind, "type": "ValueError", "message": f"error of rank {rank}", "exit_code": 1}
    return {**own, "time_ns": START_NS + int(at_s * SECOND_NS), **more}


@st.composite
def echo(draw: st.DrawFn, rank: int) -> tuple[list[dict[str, Any]], Death | None]:
    """(errors, what torchrun named) of a rank that only noticed that another one was gone."""
    at_s = draw(st.floats(0.01, 30.0))
    which = draw(st.sampled_from(["peer_lost", "aborted", "terminated", "stopped"]))
    deaths = {
        "peer_lost": Death(rank, 1),
        "aborted": Death(rank, -signal.SIGABRT, at_ns=START_NS + int(at_s * SECOND_NS)),
        "terminated": Death(rank, -signal.SIGTERM),
    }
    return [error(rank, "peer_lost", at_s)] if which == "peer_lost" else [], deaths.get(which)


# The third node, whose rank 5 (or which itself) failed first.
CAUSES = {
    "killed": NodeEvidence("n2", (), Death(CULPRIT, -signal.SIGKILL, at_ns=START_NS), exit_code=1),
    "crashed": NodeEvidence("n2", (), Death(CULPRIT, -signal.SIGSEGV), exit_code=1),
    "seen by the supervisor": NodeEvidence("n2", vanished=(Death(CULPRIT, -9, at_ns=START_NS),), exit_code=1),
    "raised": NodeEvidence("n2", [error(CULPRIT)], Death(CULPRIT, 1), exit_code=1),
    "exited": NodeEvidence("n2", (), Death(CULPRIT, 7), exit_code=1),
    "left early": NodeEvidence("n2", vanished=(Death(CULPRIT, 0, at_ns=START_NS),), exit_code=1),
    "lost": NodeEvidence("n2", lost="nothing was heard of it", lost_at_ns=START_NS),
    "agent killed": NodeEvidence("n2", exit_code=-signal.SIGKILL),
}


@pytest.mark.parametrize("kind", CAUSES)
@settings(max_examples=30)
@given(data=st.data())
def test_echoes_never_change_the_blame_whatever_they_say_and_in_whichever_order(kind: str, data: st.DataObject) -> None:
    nodes = [CAUSES[kind]]
    for number in (0, 1, 3):
        (errors, death), (more, _) = (data.draw(echo(LOCAL_RANKS * number + rank)) for rank in range(LOCAL_RANKS))
        nodes.append(NodeEvidence(f"n{number}", data.draw(st.permutations(errors + more)), death, exit_code=1))
    failure = find_failure(data.draw(st.permutations(nodes)))
    assert (failure.rank, failure.host) == (None if kind in ("lost", "agent killed") else CULPRIT, "n2")


@given(times=st.lists(st.floats(0, 100), min_size=2, max_size=6, unique_by=lambda at_s: int(at_s * SECOND_NS)))
def test_earliest_of_several_own_errors_is_the_cause(times: list[float]) -> None:
    nodes = [NodeEvidence(f"n{rank}", [error(rank, at_s=at_s)]) for rank, at_s in enumerate(times)]
    first = min(range(len(times)), key=lambda rank: times[rank])
    assert find_failure(nodes).rank == find_failure(nodes[::-1]).rank == first


@given(order=st.permutations(range(4)))
def test_without_times_the_verdict_does_not_depend_on_the_order_of_nodes(order: list[int]) -> None:
    nodes = [NodeEvidence(f"n{rank}", (), Death(rank, 3), exit_code=1) for rank in range(4)]
    assert find_failure([nodes[number] for number in order]).rank == 0


KERNEL = KillFacts("the count rose", "Perhaps memory.", {"peak_bytes": 5})
SOMEBODY = KillFacts(None, "Perhaps memory.", {"peak_bytes": 5})


def alone(
    errors: Sequence[dict[str, Any]] = (), death: Death | None = None, code: int = 1, **more: Any
) -> NodeEvidence:
    """The only node of a run, whose errors came in this order."""
    timed = [{**error, "time_ns": START_NS + number} for number, error in enumerate(errors)]
    return NodeEvidence("n0", timed, death, exit_code=code, **more)


def seen(*ends: tuple[int, int | None, int], node: str = "n1", **more: Any) -> NodeEvidence:
    """What only a supervisor saw of its ranks: which one, how, when."""
    vanished = tuple(Death(rank, code, at_ns=START_NS + at_ns) for rank, code, at_ns in ends)
    return NodeEvidence(node, vanished=vanished, **{"exit_code": 1, **more})


RANK_KINDS = ("config", "user", "oom", "exception", "peer_lost")
TAKEN = "port 1 is free\nfailed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n"
PORT, BY_ANOTHER = "the port of the rendezvous of the first node", "is taken: another process listens there"
LOST_PEER = NodeEvidence("n0", [error(0, "peer_lost", 0.2)])
LOST = NodeEvidence("n2", lost="silent", lost_at_ns=START_NS + 5 * SECOND_NS)
KERNELS_WORDS = "the kernel killed the process (SIGKILL) because host memory ran out: the count rose"
KILLED_WORDS = "torchrun was ended by signal 9 (SIGKILL). Perhaps memory. No rank reported an error."


@pytest.mark.parametrize(
    ("nodes", "facts"),
    [
        ([alone([error(2, step=7), error(0)], Death(2, 1))], {"rank": 2, "step": 7, "status": "failed"}),
        # Errors after the loss of a node are its echo, those before are not.
        ([LOST, NodeEvidence("n0", [error(0, at_s=9.0)])], {"host": "n2"}),
        ([LOST, NodeEvidence("n0", [error(0, at_s=1.0)])], {"host": "n0"}),
        # Loud echoes of who says nothing.
        ([alone([error(0, "peer_lost"), error(2)], Death(1, -9))], {"rank": 1, "kind": "signal"}),
        ([alone([error(0, "peer_lost"), error(2)], Death(1, -4))], {"rank": 1, "kind": "signal"}),
        ([alone([error(0, "peer_lost"), error(1)])], {"rank": 1}),
        ([alone([error(0, "peer_lost")])], {"kind": "peer_lost"}),
        ([alone([error(0, "peer_lost")], Death(1, 3))], {"rank": 1}),
        ([alone([error(0)], Death(1, -6))], {"rank": 0}),
        ([alone([], Death(1, -6))], {"signal": "SIGABRT"}),
        ([alone([error(0, is_echo=True)]), seen((2, 7, 0))], {"rank": 2}),
        ([alone([error(0, is_echo=True)])], {"rank": 0}),
        # What a rank says of itself stays.
        ([alone([error(1, "oom", memory={"where": "device"})], Death(1, 1))], {"status": "oom", "rank": 1}),
        ([alone([error(1, "oom", memory={"where": "device"})])], {"memory": {"where": "device"}}),
        ([alone([error(0, "config", exit_code=2, phase="step")])], {"exit_code": 2, "phase": "step"}),
        ([alone([error(0, exit_code=3, phase=5, memory={})])], {"exit_code": 1, "phase": None, "memory": None}),
        *(([alone([error(1, kind)])], f"{kind} ValueError 1 n0 None") for kind in RANK_KINDS),
        ([NodeEvidence("", [{"kind": "hang", "message": TAKEN}])], "exception Error None None None"),
        # Who was killed, and by whom.
        ([alone([], Death(0, -9), -9, kill=KERNEL)], {"status": "oom", "rank": 0, "memory": {"peak_bytes": 5}}),
        (
            [alone([], Death(0, -9), kill=KERNEL)],
            {"message": KERNELS_WORDS, "type": "OutOfMemory", "signal": "SIGKILL"},
        ),
        ([alone([], Death(0, -9), kill=SOMEBODY)], "signal SIGKILL 0 n0 SIGKILL"),
        ([alone([], Death(0, 132))], "signal SIGILL 0 n0 SIGILL"),
        ([alone([], Death(0, 128))], "exit SystemExit 0 n0 None"),
        ([alone([], None, -6)], "launcher LauncherDied None n0 None"),
        ([alone([], Death(0, -9), -9, kill=SOMEBODY)], {"status": "failed", "signal": "SIGKILL", "memory": None}),
        ([alone([], None, -9, kill=KERNEL)], {"status": "oom", "rank": None, "memory": {"peak_bytes": 5}}),
        ([alone([], None, -9, kill=SOMEBODY)], "launcher LauncherDied None n0 SIGKILL"),
        ([alone([], None, -9, kill=SOMEBODY)], {"message": KILLED_WORDS, "memory": None}),
        ([alone([error(1)], Death(1, 1), kill=KERNEL)], {"kind": "exception"}),
        ([alone([], Death(1, -11), kill=KERNEL)], {"kind": "signal"}),
        ([seen((0, -9, 0), (1, -9, 0), node="n0", exit_code=-9)], {"kind": "launcher", "rank": None, "host": "n0"}),
        ([alone([], Death(0, -200))], {"kind": "exit"}),  # no signal has such a number
        # Nobody knows how, or why.
        ([seen((3, None, 0), (2, None, 9)), LOST_PEER], {"type": "Vanished", "rank": 3}),
        ([seen((3, None, 0), (2, None, 0)), LOST_PEER], {"kind": "peer_lost"}),
        ([seen((1, None, 5), exit_code=0), LOST_PEER], "exit EarlyExit 1 n1 None"),
        ([alone([], None, 3)], {"message": "torchrun ended with exit code 3 and no rank reported an error"}),
        ([alone([], None, 0)], "exit EarlyExit None n0 None"),
        ([NodeEvidence("n0")], "launcher Incomplete None None None"),
        ([NodeEvidence("n2", lost="silent")], "node_lost NodeLost None n2 None"),
        ([alone([], None, 1, log=TAKEN)], "port AddressInUse None n0 None"),
        ([alone([], None, 1, log=TAKEN)], {"message": f"port 29500 of n0 {BY_ANOTHER}"}),
        ([alone([], None, 0, log=TAKEN)], {"type": "EarlyExit"}),
        ([NodeEvidence("", [error(0, type="Network", message="EADDRINUSE")])], {"message": f"{PORT} {BY_ANOTHER}"}),
        # Ends that mostly follow another's.
        *(([seen((1, None, 1), (0, code, 2))], {"rank": 1}) for code in (-15, 130, 143)),
        *(([seen((0, code, 2))], {"rank": 0}) for code in (-15, 130, 143)),
    ],
)
def test_first_cause_is_found(nodes: list[NodeEvidence], facts: dict[str, Any] | str) -> None:
    failure = find_failure(nodes)
    if isinstance(facts, str):
        assert f"{failure.kind} {failure.type} {failure.rank} {failure.host} {failure.signal}" == facts
    else:
        assert {name: getattr(failure, name) for name in facts} == facts


TORCHRUN_LOG = """\
W1120 09:47:27.753000 6751 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 6755 closing signal SIGTERM
E1120 09:47:27.761000 6751 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 6756) of binary: /venv/bin/python
Traceback (most recent call last):
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6755)  (SIGTERM)
"""  # noqa: E501 - as torchrun wrote it


def test_first_death_is_read_from_the_log_of_torchrun_and_counted_from_the_first_rank_of_the_node() -> None:
    assert first_death(TORCHRUN_LOG, 4) == Death(rank=5, exit_code=-9, pid=6756)
    assert first_death("all is well") is None


RUN = Path("/runs/tiny/20260101-000000-abcdef")
ADVICE = {
    **dict.fromkeys(("config", "user"), "Correct the setting or file"),
    "oom": "cluster.ranks_per_node",
    "peer_lost": "The rank that it lost said nothing",
    "hang": "Read where every rank was in the log",
    "node_lost": "See what is left of the node",
    "port": "See who listens there",
    "start": "Remove the reason",
    "launcher": "Read the log;",
}


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure("oom", "T", "m", memory={"where": "device"}), "memory.optimizer_store=host"),
        (Failure("signal", "SIGKILL", "m", signal="SIGKILL"), "If `dmesg` shows"),
        (
            Failure("user", "x.CheckpointError", "rank 0: No space left on device"),
            "Free space where the message says; then",
        ),
        (Failure("user", "x.CheckpointError", "a part is missing"), f"then `burst resume {RUN.name}` goes on"),
        (Failure("node_lost", "T", "m", host="n2"), f"`burst resume {RUN.name} --hosts NODES`"),
        *((Failure(kind, "T", "m"), ADVICE.get(kind, "The whole traceback is in the log;")) for kind in get_args(Kind)),
    ],
)
def test_every_kind_of_failure_has_advice_and_survives_run_json(failure: Failure, words: str) -> None:
    assert words in advice(failure, RUN, RunConfig())
    told = Failure("hang", "Hang", "rank 1 is stopped", 1, "n0", details=("a line",), stacks="/x")
    assert [failure_from_dict(one.to_dict()) for one in (failure, told)] == [failure, told]


@given(
    st.dictionaries(
        st.sampled_from(["rank", "kind", "type", "message", "step", "phase", "exit_code", "memory", "time_ns"]),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.booleans(),
    )
)
def test_error_files_and_failures_may_hold_anything(document: dict[str, Any]) -> None:
    failure = find_failure([NodeEvidence("n0", [document])])
    assert failure.exit_code in (1, 2)
    assert isinstance(failure.to_dict(), dict)
    assert failure_from_dict({"kind": "nonsense"}) is failure_from_dict(None) is None


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
