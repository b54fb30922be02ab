"""A run that makes no steps any more, or whose nodes cannot be heard: when that is its end, and who is blamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_fakes import STEPS, Act, Scene, World, put

from cluster.control.judge import DIAGNOSE_S, KILL_S, LONG_DIAGNOSE_S, LONG_KILL_S, STOPPED_S
from cluster.control.link import LaunchTiming

MINUTE_S = 60.0
SELDOM = LaunchTiming(poll_s=5.0)  # for what takes hours


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


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_hang_gets_a_culprit_within_45_s_and_is_killed_when_nccl_would_give_up(world: World) -> None:
    train(world, 3)
    show_stopped(world, 2)
    told: list[float] = []
    world.observer.act = lambda: told.append(world.clock.now) if world.observer.notes and not told else None
    failure = world.failure(timing=LaunchTiming(poll_s=2.0))
    assert DIAGNOSE_S < told[0] - 1003.0 <= 45.0
    assert "rank 2" in world.observer.notes[0]
    assert "the run is stopped if nothing moves for 600 s" in world.observer.notes[0]
    assert (failure.kind, failure.rank, failure.host, failure.step) == ("hang", 2, "n2", 3)
    assert "stopped" in failure.message
    assert world.observer.notes[1:] == [f"{failure.message}; stopping the run"]
    assert failure.stacks == str(world.run.log_path("n2", 2).with_suffix(".stacks"))
    assert "burst resume" in str(failure.advice)
    assert KILL_S < world.clock.now - 1003.0 < KILL_S + MINUTE_S
    assert [[(cause, grace) for _, cause, grace in link.stops] for link in world.links] == [[("hang", 0.0)]] * 2
    assert world.links[0].nonces == world.links[1].nonces
    assert len(world.links[0].nonces) == 2  # where they were at first, and in the end


def stopped(rank: int) -> Scene:
    return 0, lambda world: show_stopped(world, rank)


def health(at: str, state: str) -> Act:
    """The second node says how its rank 3 is."""
    return put(1, health={"at": at, "ranks": {"3": {"pid": 1, "state": state}}})


THREE_STEPS: Scene = (0, lambda world: train(world, 3))
TWICE_STOPPED = ((4, health("one", "T")), (9, health("two", "T")))


@pytest.mark.parametrize(
    ("story", "patience_s", "poll_s", "rank", "least_s", "most_s"),
    [
        # The first step may take an hour.
        ([(3, lambda world: world.phase("prepare data")), stopped(0)], None, 5.0, 0, LONG_KILL_S, LONG_KILL_S + 60.0),
        ([THREE_STEPS, stopped(1)], 7.0, 0.1, 1, 7.0, 20.0),
        # By somebody.
        ([THREE_STEPS, stopped(3), *TWICE_STOPPED], None, 0.1, 3, STOPPED_S, DIAGNOSE_S),
        # Who gives no answer does not hold up the verdict.
        ([THREE_STEPS, stopped(1), (20, put(1, is_silent=True))], 25.0, 0.1, 1, 25.0, 60.0),
        ([THREE_STEPS], None, 2.0, None, KILL_S, KILL_S + 60.0),  # nothing points anywhere
    ],
)
def test_hang_ends_the_run_in_time(
    tmp_path: Path,
    story: list[Scene],
    patience_s: float | None,
    poll_s: float,
    rank: int | None,
    least_s: float,
    most_s: float,
) -> None:
    world = World(tmp_path, hang_timeout_s=patience_s)
    world.play(*story)
    failure = world.failure(timing=LaunchTiming(poll_s=poll_s))
    assert (failure.kind, failure.rank, failure.step) == ("hang", rank, 3)
    assert least_s < world.clock.now - 1003.0 < most_s


@pytest.mark.parametrize("answered", [True, False])
def test_rank_whose_stack_tells_is_accused_without_doubt_and_stacks_of_an_earlier_request_count_for_nothing(
    world: World, *, answered: bool
) -> None:
    recording = json.loads((Path(__file__).parent / "hangs/sleep_in_forward.json").read_text())
    train(world, 3)
    for number in range(4):
        show(world, number, phase="backward")
        stacks = recording[2 if number == 1 else 0]["stacks"]  # rank 1 sleeps while the others wait
        world.run.log_path(world.links[number // 2].node, number).with_suffix(".stacks").write_text(stacks)
    world.links[0].mute = frozenset() if answered else frozenset({"1"})
    failure = world.failure(timing=SELDOM)
    assert failure.rank == 1
    assert ("in no collective" if answered else "probably: rank 1 on n1 gave no stacks") in failure.message
    assert ("probably" in failure.message) != answered


# --- what is none -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patience_s", "steps", "step_s", "phase", "end_s", "asked"),
    [
        (None, STEPS, 40.0, "train", STEPS * 40.0 + 1, 0),  # slow steps
        (None, STEPS, 1.0, "train", LONG_DIAGNOSE_S - MINUTE_S, 0),  # after the last step
        (None, 3, 1.0, "evaluate", LONG_DIAGNOSE_S + 5 * MINUTE_S, 1),
        (7.0, 0, 1.0, "build model", MINUTE_S, 0),  # patience is for steps
        (LONG_KILL_S + 2 * MINUTE_S, 0, 1.0, "build model", LONG_KILL_S + MINUTE_S, 1),  # and more before the first
    ],
)
def test_what_takes_long_by_its_nature_is_no_hang(
    tmp_path: Path, patience_s: float | None, steps: int, step_s: float, phase: str, end_s: float, asked: int
) -> None:
    world = World(tmp_path, hang_timeout_s=patience_s)
    train(world, steps, step_s)
    world.at(3.5, lambda: world.phase(phase))
    world.at(end_s, world.complete)
    assert world.lead(timing=SELDOM).status == "completed"
    assert len(world.links[0].nonces) == asked


@pytest.mark.parametrize(("pause_s", "notes"), [(DIAGNOSE_S + 0.5, 0), (5 * MINUTE_S, 1)])
def test_stall_that_passes_is_told_if_it_lasts_and_forgiven(world: World, pause_s: float, notes: int) -> None:
    train(world, 3)
    world.at(3 + pause_s, lambda: world.step(4))
    world.at(3 + pause_s + 19, world.complete)
    assert world.lead(timing=LaunchTiming(poll_s=0.4)).status == "completed"
    assert ["no rank has advanced" in note for note in world.observer.notes] == [True] * notes
    assert len(world.links[0].nonces) == 1


@pytest.mark.parametrize("phase", ["prepare data", "evaluate", "checkpoint", "train"])
def test_ranks_that_say_how_a_long_phase_goes_on_are_left_alone(world: World, phase: str) -> None:
    train(world, 3 if phase != "prepare data" else 0)
    world.at(3.5, lambda: world.phase(phase))
    for minute in range(1, 75, 5):
        world.at(minute * MINUTE_S, lambda minute=minute: show(world, 3, advances=minute))  # type: ignore[misc]
    world.at(75 * MINUTE_S, world.complete)
    assert world.lead(timing=SELDOM).status == "completed"


def test_rank_that_was_stopped_for_a_moment_is_forgiven(world: World) -> None:
    world.play(THREE_STEPS, (4, health("one", "T")), (20, health("two", "S")), (25, World.complete))
    assert world.lead().status == "completed"


# --- nodes that cannot be heard ---------------------------------------------------------------------------------------


def test_silence_while_the_launcher_itself_was_stopped_is_none(world: World) -> None:
    def stop() -> None:
        if world.clock.now > 1005.0 and not world.links[1].is_silent:
            world.observer.act = lambda: None
            world.links[1].is_silent, world.clock.now = True, world.clock.now + 40.0
            world.play((0.5, put(1, is_silent=False)))  # until what came has been read

    world.observer.act = stop
    world.at(60, world.complete)
    assert world.lead().status == "completed"


# When which nodes fall silent and speak again, when ranks of another one advance, when it is complete; who is stopped.
SILENCES = {
    "a short one": (False, {1: (5, 30)}, None, 40, None),
    "the first, while ranks of the other advance": (True, {0: (5, 300)}, 1, 310, None),
    "the second, while ranks of the other advance": (True, {1: (5, 300)}, 0, 310, None),
    "all, for long: who hears nobody is likelier cut off itself": (True, {0: (5, 500), 1: (5, 500)}, None, 510, None),
    "all, and the first comes back first": (True, {0: (5, 400), 1: (5, 415)}, None, 430, None),
    "all, and the second comes back first": (True, {0: (5, 415), 1: (5, 400)}, None, 430, None),
    "all, and one stays away": (True, {0: (5, 400), 1: (5, 9999)}, None, 590, [True, False]),
}


@pytest.mark.parametrize("name", SILENCES)
def test_node_that_cannot_be_heard_lives_until_nothing_speaks_for_it(world: World, name: str) -> None:
    detached, silences, advances, end_s, stopped = SILENCES[name]
    for number, (begin_s, until_s) in silences.items():
        world.play((begin_s, put(number, is_silent=True)), (until_s, put(number, is_silent=False)))
    for second in range(6, 300, 10) if advances is not None else ():
        world.at(second, lambda second=second: show(world, 2 * advances, step=second))  # type: ignore[misc]
    world.at(end_s, world.complete)
    outcome = world.lead(detached=detached, timing=LaunchTiming(poll_s=1.0))
    assert outcome.status == ("completed" if stopped is None else "failed")
    assert [bool(link.stops) for link in world.links] == (stopped or [False, False])
