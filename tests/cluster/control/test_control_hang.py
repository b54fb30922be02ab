"""A run that makes no steps any more: when that is a hang, whom it is blamed on, and how soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_fakes import STEPS, FakeLink, World

from cluster.control.hang import DIAGNOSE_S, KILL_S, LONG_DIAGNOSE_S, LONG_KILL_S, STOPPED_S
from cluster.control.link import LaunchTiming

MINUTE_S = 60.0
SELDOM = LaunchTiming(poll_s=2.0)  # for what takes hours


def train(world: World, steps: int, seconds: float = 1.0) -> None:
    """So many steps, one every `seconds`, then nothing more."""
    world.at(0.5, lambda: (world.first_node_says("running"), world.phase("train")))
    for number in range(1, steps + 1):
        world.at(number * seconds, lambda number=number: world.step(number, seconds))  # type: ignore[misc]


def show(world: World, rank: int, state: str = "S", **status: Any) -> None:
    """What a rank says of itself when it is asked."""
    link = world.links[rank // 2]
    link.states = {**link.states, str(rank): state}
    log = world.run.log_path(link.node, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.with_suffix(".status.json").write_text(json.dumps({"step": 3, "phase": "forward", **status}))


def show_stopped(world: World, rank: int) -> None:
    for number in range(4):
        show(world, number, "T" if number == rank else "S")


def health(link: FakeLink, at: str, rank: int, state: str) -> None:
    link.health = {"at": at, "ranks": {str(rank): {"pid": 1, "state": state}}}


def test_hang_gets_a_culprit_within_45_s_and_is_killed_when_nccl_would_give_up(world: World) -> None:
    train(world, 3)
    show_stopped(world, 2)
    told: list[float] = []
    world.observer.act = lambda: told.append(world.clock.now) if world.observer.notes and not told else None
    outcome = world.lead(timing=SELDOM)
    assert DIAGNOSE_S < told[0] - 1003.0 <= 45.0
    assert "rank 2" in world.observer.notes[0]
    assert "the run is stopped if nothing moves for 600 s" in world.observer.notes[0]
    failure = outcome.failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.host, failure.step) == ("hang", 2, "n2", 3)
    assert "stopped" in failure.message
    assert failure.stacks == str(world.run.log_path("n2", 2).with_suffix(".stacks"))
    assert "burst resume" in str(failure.advice)
    assert KILL_S < world.clock.now - 1003.0 < KILL_S + MINUTE_S
    assert [[(cause, grace) for _, cause, grace in link.stops] for link in world.links] == [[("hang", 0.0)]] * 2
    assert world.links[0].nonces == world.links[1].nonces
    assert len(world.links[0].nonces) == 2  # where they were at first, and in the end


@pytest.mark.parametrize(
    ("patience_s", "steps", "step_s", "phase", "end_s", "is_asked"),
    [
        (None, STEPS, 40.0, "train", STEPS * 40.0 + 1, False),
        (None, 3, 1.0, "evaluate", LONG_DIAGNOSE_S + 5 * MINUTE_S, True),
        (7.0, 0, 1.0, "build model", MINUTE_S, False),
        (LONG_KILL_S + 2 * MINUTE_S, 0, 1.0, "build model", LONG_KILL_S + MINUTE_S, True),
    ],
    ids=["slow steps", "evaluation", "patience is for steps", "more patience before the first step"],
)
def test_what_takes_long_by_its_nature_is_no_hang(
    tmp_path: Path, patience_s: float | None, steps: int, step_s: float, phase: str, end_s: float, *, is_asked: bool
) -> None:
    world = World(tmp_path, hang_timeout_s=patience_s)
    train(world, steps, step_s)
    world.at(3.5, lambda: world.phase(phase))
    world.at(end_s, world.complete)
    assert world.lead(timing=SELDOM).status == "completed"
    assert bool(world.links[0].nonces) == is_asked


def test_run_that_goes_on_while_it_is_asked_is_left_alone(world: World) -> None:
    train(world, 3)
    world.at(3 + DIAGNOSE_S + 0.5, lambda: world.step(4))
    world.at(3 + DIAGNOSE_S + 20, world.complete)
    assert world.lead().status == "completed"
    assert len(world.links[0].nonces) == 1


def test_stall_that_passes_is_told_and_forgiven(world: World) -> None:
    train(world, 3, 2.0)
    world.at(6 + 5 * MINUTE_S, lambda: world.step(4, 2.0))
    world.at(10 + 5 * MINUTE_S, world.complete)
    assert world.lead(timing=SELDOM).status == "completed"
    assert ["no rank has advanced" in note for note in world.observer.notes] == [True]


@pytest.mark.parametrize("phase", ["prepare data", "evaluate", "checkpoint", "train"])
def test_ranks_that_say_how_a_long_phase_goes_on_are_left_alone(world: World, phase: str) -> None:
    train(world, 3 if phase != "prepare data" else 0)
    world.at(3.5, lambda: world.phase(phase))
    for minute in range(1, 75, 5):
        world.at(minute * MINUTE_S, lambda minute=minute: show(world, 3, advances=minute))  # type: ignore[misc]
    world.at(75 * MINUTE_S, world.complete)
    assert world.lead(timing=SELDOM).status == "completed"


def test_first_step_may_take_an_hour(world: World) -> None:
    world.at(1, lambda: world.phase("prepare data"))
    show_stopped(world, 0)
    failure = world.failure(timing=SELDOM)
    assert failure.kind == "hang"
    assert LONG_KILL_S < world.clock.now - 1001.0 < LONG_KILL_S + MINUTE_S


def test_configured_patience_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path, hang_timeout_s=7.0)
    train(world, 3)
    show_stopped(world, 1)
    failure = world.failure()
    assert failure.rank == 1
    assert 7.0 < world.clock.now - 1003.0 < 20.0


def test_rank_that_somebody_stopped_is_seen_sooner(world: World) -> None:
    train(world, 3)
    show_stopped(world, 3)
    world.at(4, lambda: health(world.links[1], "one", 3, "T"))
    world.at(9, lambda: health(world.links[1], "two", 3, "T"))
    failure = world.failure()
    assert failure.rank == 3
    assert STOPPED_S < world.clock.now - 1003.0 < DIAGNOSE_S


def test_rank_that_was_stopped_for_a_moment_is_forgiven(world: World) -> None:
    train(world, 3)
    world.at(4, lambda: health(world.links[1], "one", 3, "T"))
    world.at(9, lambda: health(world.links[1], "two", 3, "S"))
    world.at(25, world.complete)
    assert world.lead().status == "completed"


def test_node_that_gives_no_answer_does_not_hold_up_the_verdict(tmp_path: Path) -> None:
    world = World(tmp_path, hang_timeout_s=25.0)
    train(world, 3)
    show_stopped(world, 1)
    world.at(20, lambda: world.go_silent(1))
    failure = world.failure()
    assert failure.rank == 1
    assert world.clock.now - 1003.0 < MINUTE_S


def test_silence_while_the_launcher_itself_was_stopped_is_none(world: World) -> None:
    def stop() -> None:
        if world.clock.now > 1005.0 and world.links[1].silent_since is None:
            world.observer.act = lambda: None
            world.links[1].silent_since, world.clock.now = world.clock.now, world.clock.now + 40.0
            world.at(0.5, lambda: world.speak(1))  # until what came has been read

    world.observer.act = stop
    world.at(60, world.complete)
    assert world.lead().status == "completed"


def test_nothing_that_points_anywhere_is_still_a_hang(world: World) -> None:
    train(world, 3)
    failure = world.failure(timing=SELDOM)
    assert (failure.kind, failure.rank) == ("hang", None)


def recorded_stacks(world: World, answered: bool) -> str:
    """The message of a hang of four ranks whose recorded stacks say that rank 1 sleeps while the others wait."""
    recording = json.loads((Path(__file__).parent / "hangs/sleep_in_forward.json").read_text())
    train(world, 3)
    for number in range(4):
        show(world, number, phase="backward")
        stacks = recording[2 if number == 1 else 0]["stacks"]
        world.run.log_path(world.links[number // 2].node, number).with_suffix(".stacks").write_text(stacks)
    if not answered:
        world.links[0].mute = frozenset({"1"})
    failure = world.failure(timing=SELDOM)
    assert failure.rank == 1
    return failure.message


def test_rank_whose_stack_tells_is_accused_without_doubt(world: World) -> None:
    message = recorded_stacks(world, answered=True)
    assert "in no collective" in message
    assert "probably" not in message


def test_stacks_of_an_earlier_request_count_for_nothing(world: World) -> None:
    message = recorded_stacks(world, answered=False)
    assert "probably: rank 1 on n1 gave no stacks" in message
