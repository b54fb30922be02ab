"""How a controller leads a run on several nodes: start, failure, loss, stop and end, in time that a test moves."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from pathlib import Path

import pytest
from control_fakes import STEPS, World

from cluster.agent.messages import Spec
from cluster.control.attempt import ControllerBusyError, controlling, find_controller
from cluster.control.link import StartRefusedError
from cluster.control.outcome import LaunchTiming, write_cancel
from engine.config.settings import CheckpointConfig

TIMING = LaunchTiming()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- start and a good end ---------------------------------------------------------------------------------------------


def test_run_is_completed_when_the_first_node_says_so_and_all_have_ended(world: World) -> None:
    world.at(2, lambda: world.first_node_says("running"))
    world.at(4, world.complete)
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, outcome.leftover) == ("completed", 0, ())
    states = [entry["state"] for entry in world.state["history"]]
    assert states == ["planned", "starting", "running", "completed"]
    assert world.state["nodes_started_at"] is not None


def test_every_node_is_started_with_its_own_ranks_and_the_lease(world: World) -> None:
    world.at(1, world.complete)
    world.lead()
    specs = [link.specs[0] for link in world.links]
    assert [(spec.node, spec.first_rank, spec.lease_s) for spec in specs] == [("n1", 0, 60.0), ("n2", 2, 60.0)]
    assert all(link.is_followed and link.is_closed for link in world.links)


def test_nodes_of_a_detached_run_have_no_lease(world: World) -> None:
    world.at(1, world.complete)
    world.lead(detached=True)
    assert [link.specs[0].lease_s for link in world.links] == [None, None]
    assert world.state["lease_s"] is None


def test_leases_are_renewed_every_second_until_a_node_ends(world: World) -> None:
    world.at(10, world.complete)
    world.lead()
    for link in world.links:
        gaps = [after - before for before, after in zip(link.beats, link.beats[1:], strict=False)]
        assert len(link.beats) >= 9
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


def test_several_refusals_are_all_told(tmp_path: Path) -> None:
    world = World(tmp_path, ("n1", "n2", "n3"))
    for link in world.links:
        link.refusal = StartRefusedError(link.node, "folder", "disk full")
    outcome = world.lead()
    assert outcome.failure is not None
    told = " ".join([outcome.failure.message, *outcome.failure.details])
    assert outcome.failure.host in told
    assert told.count("disk full") >= 1


def test_node_that_did_not_answer_to_the_start_is_stopped_all_the_same(world: World) -> None:
    world.links[1].refusal = StartRefusedError("n2", "unreachable", "no answer in 60 s")
    world.lead()
    assert [cause for _, cause, _ in world.links[1].stops] == ["start"]


def test_node_that_cannot_be_reached_after_the_start_may_hold_what_nobody_stops(world: World) -> None:
    world.links[1].refusal = StartRefusedError("n2", "unreachable", "no answer in 60 s")
    world.links[1].silent_since = world.clock.now
    outcome = world.lead()
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
    world.at(1.0, lambda: (setattr(world.stop, "count", 1), setattr(world.stop, "cause", "Ctrl-C")))
    assert world.lead().status == "cancelled"
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[90.0], [90.0]]
    assert {spec.stop_grace_s for link in world.links for spec in link.specs} == {90.0}


def test_request_while_a_node_is_being_started_reaches_it_as_soon_as_it_has_begun(world: World) -> None:
    world.links[1].is_held = True
    world.at(0.5, lambda: (setattr(world.stop, "count", 1), setattr(world.stop, "cause", "Ctrl-C")))
    world.at(1.0, world.links[1].let_go)
    outcome = world.lead()
    assert (outcome.status, outcome.leftover) == ("cancelled", ())
    assert [[cause for _, cause, _ in link.stops] for link in world.links] == [["Ctrl-C"], ["Ctrl-C"]]


def test_request_before_the_start_starts_nothing(world: World) -> None:
    world.stop.count, world.stop.cause = 1, "Ctrl-C"
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


def test_failure_on_one_node_stops_the_others_after_time_for_evidence(world: World) -> None:
    world.at(5, lambda: fail_on_second(world))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.host, outcome.failure.signal) == (3, "n2", "SIGKILL")
    ((at, cause, grace_s),) = world.links[0].stops
    assert (cause, grace_s) == ("failure", TIMING.failure_grace_s)
    assert TIMING.evidence_s <= at - 1005.0 < TIMING.evidence_s + 0.5
    assert world.links[1].stops == []
    assert any("rank 3 ended (SIGKILL)" in note for note in world.observer.notes)


def test_echo_that_is_heard_first_is_not_blamed(world: World) -> None:
    world.at(5, lambda: world.links[0].rank_error(0, "peer_lost"))
    world.at(5.4, lambda: fail_on_second(world))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.host) == (3, "n2")


def test_torchrun_that_begins_to_stop_its_ranks_is_a_sign(world: World) -> None:
    world.at(5, lambda: world.links[1].torchrun_says(0, -11))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal) == (2, "SIGSEGV")
    assert world.clock.now < 1005.0 + TIMING.failure_grace_s + 1.0


def test_ranks_that_outlive_a_failure_on_their_node_are_killed(world: World) -> None:
    world.at(5, lambda: world.links[1].rank_error(2))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind) == (2, "exception")
    ((at, cause, grace_s),) = world.links[1].stops
    assert (cause, grace_s) == ("failure", 0.0)
    assert TIMING.failure_grace_s <= at - 1005.0 < TIMING.failure_grace_s + 0.5


def test_deaths_that_our_own_stop_caused_are_not_blamed(world: World) -> None:
    world.links[0].obeys_s = None

    def stopped_ranks_die() -> None:
        world.links[0].lose_rank(0, -9)
        world.links[0].torchrun_says(0, -9)

    world.at(5, lambda: world.links[1].rank_error(3, message="the true cause"))
    world.at(8.5, stopped_ranks_die)
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.message) == (3, "the true cause")


def test_clock_of_a_node_that_is_wrong_does_not_shift_the_blame(world: World) -> None:
    late = 3_600_000_000_000
    second = world.links[1]
    honest = second.poll

    second.poll = lambda: dataclasses.replace(honest(), clock_offset_ns=-late)  # type: ignore[method-assign]
    world.at(5, lambda: world.links[0].rank_error(0, message="first"))
    world.at(5.2, lambda: second.rank_error(2, message="second", time_ns=world.clock.time_ns() - late))
    outcome = world.lead()
    assert outcome.failure is not None
    assert outcome.failure.message == "first"


def test_node_whose_ranks_leave_too_early_is_named(world: World) -> None:
    world.at(5, lambda: world.links[1].end(0))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.type, outcome.failure.host) == ("EarlyExit", "n2")
    assert len(world.links[0].stops) >= 1


def test_rank_that_leaves_too_early_is_named_although_others_complain(world: World) -> None:
    world.at(5, lambda: world.links[1].lose_rank(2, 0))
    world.at(5.1, lambda: world.links[0].rank_error(1, "peer_lost"))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.type, outcome.failure.rank, outcome.failure.host) == ("EarlyExit", 2, "n2")


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


def test_command_that_cannot_be_started_is_told(world: World) -> None:
    world.at(1, lambda: world.links[1].end(None, "start_failed", error="cannot start /no/python: No such file"))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("start", "n2")
    assert "/no/python" in outcome.failure.message


def test_port_that_is_taken_has_its_own_advice(world: World) -> None:
    log = world.run.log_dir("n1") / "torchrun.log"
    text = "The server socket has failed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n"

    def fail() -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        world.links[0].end(1)

    world.at(2, fail)
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("port", "n1")
    assert "port 29500 of n1" in outcome.failure.message
    assert "cluster.master_port" in str(outcome.failure.advice)


# --- nodes that are lost ----------------------------------------------------------------------------------------------


def go_silent(world: World, number: int) -> None:
    world.links[number].silent_since = world.clock.now


def test_node_that_stays_silent_is_lost_and_beats_the_errors_that_came_after(world: World) -> None:
    world.at(5, lambda: go_silent(world, 1))
    world.at(20, lambda: world.links[0].rank_error(0, message="timed out waiting for rank 2"))
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("node_lost", "n2")  # the error of rank 0 came later
    assert [left.node for left in outcome.leftover] == ["n2"]
    assert "60 s after" in str(outcome.leftover[0])


@pytest.mark.parametrize("lost_s", [2.0, None])  # None: the others' errors end the run before the silence is too long
def test_lost_node_beats_what_the_others_say_and_is_named_as_for_the_launch(world: World, lost_s: float | None) -> None:
    (world.run.path / "overrides.txt").write_text("exp=tiny\ncluster=lab\ncluster.ssh.user=me\ntrain.steps=3\n")
    world.at(5, lambda: go_silent(world, 1))
    world.at(8, lambda: world.links[0].rank_error(0, "exception", message="gloo timed out"))
    world.at(8, lambda: world.links[0].end(1))
    outcome = world.lead(timing=LaunchTiming(lost_s=lost_s))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("node_lost", "n2")
    assert "`burst check-nodes cluster=lab cluster.ssh.user=me --hosts n2`" in str(outcome.failure.advice)


def test_short_silence_is_forgiven(world: World) -> None:
    def speak() -> None:
        world.links[1].silent_since = None

    world.at(5, lambda: go_silent(world, 1))
    world.at(30, speak)
    world.at(40, world.complete)
    assert world.lead().status == "completed"


def test_supervisor_that_was_killed_is_a_failure_and_its_node_is_swept(world: World) -> None:
    def die() -> None:
        world.links[1].phase = "lost"

    world.at(5, die)
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("node_lost", "n2")
    assert (world.links[1].sweeps, outcome.leftover) == (1, ())
    assert world.state["state"] == "failed"


def test_node_that_forgot_its_run_is_lost(world: World) -> None:
    def forget() -> None:
        world.links[1].phase = "none"

    world.at(5, forget)
    outcome = world.lead()
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("node_lost", "n2")


# --- stop requests ----------------------------------------------------------------------------------------------------


def press(world: World, times: int = 1) -> None:
    world.stop.count, world.stop.cause = world.stop.count + times, "Ctrl-C"


def test_one_request_stops_all_nodes_with_patience(world: World) -> None:
    world.at(5, lambda: press(world))
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code, world.state["state"]) == ("cancelled", 130, "cancelled")
    assert world.observer.stops == [("Ctrl-C", TIMING.stop_grace_s)]
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[TIMING.stop_grace_s]] * 2


def test_second_request_kills(world: World) -> None:
    for link in world.links:
        link.obeys_s = None
    world.at(5, lambda: press(world))
    world.at(6, lambda: press(world))
    world.lead()
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[TIMING.stop_grace_s, 0.0]] * 2
    assert world.clock.now < 1008.0


def test_third_request_leaves_at_once_and_names_nodes(world: World) -> None:
    for link in world.links:
        link.deaf = True
    for second in (5, 6, 7):
        world.at(second, lambda: press(world))
    outcome = world.lead()
    assert (outcome.status, [left.node for left in outcome.leftover]) == ("cancelled", ["n1", "n2"])
    assert world.clock.now < 1008.0
    assert len(world.state["leftover"]) == 2


def test_node_that_never_ends_is_given_up_and_named(world: World) -> None:
    world.links[1].deaf = True
    world.at(5, lambda: press(world))
    outcome = world.lead()
    assert (outcome.status, [left.node for left in outcome.leftover]) == ("cancelled", ["n2"])
    assert world.clock.now < 1005.0 + TIMING.stop_grace_s + TIMING.kill_s + 1.0


def test_node_that_cannot_be_heard_is_given_up_sooner(world: World) -> None:
    world.at(4, lambda: setattr(world.links[1], "silent_since", world.clock.now))
    world.at(5, lambda: press(world))
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
    world.at(5.5, lambda: press(world))
    outcome = world.lead()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)


def test_request_for_an_earlier_attempt_is_forgotten(world: World) -> None:
    write_cancel(world.run, "burst cancel", None)
    world.at(2, world.complete)
    assert world.lead().status == "completed"


def test_request_during_the_start_stops_what_began(world: World) -> None:
    world.observer.act = lambda: press(world) if not world.stop.count else None
    outcome = world.lead()
    assert outcome.status == "cancelled"
    assert all(link.outcome is not None for link in world.links if link.specs)


# --- whatever happens -------------------------------------------------------------------------------------------------


def test_failing_observer_has_everything_killed_and_is_passed_on(world: World) -> None:
    def fail() -> None:
        if world.clock.now > 1005.0:
            raise BrokenPipeError("the reader left")

    world.observer.act = fail
    with pytest.raises(BrokenPipeError):
        world.lead()
    assert [[grace for _, _, grace in link.stops] for link in world.links] == [[0.0]] * 2
    assert world.state["state"] == "failed"
    assert find_controller(world.run) is None


def test_node_that_is_just_being_started_when_its_launcher_breaks_is_killed_as_well(world: World) -> None:
    world.links[1].is_held = True

    def fail() -> None:
        raise BrokenPipeError("the reader left")

    world.observer.act = fail
    with pytest.raises(BrokenPipeError):
        world.lead()
    assert [[(cause, grace) for _, cause, grace in link.stops] for link in world.links] == [[("exception", 0.0)]] * 2


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


def test_run_is_taken_over_where_it_is(world: World) -> None:
    world.run.transition("starting")
    world.run.transition("running")
    for link in world.links:
        link.phase = "running"
    world.at(5, world.complete)
    outcome = world.lead(start=False)
    assert (outcome.status, world.state["attempt"], world.state["pid"]) == ("completed", 1, os.getpid())
    assert all(not link.specs and link.beats for link in world.links)


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
