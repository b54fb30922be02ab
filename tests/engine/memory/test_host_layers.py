"""How many layers keep on the host: as few as leave the device room, and other ones where a prediction says so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from memory_cases import WORLD, seven_b

from engine.memory.candidate import MARGIN, MemoryCandidate, Scope
from engine.memory.capacity import Capacity
from engine.memory.host_layers import other_host_layers, with_fewest_on_host
from engine.planning.time.machine import find_machine

GB = 10**9
LAYERS = 32
LAYER = 2 * 2**18 * 4096  # what one layer keeps on a rank under `full`, bytes
FULL: dict[str, Any] = {"activation_checkpoint": "full", "activation_store": "host"}


def scope_of(device_bytes: float, host_bytes_per_rank: float = 10**12, **memory: Any) -> Scope:
    config = seven_b(memory={**FULL, **memory}, train={"seq_len": 2**21})
    host = round(host_bytes_per_rank) * WORLD.local_ranks
    capacity = Capacity("test device", round(device_bytes), "test", host, "test", WORLD.local_ranks)
    return Scope(config, WORLD, capacity, find_machine("h100"))


def candidate(scope: Scope, host_layers: int | None = None) -> MemoryCandidate:
    return scope.estimated(replace(scope.config.memory, host_layers=host_layers))


ALL_THERE = candidate(scope_of(1)).estimate  # every layer on the host


@pytest.mark.parametrize("room", [0, 1, 5, 20])
def test_no_fewer_layers_would_leave_the_device_room(room: int) -> None:
    """With room for so many layers more than the two that are there in any case."""
    scope = scope_of((ALL_THERE.needed_bytes + (room + 0.5) * LAYER) * (1 + MARGIN))
    found = with_fewest_on_host(candidate(scope), scope)
    chosen = LAYERS if found.memory.host_layers is None else found.memory.host_layers
    assert found.fit.device
    assert not candidate(scope, chosen - 1).fit.device
    assert LAYERS - room - 2 <= chosen <= LAYERS - room


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        (scope_of(10**9), "not even all are enough"),
        (scope_of(10**12, host_layers=7), "it is settled"),
        (scope_of(10**12, activation_store="device"), "nothing lies there"),
        (scope_of(10**12), "all have room on the device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_is_moved_where(scope: Scope, why: str) -> None:
    given = candidate(scope, scope.config.memory.host_layers)
    assert with_fewest_on_host(given, scope) is given, why


@dataclass
class Predicted:
    """An exact prediction of so many bytes."""

    needed_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int = 0
    phase: str = "backward"
    components: dict[str, dict[str, int]] = field(default_factory=lambda: {"device": {}, "host": {}})

    def to_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("device_room", "host_room", "expected"),
    [
        (10, -0.5, 9),  # one layer comes from the host to the device
        (10, -3.0, 7),
        (2.5, -3.0, None),  # for which the device has no room
        (20, -12.0, None),  # more than lie there
        (-0.5, 3, 11),
        (-2.5, 3, 13),
        (-2.5, 2.9, None),
        (-30, 40, None),  # more than there are
        (-1, -1, None),
        (1, 1, None),  # it fits
    ],
)
def test_layers_move_from_the_memory_that_is_too_full(
    device_room: float, host_room: float, expected: int | None
) -> None:
    scope = scope_of(100 * LAYER, 100 * LAYER)
    prediction = Predicted(round((100 - device_room) * LAYER), round((100 - host_room) * LAYER))
    given = replace(candidate(scope, 10), prediction=prediction)
    assert other_host_layers(given, scope) == expected


def test_settled_layers_are_not_moved() -> None:
    scope = scope_of(100 * LAYER, 100 * LAYER, host_layers=10)
    given = replace(candidate(scope, 10), prediction=Predicted(50 * LAYER, 101 * LAYER))
    assert other_host_layers(given, scope) is None
