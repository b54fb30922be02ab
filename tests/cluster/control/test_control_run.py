"""How a controller leads a run on several nodes: start, failure, loss, stop and end, in time that a test moves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import STEPS, Act, Scene, World, node, put
from testkit.fake_run import TestbedRun
from testkit.process_table import wait_until_gone
from testkit.testbed_fixture import Testbeds

from cluster.control.attempt import ControllerBusyError, Restarts, controlling, find_controller, tail_text, write_cancel
from cluster.control.link import LaunchTiming, StartRefusedError
from cluster.failure import failure_from_dict
from engine.config.settings import CheckpointConfig

# --- start and a good end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_s", [60.0, None])  # None: of a detached run
def test_run_begins_on_every_node_keeps_their_leases_and_is_completed_when_all_have_ended(
    world: World, lease_s: float | None
) -> None:
    write_cancel(world.run, "burst cancel", None)  # it was for an earlier attempt
    world.at(2, lambda: world.first_node_says("running"))
    world.at(10, world.complete)
    outcome = world.lead(detached=lease_s is None)
    assert (outcome.status, outcome.exit_code, outcome.leftover) == ("completed", 0, ())
    assert [entry["state"] for entry in world.state["history"]] == ["planned", "starting", "running", "completed"]
    assert world.state["nodes_started_at"] is not None
    assert (world.state["lease_s"], world.state["detached"]) == (lease_s, lease_s is None)
    specs = [link.specs[0] for link in world.links]
    assert [(spec.node, spec.first_rank, spec.lease_s) for spec in specs] == [("n1", 0, lease_s), ("n2", 2, lease_s)]
    for link in world.links:
        gaps = [after - before for before, after in zip(link.beats, link.beats[1:], strict=False)]
        assert len(link.beats) >= 9
        assert 0.9 < min(gaps) <= max(gaps) < 1.3
        assert link.is_followed
        assert link.is_closed


def test_nodes_that_refuse_stop_those_that_began_and_the_first_are_told_the_others_counted(tmp_path: Path) -> None:
    world = World(tmp_path, [f"n{number:02}" for number in range(13)])
    for link in world.links[:-1]:
        link.refusal = StartRefusedError(link.node, "folder", "disk full")
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, outcome.leftover) == ("failed", 1, ())
    failure = world.state["failure"]
    assert (failure["kind"], failure["host"], failure["message"]) == ("start", "n00", "n00: disk full")
    assert failure["details"] == [*(f"n{number:02}: disk full" for number in range(1, 9)), "and 3 more"]
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [*[[]] * 12, [0.0]]


def test_node_that_cannot_be_reached_after_the_start_may_hold_what_nobody_stops(world: World) -> None:
    world.links[1].refusal = StartRefusedError("n2", "unreachable", "no answer in 60 s")
    world.links[1].is_silent = True
    outcome = world.lead()
    assert [cause for _, cause, _ in world.links[1].stops] == ["start"]
    assert [(left.node, left.pids) for left in outcome.leftover] == [("n2", ())]
    assert outcome.leftover[0].reason == (
        "it could not be reached while it was asked to start, and may have begun all the same; "
        "its ranks end by themselves 60 s after it last heard of a launcher"
    )


def break_down(*_: object) -> None:
    raise BrokenPipeError("the reader left")


def watch(act: Act) -> Act:
    """Whoever watches does this."""
    return lambda world: setattr(world.observer, "act", lambda: act(world))


LEFT = ("launcher", "BrokenPipeError", "the reader left")


@pytest.mark.parametrize(
    ("story", "ends"),
    [
        ([(0, put(1, start=break_down))], ("failed", 1, LEFT)),
        ([(0, put(1, is_held=True)), (0, watch(break_down))], ("failed", 1, LEFT)),  # n2 is being started
        ([(0, watch(lambda world: (world.press(), break_down())))], ("cancelled", 130, None)),
    ],
)
def test_whatever_breaks_all_that_began_is_killed(world: World, story: list[Scene], ends: tuple[Any, ...]) -> None:
    world.play(*story)
    with pytest.raises(BrokenPipeError):
        world.lead()
    assert [[(cause, grace) for _, cause, grace in link.stops] for link in world.links] == [[("exception", 0.0)]] * 2
    failure = failure_from_dict(world.state["failure"])
    told = None if failure is None else (failure.kind, failure.type, failure.message)
    assert (world.state["state"], world.state["exit_code"], told) == ends
    assert find_controller(world.run) is None


def test_second_controller_is_refused_and_told_whom_to_ask(world: World) -> None:
    with controlling(world.run), pytest.raises(ControllerBusyError, match=f"process {os.getpid()}.*burst cancel"):
        world.lead()
    assert world.state["state"] == "planned"
    assert [link.specs for link in world.links] == [[], []]


# --- failures ---------------------------------------------------------------------------------------------------------

# Rank 3 dies on n2; torchrun there needs a while for its other rank.
FALL = ((5, node(1, "lose_rank", 3, -9)), (6.5, node(1, "torchrun_says", 1, -9)), (6.6, node(1, "end", 1)))
STOPS_KILL = (
    (0, put(0, obeys_s=None)),
    (5, node(1, "rank_error", 3, message="the true cause")),
    *((7.5, node(0, deed, 0, -9)) for deed in ("lose_rank", "torchrun_says")),
)
LATE_NS = 3_600_000_000_000


def be_an_hour_late(world: World) -> None:
    second = world.links[1]
    second.ahead_ns = -LATE_NS
    world.at(5.2, lambda: second.rank_error(2, message="second", time_ns=world.clock.time_ns() - LATE_NS))


EARLY, LOST = {"type": "EarlyExit", "host": "n2"}, {"kind": "node_lost", "host": "n2"}
PORT = {"kind": "port", "host": "n1"}
TAKEN = "failed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n"
# What happens to a run, how its failure is recorded, and words of that.
BLAMED: dict[str, tuple[Sequence[Scene], Mapping[str, object], tuple[str, ...]]] = {
    "an echo is heard first": (((4.6, node(0, "rank_error", 0, "peer_lost")), *FALL), {"rank": 3, "host": "n2"}, ()),
    "torchrun stops its ranks": (((5, node(1, "torchrun_says", 0, -11)),), {"rank": 2, "signal": "SIGSEGV"}, ()),
    "our own stop kills ranks": (STOPS_KILL, {"rank": 3, "message": "the true cause"}, ()),
    "ranks raise when they are stopped": (
        ((0, put(0, obeys_s=None)), (5, node(1, "lose_rank", 3, 7)), (6.5, node(0, "rank_error", 0))),
        {"rank": 3, "type": "SystemExit"}, (),
    ),
    "the clock of a node is wrong": (
        ((0, be_an_hour_late), (5, node(0, "rank_error", 0, message="first"))), {"message": "first"}, (),
    ),
    "a node's ranks leave too early": (((5, node(1, "end", 0)),), EARLY, ()),
    "a rank leaves too early": (
        ((5, node(1, "lose_rank", 2, 0)), (5.1, node(0, "rank_error", 1, "peer_lost"))), {"rank": 2, **EARLY}, (),
    ),
    "a command cannot be started": (
        ((5, node(1, "end", None, "start_failed", error="cannot start /no/python: No such file")),),
        {"kind": "start", "host": "n2"}, ("/no/python",),
    ),
    "a port is taken": (
        ((5, node(0, "log", TAKEN)), (5, node(0, "end", 1))), PORT, ("port 29500 of n1", "cluster.master_port"),
    ),
    "a port is taken, as a rank says": (
        ((5, node(0, "rank_error", 0, type="DistNetworkError", message="port: 29500, EADDRINUSE")),), PORT,
        ("port 29500 of n1",),
    ),
    "a node stays silent": (  # the error of rank 0 comes later
        ((5, put(1, is_silent=True)), (20, node(0, "rank_error", 0, message="timed out"))), LOST, (),
    ),
    "a supervisor was killed": (((5, put(1, phase="lost")),), LOST, ()),
    "a node forgot its run": (((5, put(1, phase="none")),), LOST, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", BLAMED)
def test_cause_is_blamed_whatever_else_is_said(world: World, name: str) -> None:
    story, facts, words = BLAMED[name]
    world.play(*story)
    failure = world.failure()
    assert {field: getattr(failure, field) for field in facts} == facts
    assert all(word in f"{failure.message} {failure.advice}" for word in words)
    left = {"a node stays silent": ["n2"]}.get(name, [])
    assert [text.partition(":")[0] for text in world.state["leftover"]] == left
    assert world.links[1].sweeps == (name in ("a supervisor was killed", "a node forgot its run"))


STOPPED, KILLED = ("failure", 3.0), ("failure", 0.0)


@pytest.mark.parametrize(
    ("story", "rank", "stops", "note"),
    [
        (FALL, 3, [[STOPPED], []], "n2: rank 3 ended (SIGKILL)"),
        ([(5, node(1, "rank_error", 2))], 2, [[STOPPED], [KILLED]], "n2: rank 2 failed"),  # its node's ranks go on
    ],
)
def test_failure_on_one_node_stops_the_others_after_time_for_evidence_and_kills_what_is_left(
    world: World, story: Sequence[Scene], rank: int, stops: list[list[tuple[str, float]]], note: str
) -> None:
    world.play(*story)
    failure = world.failure()
    log = str(world.run.log_dir("n2") / "torchrun.log")
    assert (failure.rank, failure.host, failure.log) == (rank, "n2", log)
    assert [[(cause, grace_s) for _, cause, grace_s in link.stops] for link in world.links] == stops
    for link, due_s in zip(world.links, (1.0, 3.0), strict=True):
        assert all(due_s <= at - 1005.0 < due_s + 0.5 for at, _, _ in link.stops)
    assert world.observer.notes[0] == f"{note}; stopping the run"


@pytest.mark.parametrize(
    ("story", "causes"),
    [
        (  # ranks may take their time to say that training is complete
            [
                *((number / 10, lambda world, number=number: world.step(number)) for number in range(1, STEPS + 1)),
                *((2, node(1, "end", 0)), (20, World.complete)),
            ],
            [],
        ),
        # or go on, for a minute
        ([(1, lambda world: world.first_node_says("completed")), (60, node(0, "end", 0)), (60, node(1, "end", 0))], []),
        ([(1, lambda world: world.first_node_says("completed")), (2, node(0, "end", 0))], ["completed"]),
    ],
)
def test_what_ranks_do_around_completion_is_no_failure(world: World, story: Sequence[Scene], causes: list[str]) -> None:
    world.play(*story)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code) == ("completed", 0)
    assert [cause for _, cause, _ in world.links[1].stops] == causes


@pytest.mark.parametrize("lost_s", [2.0, None])  # None: the others' errors end the run before the silence is too long
def test_lost_node_beats_what_the_others_say_and_is_named_as_for_the_launch(world: World, lost_s: float | None) -> None:
    (world.run.path / "overrides.txt").write_text("exp=tiny\ncluster=lab\ncluster.ssh.user=me\ntrain.steps=3\n")
    error = node(0, "rank_error", 0, "exception", message="gloo timed out")
    world.play((5, put(1, is_silent=True)), (8, error), (8, node(0, "end", 1)))
    failure = world.failure(timing=LaunchTiming(lost_s=lost_s))
    assert (failure.kind, failure.host) == ("node_lost", "n2")
    assert "`burst check-nodes cluster=lab cluster.ssh.user=me --hosts n2`" in str(failure.advice)


def test_logs_that_do_not_arrive_are_waited_for_and_processes_that_do_not_die_are_named(world: World) -> None:
    world.play((0, put(1, is_synced=False)), (5, node(1, "end", 0, leftover_pids=[17, 18])), (5, World.complete))
    outcome = world.lead()
    assert (outcome.status, [(left.node, left.pids) for left in outcome.leftover]) == ("completed", [("n2", (17, 18))])
    assert 30.0 < world.clock.now - 1005.0 < 31.0
    assert any("n2 did not arrive" in note for note in world.observer.notes)


# --- stop requests ----------------------------------------------------------------------------------------------------


def save_first(world: World) -> None:
    checkpoint, config = CheckpointConfig(every_minutes=30.0, stop_grace_s=90.0), world.plan.config
    world.plan = replace(world.plan, config=replace(config, train=replace(config.train, checkpoint=checkpoint)))


def by_file(grace_s: float | None) -> Act:
    return lambda world: write_cancel(world.run, "somebody", grace_s)


PATIENT_S = 12.0
ONCE, THRICE = ((5, World.press),), tuple((second, World.press) for second in (5, 6, 7))
# What is asked for, with which graces each node is stopped, which nodes are left, and how long that takes.
REQUESTS: dict[str, tuple[Sequence[Scene], list[list[float]], list[str], float]] = {
    "before the start": (((0, World.press),), [[], []], [], -4.0),
    "during the start": (((0.01, World.press),), [[PATIENT_S]] * 2, [], -4.0),
    "while a node is being started": (
        ((0, put(1, is_held=True)), *ONCE, (5.5, node(1, "let_go"))), [[PATIENT_S]] * 2, [], 2.0,
    ),
    "once": (ONCE, [[PATIENT_S]] * 2, [], 2.0),
    "of ranks that save a checkpoint first": (((0, save_first), *ONCE), [[90.0]] * 2, [], 2.0),
    "in the run folder, where it becomes more urgent": (
        ((0, put(0, 1, obeys_s=None)), (5, by_file(None)), (6, by_file(0.0))), [[PATIENT_S, 0.0]] * 2, [], 2.0,
    ),
    "once, then at once by a file": (
        ((0, put(0, 1, obeys_s=None)), *ONCE, (6, by_file(0.0))), [[PATIENT_S, 0.0]] * 2, [], 2.0,
    ),
    "three times": (((0, put(0, 1, deaf=True)), *THRICE), [[PATIENT_S, 0.0]] * 2, ["n1", "n2"], 3.0),
    "of a node that never ends": (
        ((0, put(1, deaf=True)), *ONCE), [[PATIENT_S]] * 2, ["n2"], PATIENT_S + 15.5,
    ),
    "of a node that cannot be heard": (  # for eight seconds
        ((0, put(1, deaf=True)), (8.7, put(1, is_silent=True)), *ONCE), [[PATIENT_S]] * 2, ["n2"], PATIENT_S + 0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_run_is_stopped_as_patiently_as_somebody_asks(world: World, name: str) -> None:
    story, graces, left, within_s = REQUESTS[name]
    world.play(*story)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, world.state["state"]) == ("cancelled", 130, "cancelled")
    assert [[grace for _, _, grace in link.stops] for link in world.links] == graces
    assert [one.node for one in outcome.leftover] == left
    assert [text.partition(":")[0] for text in world.state["leftover"]] == left
    assert world.clock.now < 1005.0 + within_s
    assert ("killing what is left" in " ".join(world.observer.notes)) == (0.0 in graces[0])
    assert within_s < PATIENT_S or world.clock.now > 1004.0 + within_s
    cause = "somebody" if "folder" in name else "Ctrl-C"
    assert world.observer.stops == [(cause, grace_s) for grace_s in graces[0][:1]]
    assert {spec.stop_grace_s for link in world.links for spec in link.specs} == set(graces[0][:1])
    assert not (world.run.path / "cancel.json").exists()


def test_request_while_a_run_fails_does_not_make_it_a_cancelled_one(world: World) -> None:
    world.play((5, node(1, "rank_error", 3)), (5.5, World.press))
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)


# --- another attempt --------------------------------------------------------------------------------------------------


def test_another_attempt_knows_nothing_of_the_one_before(world: World) -> None:
    world.play(*FALL)
    assert world.lead().status == "failed"
    world.links[1].leave("outcome.json", {"exit_code": 1, "cause": "exit"})
    for link in world.links:
        link.outcome, link.phase, link.supervisor, link.stops = None, "none", {}, []
    begin = world.clock.now
    world.at(3, lambda: world.links[0].end(1))
    failure = world.failure()
    assert world.state["attempt"] == 2
    assert failure.rank is None  # torchrun.log still names rank 3, but that was in the first attempt
    log = world.run.log_dir("n2") / "torchrun.log"
    size, text = log.stat().st_size, log.read_text()
    assert world.state["log_starts"] == {"logs/n2/torchrun.log": size}
    ends = [tail_text(log, *limits) for limits in ((7,), (2, 3), (99, size - 3), (99, size), (99, size + 1))]
    assert ends == [text[-7:], text[-2:], text[-3:], "", text]
    assert world.clock.now - begin > 3
    assert (world.run.path / "attempts/1/nodes/n2/outcome.json").exists()
    assert not (world.run.path / "nodes/n2/outcome.json").exists()
    assert Restarts().after(world.run) == Restarts(1, 0)
    world.run.append_event("checkpoint", step=1)
    assert [Restarts(3, saved).after(world.run) for saved in (0, 1)] == [Restarts(1, 1), Restarts(4, 1)]


# --- over real sshd: only the ranks are fakes -------------------------------------------------------------------------


def test_rank_that_fails_on_the_second_node_is_blamed_and_the_next_attempt_completes_with_all_files_here(
    module_testbeds: Testbeds, tmp_path: Path
) -> None:
    one = TestbedRun(module_testbeds.make(nodes=2, rails=1), tmp_path, "raise", local_ranks=2, bad_rank=3)
    first, second = one.testbed.node_names
    try:
        failure = one.lead()[0].failure
        assert failure is not None
        assert (failure.kind, failure.rank, failure.host) == ("exception", 3, second)
        assert "tenth" in failure.message
        assert str(failure.log) == str(one.run.log_path(second, 3))
        one.mend()
        outcome, _ = one.lead()
        assert (outcome.status, outcome.failure, outcome.leftover) == ("completed", None, ())
        assert wait_until_gone(one.run.run_id, 15.0) == []
    finally:
        one.kill()
    assert one.run.read_state()["attempt"] == 2
    assert [row["step"] for row in one.run.read_metrics()] == [1, 2, 3, 4, 5]
    assert (one.run.path / "attempts/1/metrics.jsonl").exists()
    assert (one.run.read_summary() or {})["attention_preset"] == "ring"
    logs = [sorted(path.name for path in one.run.log_dir(node).glob("rank*.log")) for node in (first, second)]
    assert logs == [["rank0000.log", "rank0001.log"], ["rank0002.log", "rank0003.log"]]
    assert one.run.log_path(second, 3).read_text().endswith("rank 3 in mode ok\n")
