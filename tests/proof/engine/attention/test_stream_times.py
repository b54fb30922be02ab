"""Measured transfers: what is called exposed is what compute lost, and its share is of the idle wire's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.timed_streams import TimedStreams

from engine.activations.store import HostStore, SavedTensors
from engine.attention.stream_times import Times, TransferTimes, total
from engine.attention.streams import StreamTransport
from engine.attention.transport import Meter, P2POp
from engine.device.host_memory import HostPool
from engine.planning.program.ops import Channel
from engine.planning.topology import Topology
from engine.predict.machine import find_machine

CPU = torch.device("cpu")
ELEMENTS = 8  # fp32: 32 bytes


def offload(layers: int, layer_s: float, copy_s: float, **bounds: int) -> tuple[Times, TimedStreams]:
    """Forward and backward of `layers` layers that each compute `layer_s` and keep what a copy of `copy_s` moves."""
    streams = TimedStreams(4 * ELEMENTS / copy_s)
    store = HostStore(CPU, streams, HostPool(), times=TransferTimes(streams), **bounds)
    store.times.start()
    entries: list[SavedTensors] = []
    for layer in range(layers):
        streams.compute(layer_s)
        entries.append(store.save([torch.full((ELEMENTS,), float(layer))]))
    while entries:
        kept = entries.pop()
        kept.fetch()
        streams.compute(layer_s)
        kept.release()
    return store.times.read(), streams


def test_copies_shorter_than_a_layer_are_hidden() -> None:
    times, streams = offload(6, layer_s=1.0, copy_s=0.5)
    assert times == Times(10 * 4 * ELEMENTS, 5.0, 0.0)  # 6 to the host; 2 were still on the device, 4 came back
    assert times.exposed_share(10 * 0.5) == 0.0
    assert streams.finished_s == 12.0


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 40), st.integers(0, 4), st.integers(0, 3))
def test_exposed_seconds_are_those_that_compute_lost(
    layers: int, layer_s: int, copy_s: int, copies: int, loads: int
) -> None:
    times, streams = offload(layers, layer_s, copy_s, copies_in_flight=copies, loads_ahead=loads)
    assert times.exposed_s == pytest.approx(streams.finished_s - streams.computed_s)
    assert times.exposed_s is not None
    assert times.transfer_s is not None
    assert 0 <= times.exposed_s <= times.transfer_s + 1e-9


def test_copies_that_start_only_behind_compute_are_not_called_hidden() -> None:
    """The device is full of a tile of 7.33 s: the copy, ready at once, runs after it."""
    streams = TimedStreams(1.0)
    times = TransferTimes(streams)
    times.start()
    with times.transfer(Channel.TO_HOST, 1):
        streams.compute(7.33)
        streams.hold(Channel.TO_HOST, streams.record(None))
        streams.hold(Channel.TO_HOST, streams.record(Channel.TO_HOST) + 1.0)
    with times.wait():
        streams.hold(None, streams.record(Channel.TO_HOST))
    found = times.read()
    assert found == Times(1, pytest.approx(8.33), pytest.approx(1.0))
    assert found.exposed_share(idle_wire_s=1.0) == pytest.approx(1.0)


WIRE = replace(find_machine("cpu"), intra_bytes_per_s=16.0, inter_bytes_per_s=4.0)


class Wires:
    """A messenger whose messages take their bytes over the rate of their link on the stream of their channel."""

    def __init__(self, streams: TimedStreams, topology: Topology, late_s: float = 0.0) -> None:
        self._streams, self._topology, self._late_s = streams, topology, late_s

    def start(self, channel: Channel, ops: Sequence[P2POp]) -> list[list[Wires]]:
        seconds = max(op.num_bytes / (16.0 if self._topology.same_node(0, op.peer) else 4.0) for op in ops)
        self._streams.hold(channel, self._streams.record(channel) + self._late_s + seconds)
        return [[self] for _ in ops]

    def wait(self) -> None:
        """The channel's stream waits, which it has."""


@pytest.mark.parametrize(
    ("compute_s", "late_s", "share"), [(8.0, 0.0, 0.0), (6.0, 0.0, 0.25), (0.0, 0.0, 1.0), (0.0, 4.0, 1.5)]
)
def test_exposed_messages_are_reported_relative_to_an_idle_wire(compute_s: float, late_s: float, share: float) -> None:
    """32 bytes to each of two peers: 2 s inside the node and 8 s between nodes, at the same time."""
    streams, topology = TimedStreams(1.0), Topology(2, 2)
    transport = StreamTransport(streams, Wires(streams, topology, late_s), Meter(topology, 0), streams)
    transport.messages.start()
    channels = ((1, Channel.PAYLOAD_INNER), (2, Channel.PAYLOAD_OUTER))
    transport.post([P2POp(peer, "send", channel, peer, (torch.zeros(ELEMENTS),)) for peer, channel in channels])
    streams.compute(compute_s)
    transport.wait([1, 2])
    idle_s = WIRE.idle_wire_s(transport.meter.sent, topology.local_ranks)
    assert idle_s == 8.0
    assert replace(WIRE, shared_nic=True).idle_wire_s(transport.meter.sent, topology.local_ranks) == 16.0
    assert transport.messages.read().exposed_share(idle_s) == share


def test_transfers_outside_a_measurement_do_not_count() -> None:
    streams = TimedStreams(1.0)
    times = TransferTimes(streams)
    for counted in (False, True, False):
        if counted:
            times.start()
        with times.transfer(Channel.TO_HOST, 5):
            streams.hold(Channel.TO_HOST, streams.record(Channel.TO_HOST) + 2)
        with times.wait():
            streams.hold(None, streams.record(Channel.TO_HOST))
        assert times.read() == (Times(5, 2.0, 2.0) if counted else Times(0, 0.0, 0.0))


def test_without_a_clock_only_bytes_are_known() -> None:
    store = HostStore(CPU, TimedStreams(1.0), HostPool())
    store.times.start()
    store.save([torch.zeros(ELEMENTS)])
    times = store.times.read()
    assert times == Times(4 * ELEMENTS, None, None)
    assert times.exposed_share(1.0) is None


def test_a_total_knows_seconds_only_if_all_that_moved_something_do() -> None:
    idle, known, unknown = Times(0, None, None), Times(10, 1.0, 0.5), Times(1, None, None)
    assert total([idle]) == Times(0, None, None)
    assert total([idle, known, known]) == Times(20, 2.0, 1.0)
    assert total([known, unknown]) == Times(11, None, None)


def test_host_copies_are_measured_apart_from_messages() -> None:
    streams = TimedStreams(16.0)
    transport = StreamTransport(streams, None, Meter(Topology(1, 1), 0), streams)
    for times in (transport.copies, transport.messages):
        times.start()
    source, target = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    transport.post([P2POp(0, "store", Channel.TO_HOST, 0, (source,), into=(target,))])  # 2 s
    streams.compute(0.5)
    transport.wait([0])
    assert transport.copies.read() == Times(32, 2.0, 1.5)
    assert transport.messages.read() == Times(0, 0.0, 0.0)
