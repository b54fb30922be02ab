"""How a controller leads a run on several nodes: start, failure, loss, stop and end, in time that a test moves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import STEPS, World

from cluster.control.attempt import ControllerBusyError, controlling, find_controller, write_cancel
from cluster.control.link import LaunchTiming, StartRefusedError
from engine.config.settings import CheckpointConfig

TIMING = LaunchTiming()


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
    world.go_silent(1)
    outcome = world.lead()
    assert [cause for _, cause, _ in world.links[1].stops] == ["start"]
    assert [(left.node, left.pids) for left in outcome.leftover] == [("n2", ())]
    assert "may have begun" in outcome.leftover[0].reason


def break_link(world: World) -> None:
    def start(spec: object) -> None:
        raise KeyError("bug")

    world.links[1].start = start  # type: ignore[method-assign]


def break_observer(world: World) -> None:
    def fail() -> None:
        raise BrokenPipeError("the reader left")

    world.links[1].is_held = True  # it is just being started
    world.observer.act = fail


@pytest.mark.parametrize(("act", "error"), [(break_link, KeyError), (break_observer, BrokenPipeError)])
def test_whatever_breaks_all_that_began_is_killed(
    world: World, act: Callable[[World], None], error: type[Exception]
) -> None:
    act(world)
    with pytest.raises(error):
        world.lead()
    assert [[(cause, grace) for _, cause, grace in link.stops] for link in world.links] == [[("exception", 0.0)]] * 2
    assert world.state["state"] == "failed"
    assert find_controller(world.run) is None


def test_second_controller_is_refused_and_told_whom_to_ask(world: World) -> None:
    with controlling(world.run), pytest.raises(ControllerBusyError, match=f"process {os.getpid()}.*burst cancel"):
        world.lead()
    assert world.state["state"] == "planned"
    assert [link.specs for link in world.links] == [[], []]


# --- failures ---------------------------------------------------------------------------------------------------------


def fail_on_second(world: World) -> None:
    """Rank 3 dies on n2; torchrun there needs a while for its other rank."""
    second = world.links[1]
    second.lose_rank(3, -9)
    world.at(1.5, lambda: second.torchrun_says(1, -9))
    world.at(1.6, lambda: second.end(1))


def leave_early(world: World) -> None:
    world.links[1].lose_rank(2, 0)
    world.at(0.1, lambda: world.links[0].rank_error(1, "peer_lost"))


def echo_first(world: World) -> None:
    world.links[0].rank_error(0, "peer_lost")
    world.at(0.4, lambda: fail_on_second(world))


def stop_of_ours_kills(world: World) -> None:
    def stopped_ranks_die() -> None:
        world.links[0].lose_rank(0, -9)
        world.links[0].torchrun_says(0, -9)

    world.links[0].obeys_s = None
    world.links[1].rank_error(3, message="the true cause")
    world.at(3.5, stopped_ranks_die)


def wrong_clock(world: World) -> None:
    """The second node is an hour late."""
    second, late_ns = world.links[1], 3_600_000_000_000
    honest = second.poll
    second.poll = lambda: dataclasses.replace(honest(), clock_offset_ns=-late_ns)  # type: ignore[method-assign]
    world.links[0].rank_error(0, message="first")
    world.at(0.2, lambda: second.rank_error(2, message="second", time_ns=world.clock.time_ns() - late_ns))


def take_port(world: World) -> None:
    log = world.run.log_dir("n1") / "torchrun.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("failed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n")
    world.links[0].end(1)


def be_silent(world: World) -> None:
    world.go_silent(1)
    world.at(15, lambda: world.links[0].rank_error(0, message="timed out waiting for rank 2"))


EARLY, LOST = {"type": "EarlyExit", "host": "n2"}, {"kind": "node_lost", "host": "n2"}
PORT = {"kind": "port", "host": "n1"}
# What happens to a run, how its failure is recorded, and words of that.
BLAMED: dict[str, tuple[Callable[[World], object], Mapping[str, object], tuple[str, ...]]] = {
    "an echo that is heard first": (echo_first, {"rank": 3, "host": "n2"}, ()),
    "torchrun begins to stop its ranks": (
        lambda world: world.links[1].torchrun_says(0, -11),
        {"rank": 2, "signal": "SIGSEGV"},
        (),
    ),
    "our own stop kills ranks": (stop_of_ours_kills, {"rank": 3, "message": "the true cause"}, ()),
    "the clock of a node is wrong": (wrong_clock, {"message": "first"}, ()),
    "a node's ranks leave too early": (lambda world: world.links[1].end(0), EARLY, ()),
    "a rank leaves too early": (leave_early, {"rank": 2, **EARLY}, ()),
    "a command cannot be started": (
        lambda world: world.links[1].end(None, "start_failed", error="cannot start /no/python: No such file"),
        {"kind": "start", "host": "n2"},
        ("/no/python",),
    ),
    "a port is taken": (take_port, PORT, ("port 29500 of n1", "cluster.master_port")),
    "a port is taken, as a rank says": (
        lambda world: world.links[0].rank_error(0, type="DistNetworkError", message="port: 29500, EADDRINUSE"),
        PORT,
        ("port 29500 of n1",),
    ),
    "a node stays silent": (be_silent, LOST, ()),  # the error of rank 0 came later
    "a supervisor was killed": (lambda world: setattr(world.links[1], "phase", "lost"), LOST, ()),
    "a node forgot its run": (lambda world: setattr(world.links[1], "phase", "none"), LOST, ()),
}


@pytest.mark.parametrize("name", BLAMED)
def test_cause_is_blamed_whatever_else_is_said(world: World, name: str) -> None:
    act, facts, words = BLAMED[name]
    world.at(5, lambda: act(world))
    failure = world.failure()
    assert {field: getattr(failure, field) for field in facts} == facts
    assert all(word in f"{failure.message} {failure.advice}" for word in words)
    left = {"a node stays silent": ["n2"]}.get(name, [])
    assert [text.partition(":")[0] for text in world.state["leftover"]] == left
    assert world.links[1].sweeps == (name in ("a supervisor was killed", "a node forgot its run"))


STOPPED_S, KILLED_S = TIMING.evidence_s, TIMING.failure_grace_s
STOPPED, KILLED = ("failure", TIMING.failure_grace_s), ("failure", 0.0)


@pytest.mark.parametrize(
    ("act", "facts", "stops"),
    [
        (fail_on_second, {"rank": 3, "signal": "SIGKILL", "step": None}, [[(STOPPED_S, STOPPED)], []]),
        (
            lambda world: world.links[1].rank_error(2, step=4),  # ranks outlive it there
            {"rank": 2, "kind": "exception", "step": 4},
            [[(STOPPED_S, STOPPED)], [(KILLED_S, KILLED)]],
        ),
    ],
)
def test_failure_on_one_node_stops_the_others_after_time_for_evidence_and_kills_what_is_left(
    world: World, act: Callable[[World], None], facts: Mapping[str, object], stops: list[Any]
) -> None:
    world.at(5, lambda: act(world))
    failure = world.failure()
    assert {field: getattr(failure, field) for field in facts} == facts
    assert (failure.host, failure.log) == ("n2", str(world.run.log_dir("n2") / "torchrun.log"))
    told = [[(at - 1005.0, (cause, grace_s)) for at, cause, grace_s in link.stops] for link in world.links]
    assert [[what for _, what in link] for link in told] == [[what for _, what in link] for link in stops]
    assert all(
        due <= at < due + 0.5
        for one, other in zip(told, stops, strict=True)
        for (at, _), (due, _) in zip(one, other, strict=True)
    )
    assert any(words in world.observer.notes[0] for words in ("n2: rank 3 ended (SIGKILL)", "n2: rank 2 failed"))


def test_ranks_may_take_their_time_to_say_that_training_is_complete(world: World) -> None:
    for number in range(1, STEPS + 1):
        world.at(number / 10, lambda number=number: world.step(number))  # type: ignore[misc]
    world.at(2, lambda: world.links[1].end(0))
    world.at(20, world.complete)
    assert world.lead().status == "completed"


def test_ranks_that_go_on_after_completion_are_stopped_and_nothing_failed(world: World) -> None:
    world.at(1, lambda: world.first_node_says("completed"))
    world.at(2, lambda: world.links[0].end(0))
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code) == ("completed", 0)
    assert [cause for _, cause, _ in world.links[1].stops] == ["completed"]


@pytest.mark.parametrize("lost_s", [2.0, None])  # None: the others' errors end the run before the silence is too long
def test_lost_node_beats_what_the_others_say_and_is_named_as_for_the_launch(world: World, lost_s: float | None) -> None:
    (world.run.path / "overrides.txt").write_text("exp=tiny\ncluster=lab\ncluster.ssh.user=me\ntrain.steps=3\n")
    world.at(5, lambda: world.go_silent(1))
    world.at(8, lambda: world.links[0].rank_error(0, "exception", message="gloo timed out"))
    world.at(8, lambda: world.links[0].end(1))
    failure = world.failure(timing=LaunchTiming(lost_s=lost_s))
    assert (failure.kind, failure.host) == ("node_lost", "n2")
    assert "`burst check-nodes cluster=lab cluster.ssh.user=me --hosts n2`" in str(failure.advice)


def test_logs_that_do_not_arrive_are_waited_for_and_then_said_to_be_missing(world: World) -> None:
    world.links[1].is_synced = False
    world.at(5, world.complete)
    assert world.lead().status == "completed"
    assert TIMING.sync_s < world.clock.now - 1005.0 < TIMING.sync_s + 1.0
    assert any("n2 did not arrive" in note for note in world.observer.notes)


def test_node_may_leave_processes_that_do_not_die(world: World) -> None:
    world.at(5, lambda: world.links[1].end(1, leftover_pids=[17, 18]))
    assert [(left.node, left.pids) for left in world.lead().leftover] == [("n2", (17, 18))]


# --- stop requests ----------------------------------------------------------------------------------------------------


def press(world: World, *seconds: float) -> None:
    for second in seconds:
        world.at(second, world.press)


def request_by_file(world: World) -> None:
    for link in world.links:
        link.obeys_s = None
    world.at(5, lambda: write_cancel(world.run, "burst cancel", None))
    world.at(6, lambda: write_cancel(world.run, "burst cancel", 0.0))


def save_first(world: World) -> None:
    checkpoint = CheckpointConfig(every_minutes=30.0, stop_grace_s=90.0)
    config = world.plan.config
    world.plan = replace(world.plan, config=replace(config, train=replace(config.train, checkpoint=checkpoint)))
    press(world, 5)


def be_started_late(world: World) -> None:
    world.links[1].is_held = True
    world.at(5.5, world.links[1].let_go)
    press(world, 5)


def be_deaf(world: World, numbers: tuple[int, ...], *seconds: float) -> None:
    for number in numbers:
        world.links[number].deaf = True
    press(world, *seconds)


def be_out_of_reach(world: World) -> None:
    world.at(4, lambda: world.go_silent(1))
    press(world, 5)


PATIENT_S = TIMING.stop_grace_s
# What is asked for, with which graces each node is stopped, which nodes are left, and how long that takes.
REQUESTS: dict[str, tuple[Callable[[World], None], list[list[float]], list[str], float]] = {
    "before the start": (World.press, [[], []], [], -4.0),
    "during the start": (lambda world: press(world, 0.0), [[PATIENT_S]] * 2, [], -4.0),
    "while a node is being started": (be_started_late, [[PATIENT_S]] * 2, [], 2.0),
    "once": (lambda world: press(world, 5), [[PATIENT_S]] * 2, [], 2.0),
    "of ranks that save a checkpoint first": (save_first, [[90.0]] * 2, [], 2.0),
    "in the run folder, where it becomes more urgent": (request_by_file, [[PATIENT_S, 0.0]] * 2, [], 2.0),
    "three times": (lambda world: be_deaf(world, (0, 1), 5, 6, 7), [[PATIENT_S, 0.0]] * 2, ["n1", "n2"], 3.0),
    "of a node that never ends": (
        lambda world: be_deaf(world, (1,), 5), [[PATIENT_S]] * 2, ["n2"], PATIENT_S + TIMING.kill_s + 1.0,
    ),
    "of a node that cannot be heard": (be_out_of_reach, [[PATIENT_S]] * 2, ["n2"], PATIENT_S + 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_run_is_stopped_as_patiently_as_somebody_asks(world: World, name: str) -> None:
    act, graces, left, within_s = REQUESTS[name]
    act(world)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, world.state["state"]) == ("cancelled", 130, "cancelled")
    assert [[grace for _, _, grace in link.stops] for link in world.links] == graces
    assert [one.node for one in outcome.leftover] == left
    assert [text.partition(":")[0] for text in world.state["leftover"]] == left
    assert world.clock.now < 1005.0 + within_s
    assert world.observer.stops == ([(world.observer.stops[0][0], graces[0][0])] if graces[0] else [])
    assert {spec.stop_grace_s for link in world.links for spec in link.specs} <= {graces[0][0] if graces[0] else 0.0}
    assert not (world.run.path / "cancel.json").exists()


def test_request_while_a_run_fails_does_not_make_it_a_cancelled_one(world: World) -> None:
    world.at(5, lambda: world.links[1].rank_error(3))
    press(world, 5.5)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)


# --- another attempt --------------------------------------------------------------------------------------------------


def test_another_attempt_knows_nothing_of_the_one_before(world: World) -> None:
    world.at(3, lambda: fail_on_second(world))
    assert world.lead().status == "failed"
    world.links[1].leave("outcome.json", {"exit_code": 1, "cause": "exit"})
    for link in world.links:
        link.outcome, link.phase, link.supervisor, link.stops = None, "none", {}, []
    begin = world.clock.now
    world.at(3, lambda: world.links[0].end(1))
    failure = world.failure()
    assert world.state["attempt"] == 2
    assert failure.rank is None  # torchrun.log still names rank 3, but that was in the first attempt
    assert world.clock.now - begin > 3
    assert (world.run.path / "attempts/1/nodes/n2/outcome.json").exists()
    assert not (world.run.path / "nodes/n2/outcome.json").exists()
