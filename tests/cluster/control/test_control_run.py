"""How a controller leads a run on several nodes: start, failure, loss, stop and end, in time that a test moves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from control_fakes import STEPS, World

from cluster.agent.messages import Spec
from cluster.control.attempt import ControllerBusyError, controlling, find_controller, write_cancel
from cluster.control.link import LaunchTiming, StartRefusedError
from engine.config.settings import CheckpointConfig

TIMING = LaunchTiming()


# --- start and a good end ---------------------------------------------------------------------------------------------


def test_run_is_completed_when_the_first_node_says_so_and_all_have_ended(world: World) -> None:
    world.at(2, lambda: world.first_node_says("running"))
    world.at(4, world.complete)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, outcome.leftover) == ("completed", 0, ())
    states = [entry["state"] for entry in world.state["history"]]
    assert states == ["planned", "starting", "running", "completed"]
    assert world.state["nodes_started_at"] is not None


@pytest.mark.parametrize("lease_s", [60.0, None])  # None: of a detached run
def test_every_node_is_started_with_its_own_ranks_and_the_lease(world: World, lease_s: float | None) -> None:
    world.at(1, world.complete)
    world.lead(detached=lease_s is None)
    specs = [link.specs[0] for link in world.links]
    assert [(spec.node, spec.first_rank, spec.lease_s) for spec in specs] == [("n1", 0, lease_s), ("n2", 2, lease_s)]
    assert world.state["lease_s"] == lease_s
    assert all(link.is_followed and link.is_closed for link in world.links)


def test_leases_are_renewed_every_second_until_a_node_ends(world: World) -> None:
    world.at(10, world.complete)
    world.lead()
    for link in world.links:
        gaps = [after - before for before, after in zip(link.beats, link.beats[1:], strict=False)]
        assert len(link.beats) >= 9
        assert min(gaps) > 0.9
        assert max(gaps) < 1.3


def test_node_that_refuses_stops_those_that_began_and_is_named(world: World) -> None:
    world.links[1].refusal = StartRefusedError("n2", "busy", "run X holds this node")
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, outcome.leftover) == ("failed", 1, ())
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("start", "n2")
    assert "run X holds this node" in world.state["failure"]["message"]
    assert [grace for _, _, grace in world.links[0].stops] == [0.0]
    assert world.links[1].stops == []


def test_of_many_refusals_the_first_are_told_and_the_others_counted(tmp_path: Path) -> None:
    world = World(tmp_path, [f"n{number:02}" for number in range(12)])
    for link in world.links:
        link.refusal = StartRefusedError(link.node, "folder", "disk full")
    failure = world.failure()
    assert (failure.host, failure.message) == ("n00", "n00: disk full")
    assert failure.details == (*(f"n{number:02}: disk full" for number in range(1, 9)), "and 3 more")


def test_node_that_cannot_be_reached_after_the_start_may_hold_what_nobody_stops(world: World) -> None:
    world.links[1].refusal = StartRefusedError("n2", "unreachable", "no answer in 60 s")
    world.links[1].silent_since = world.clock.now
    outcome = world.lead()
    assert [cause for _, cause, _ in world.links[1].stops] == ["start"]
    assert [(left.node, left.pids) for left in outcome.leftover] == [("n2", ())]
    assert "may have begun" in outcome.leftover[0].reason


def test_bug_in_a_link_stops_what_began_and_is_raised(world: World) -> None:
    def start(spec: Spec) -> None:
        raise KeyError("bug")

    world.links[1].start = start  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        world.lead()
    assert world.state["state"] == "failed"


def test_ranks_that_save_a_checkpoint_first_get_the_time_for_it(world: World) -> None:
    checkpoint = CheckpointConfig(every_minutes=30.0, stop_grace_s=90.0)
    config = world.plan.config
    world.plan = replace(world.plan, config=replace(config, train=replace(config.train, checkpoint=checkpoint)))
    world.at(1.0, world.press)
    assert world.lead().status == "cancelled"
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[90.0], [90.0]]
    assert {spec.stop_grace_s for link in world.links for spec in link.specs} == {90.0}


def test_request_while_a_node_is_being_started_reaches_it_as_soon_as_it_has_begun(world: World) -> None:
    world.links[1].is_held = True
    world.at(0.5, world.press)
    world.at(1.0, world.links[1].let_go)
    outcome = world.lead()
    assert (outcome.status, outcome.leftover) == ("cancelled", ())
    assert [[cause for _, cause, _ in link.stops] for link in world.links] == [["Ctrl-C"], ["Ctrl-C"]]


def test_request_before_the_start_starts_nothing(world: World) -> None:
    world.press()
    assert world.lead().status == "cancelled"
    assert [link.specs for link in world.links] == [[], []]
    assert world.state["state"] == "cancelled"


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


# What happens to a run, how its failure is recorded, and words of that.
BLAMED: dict[str, tuple[Callable[[World], object], dict[str, object], tuple[str, ...]]] = {
    "an echo that is heard first": (echo_first, {"rank": 3, "host": "n2"}, ()),
    "torchrun begins to stop its ranks": (
        lambda world: world.links[1].torchrun_says(0, -11),
        {"rank": 2, "signal": "SIGSEGV"},
        (),
    ),
    "our own stop kills ranks": (stop_of_ours_kills, {"rank": 3, "message": "the true cause"}, ()),
    "the clock of a node is wrong": (wrong_clock, {"message": "first"}, ()),
    "a node's ranks leave too early": (lambda world: world.links[1].end(0), {"type": "EarlyExit", "host": "n2"}, ()),
    "a rank leaves too early": (leave_early, {"type": "EarlyExit", "rank": 2, "host": "n2"}, ()),
    "a command cannot be started": (
        lambda world: world.links[1].end(None, "start_failed", error="cannot start /no/python: No such file"),
        {"kind": "start", "host": "n2"},
        ("/no/python",),
    ),
    "a port is taken": (take_port, {"kind": "port", "host": "n1"}, ("port 29500 of n1", "cluster.master_port")),
    "a port is taken, as a rank says": (
        lambda world: world.links[0].rank_error(0, type="DistNetworkError", message="port: 29500, EADDRINUSE"),
        {"kind": "port", "host": "n1"},
        ("port 29500 of n1",),
    ),
    "a node stays silent": (be_silent, {"kind": "node_lost", "host": "n2"}, ()),  # the error of rank 0 came later
    "a supervisor was killed": (
        lambda world: setattr(world.links[1], "phase", "lost"),
        {"kind": "node_lost", "host": "n2"},
        (),
    ),
    "a node forgot its run": (
        lambda world: setattr(world.links[1], "phase", "none"),
        {"kind": "node_lost", "host": "n2"},
        (),
    ),
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


def test_failure_on_one_node_stops_the_others_after_time_for_evidence(world: World) -> None:
    world.at(5, lambda: fail_on_second(world))
    failure = world.failure()
    assert (failure.rank, failure.host, failure.signal) == (3, "n2", "SIGKILL")
    assert failure.log == str(world.run.log_dir("n2") / "torchrun.log")
    ((at, cause, grace_s),) = world.links[0].stops
    assert (cause, grace_s) == ("failure", TIMING.failure_grace_s)
    assert TIMING.evidence_s <= at - 1005.0 < TIMING.evidence_s + 0.5
    assert world.links[1].stops == []
    assert any("rank 3 ended (SIGKILL)" in note for note in world.observer.notes)


def test_ranks_that_outlive_a_failure_on_their_node_are_killed(world: World) -> None:
    world.at(5, lambda: world.links[1].rank_error(2))
    failure = world.failure()
    assert (failure.rank, failure.kind) == (2, "exception")
    ((at, cause, grace_s),) = world.links[1].stops
    assert (cause, grace_s) == ("failure", 0.0)
    assert TIMING.failure_grace_s <= at - 1005.0 < TIMING.failure_grace_s + 0.5


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


# --- nodes that are lost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_s", [2.0, None])  # None: the others' errors end the run before the silence is too long
def test_lost_node_beats_what_the_others_say_and_is_named_as_for_the_launch(world: World, lost_s: float | None) -> None:
    (world.run.path / "overrides.txt").write_text("exp=tiny\ncluster=lab\ncluster.ssh.user=me\ntrain.steps=3\n")
    world.at(5, lambda: world.go_silent(1))
    world.at(8, lambda: world.links[0].rank_error(0, "exception", message="gloo timed out"))
    world.at(8, lambda: world.links[0].end(1))
    failure = world.failure(timing=LaunchTiming(lost_s=lost_s))
    assert (failure.kind, failure.host) == ("node_lost", "n2")
    assert "`burst check-nodes cluster=lab cluster.ssh.user=me --hosts n2`" in str(failure.advice)


def test_short_silence_is_forgiven(world: World) -> None:
    world.at(5, lambda: world.go_silent(1))
    world.at(30, lambda: world.speak(1))
    world.at(40, world.complete)
    assert world.lead().status == "completed"


# --- stop requests ----------------------------------------------------------------------------------------------------


def test_one_request_stops_all_nodes_with_patience(world: World) -> None:
    world.at(5, world.press)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, world.state["state"]) == ("cancelled", 130, "cancelled")
    assert world.observer.stops == [("Ctrl-C", TIMING.stop_grace_s)]
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[TIMING.stop_grace_s]] * 2


def test_third_request_leaves_at_once_and_names_nodes(world: World) -> None:
    for link in world.links:
        link.deaf = True
    for second in (5, 6, 7):
        world.at(second, world.press)
    outcome = world.lead()
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[TIMING.stop_grace_s, 0.0]] * 2
    assert (outcome.status, [left.node for left in outcome.leftover]) == ("cancelled", ["n1", "n2"])
    assert world.clock.now < 1008.0
    assert len(world.state["leftover"]) == 2


def test_node_that_never_ends_is_given_up_and_named(world: World) -> None:
    world.links[1].deaf = True
    world.at(5, world.press)
    outcome = world.lead()
    assert (outcome.status, [left.node for left in outcome.leftover]) == ("cancelled", ["n2"])
    assert world.clock.now < 1005.0 + TIMING.stop_grace_s + TIMING.kill_s + 1.0


def test_node_that_cannot_be_heard_is_given_up_sooner(world: World) -> None:
    world.at(4, lambda: world.go_silent(1))
    world.at(5, world.press)
    outcome = world.lead()
    assert (outcome.status, [left.node for left in outcome.leftover]) == ("cancelled", ["n2"])
    assert world.clock.now < 1005.0 + TIMING.stop_grace_s + 1.0


def test_request_in_the_run_folder_does_the_same_and_may_become_more_urgent(world: World) -> None:
    for link in world.links:
        link.obeys_s = None
    world.at(5, lambda: write_cancel(world.run, "burst cancel", None))
    world.at(6, lambda: write_cancel(world.run, "burst cancel", 0.0))
    outcome = world.lead()
    assert outcome.status == "cancelled"
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[TIMING.stop_grace_s, 0.0]] * 2
    assert not (world.run.path / "cancel.json").exists()


def test_request_while_a_run_fails_does_not_make_it_a_cancelled_one(world: World) -> None:
    world.at(5, lambda: world.links[1].rank_error(3))
    world.at(5.5, world.press)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)


def test_request_for_an_earlier_attempt_is_forgotten(world: World) -> None:
    write_cancel(world.run, "burst cancel", None)
    world.at(2, world.complete)
    assert world.lead().status == "completed"


def test_request_during_the_start_stops_what_began(world: World) -> None:
    world.observer.act = lambda: world.press() if not world.stop.count else None
    outcome = world.lead()
    assert outcome.status == "cancelled"
    assert all(link.outcome is not None for link in world.links if link.specs)


# --- whatever happens -------------------------------------------------------------------------------------------------


def test_node_that_is_just_being_started_when_its_launcher_breaks_is_killed_as_well(world: World) -> None:
    world.links[1].is_held = True

    def fail() -> None:
        raise BrokenPipeError("the reader left")

    world.observer.act = fail
    with pytest.raises(BrokenPipeError):
        world.lead()
    assert [[(cause, grace) for _, cause, grace in link.stops] for link in world.links] == [[("exception", 0.0)]] * 2
    assert world.state["state"] == "failed"
    assert find_controller(world.run) is None


def test_logs_that_do_not_arrive_are_waited_for_and_then_said_to_be_missing(world: World) -> None:
    world.links[1].is_synced = False
    world.at(5, world.complete)
    assert world.lead().status == "completed"
    assert TIMING.sync_s < world.clock.now - 1005.0 < TIMING.sync_s + 1.0
    assert any("n2 did not arrive" in note for note in world.observer.notes)


def test_second_controller_is_refused_and_told_whom_to_ask(world: World) -> None:
    with controlling(world.run), pytest.raises(ControllerBusyError, match=f"process {os.getpid()}") as caught:
        world.lead()
    assert "burst cancel" in str(caught.value)
    assert world.state["state"] == "planned"
    assert [link.specs for link in world.links] == [[], []]


def test_node_may_leave_processes_that_do_not_die(world: World) -> None:
    world.at(5, lambda: world.links[1].end(1, leftover_pids=[17, 18]))
    outcome = world.lead()
    assert [(left.node, left.pids) for left in outcome.leftover] == [("n2", (17, 18))]


# --- take over and another attempt ------------------------------------------------------------------------------------


def test_another_attempt_knows_nothing_of_the_one_before(world: World) -> None:
    world.at(3, lambda: fail_on_second(world))
    assert world.lead().status == "failed"
    world.links[1].leave("outcome.json", {"exit_code": 1, "cause": "exit"})
    for link in world.links:
        link.outcome, link.phase, link.supervisor, link.stops = None, "none", {}, []
    begin = world.clock.now
    world.at(3, lambda: world.links[0].end(1))
    outcome = world.lead()
    assert world.state["attempt"] == 2
    assert outcome.failure is not None
    assert outcome.failure.rank is None  # torchrun.log still names rank 3, but that was in the first attempt
    assert world.clock.now - begin > 3
    assert (world.run.path / "attempts/1/nodes/n2/outcome.json").exists()
    assert not (world.run.path / "nodes/n2/outcome.json").exists()
