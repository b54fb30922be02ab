"""Nodes that cannot be heard, of a run whose ranks go on: nothing is lost, nothing is stopped."""

from __future__ import annotations

import json

import pytest
from control_fakes import World

from cluster.control.link import LaunchTiming


def go_silent_all(world: World) -> None:
    """After five seconds."""
    world.at(5, lambda: (world.go_silent(0), world.go_silent(1)))


def report(world: World, number: int, step: int) -> None:
    """A rank of a node says that it is further."""
    log = world.run.log_path(world.links[number].node, 2 * number)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.with_suffix(".status.json").write_text(json.dumps({"step": step}))


@pytest.mark.parametrize("silent", [0, 1])
def test_node_that_is_out_of_reach_lives_while_ranks_advance(world: World, silent: int) -> None:
    world.at(5, lambda: world.go_silent(silent))
    for second in range(6, 300, 10):
        world.at(second, lambda second=second: report(world, 1 - silent, second))  # type: ignore[misc]
    world.at(300, lambda: world.speak(silent))
    world.at(310, world.complete)
    assert world.lead(detached=True, timing=LaunchTiming(poll_s=1.0)).status == "completed"
    assert not any(link.stops for link in world.links)


def test_a_detached_run_of_which_nothing_can_be_heard_is_left_alone_for_long(world: World) -> None:
    go_silent_all(world)
    world.at(500, lambda: (world.speak(0), world.speak(1)))
    world.at(510, world.complete)
    assert world.lead(detached=True, timing=LaunchTiming(poll_s=1.0)).status == "completed"


@pytest.mark.parametrize("first", [0, 1])
def test_nodes_that_come_back_one_after_the_other_are_all_waited_for(world: World, first: int) -> None:
    go_silent_all(world)
    world.at(400, lambda: world.speak(first))
    world.at(415, lambda: world.speak(1 - first))
    world.at(430, world.complete)
    assert world.lead(detached=True, timing=LaunchTiming(poll_s=1.0)).status == "completed"
    assert not any(link.stops for link in world.links)


def test_a_node_that_stays_away_when_the_others_are_back_is_lost(world: World) -> None:
    go_silent_all(world)
    world.at(400, lambda: world.speak(0))
    world.at(590, world.complete)
    outcome = world.lead(detached=True, timing=LaunchTiming(poll_s=1.0))
    assert outcome.status == "failed"
    assert [bool(link.stops) for link in world.links] == [True, False]
