"""Machines: known by name, changed by field, never impossible."""

from __future__ import annotations

import math

import pytest

from engine.config.errors import ConfigError
from engine.planning.time.devices import DEVICES
from engine.planning.time.machine import find_machine


def test_a_machine_is_found_and_changed() -> None:
    machine = find_machine("h100", {"inter_bytes_per_s": 25e9, "shared_nic": True})
    assert (machine.inter_bytes_per_s, machine.shared_nic) == (25e9, True)
    assert machine.intra_bytes_per_s == find_machine("h100").intra_bytes_per_s


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("h10", {}, ["'h10'", "expected cpu", "one of gb200, b200", "did you mean h100?"]),
        ("h100", {"inter_bytes": 1.0}, ["no such field: inter_bytes", "did you mean inter_bytes_per_s?"]),
        ("h100", {"inter_bytes_per_s": 0.0}, ["inter_bytes_per_s is 0.0", "more than 0"]),
        ("h100", {"host_bytes_per_s": math.nan}, ["host_bytes_per_s is nan"]),
        ("h100", {"inter_latency_s": -1.0}, ["inter_latency_s is -1.0", "0 or more"]),
    ],
)
def test_an_impossible_machine_is_refused(name: str, changes: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_machine(name, changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["cpu", *(device.name for device in DEVICES)])
def test_links_are_ordered_as_in_a_real_node(name: str) -> None:
    machine = find_machine(name)
    assert machine.intra_bytes_per_s > machine.inter_bytes_per_s
    assert machine.intra_latency_s < machine.inter_latency_s
    assert machine.forward_flops_per_s > machine.backward_flops_per_s
