"""Transfers on their own streams: no order that the events allow gives a race, a wrong number or a deadlock."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.attention_oracle import causal, gather, oracle, random_inputs, ring_method
from testkit.hub import poison
from testkit.stream_machine import DeadlockError, DeferredArithmetic, Machine, MachineStreams, Network
from torch import Tensor

from engine.attention.arithmetic import AttentionShape, TensorArithmetic
from engine.attention.buffers import BufferPool, buffer_location
from engine.attention.executor import Execution, Fields
from engine.attention.merge import backward_stats
from engine.attention.streams import StreamTransport
from engine.attention.transport import Meter, P2POp
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import AttentionPlan, Buffer, Channel
from engine.planning.schedules.dispatch import plan_dispatch
from engine.planning.schedules.plan import plan_method
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import Visibility

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 4
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float64, torch.device("cpu"), torch.float64)
RINGS = [ring_method(*shape) for shape in ((1,), (2,), (3,), (1, 3), (2, 2), (3, 2), (2, 3))]


class PooledArithmetic(TensorArithmetic):
    """Buffers that are no input or output come from a pool, as one lease."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(SHAPE, ReferenceKernel())
        self.lease = pool.lease()

    def allocate(self, buffer: Buffer) -> Fields:
        if buffer.argument is not None:
            return {name: poison(tensor) for name, tensor in super().allocate(buffer).items()}
        place = buffer_location(SHAPE.device, buffer.where)
        shapes = {name: ((buffer.rows, *tail), dtype) for name, (tail, dtype) in self._field_shapes(buffer).items()}
        return {name: poison(self.lease.empty(*given, place)) for name, given in shapes.items()}


class Group:
    """All ranks of a group on one machine; `streams` makes each rank's StreamOps."""

    def __init__(self, size: int, streams=MachineStreams, *, one_queue: bool = False) -> None:
        self.machine = Machine()
        network = Network(self.machine, one_queue=one_queue)
        self.pools = [BufferPool() for _ in range(size)]
        self.transports = [
            StreamTransport(streams(self.machine, rank), network.messenger(rank), Meter(Topology(1, size), rank))
            for rank in range(size)
        ]

    def start(self, plan: AttentionPlan, inputs: list[dict[str, Fields]]) -> list[Execution]:
        """Give all ranks' work to the streams, one rank after the other: no host waits for another."""
        executions = []
        for rank, arguments in enumerate(inputs):
            pooled = PooledArithmetic(self.pools[rank])
            arithmetic = DeferredArithmetic(pooled, self.machine, rank)
            execution = Execution(plan.ranks[rank], arithmetic, self.transports[rank], arguments)
            execution.run()
            pooled.lease.close()  # the next run reuses the memory, ordered by the streams alone
            executions.append(execution)
        return executions


class Case:
    """A ring, a mask and a layout with random inputs and what dense attention says."""

    def __init__(self, ring: AttentionMethod, rows: int, seed: int = 0):
        self.ring = ring
        self.layout = divide_sequence(ring, rows).ring
        self.index = [torch.from_numpy(self.layout.positions(rank)) for rank in range(ring.cp_size)]
        self.data = random_inputs(rows, HEADS, KV_HEADS, HEAD_DIM, seed=seed)
        self.want = oracle(self.data, causal(rows))

    def plan(self, direction: Literal["forward", "kv", "q"]) -> AttentionPlan:
        ring = self.ring if direction == "forward" else replace(self.ring, backward_circulates=direction)
        plans = plan_method(ring, Mask(self.layout.seq_len), divide_sequence(ring, self.layout.seq_len))
        return plans.forward if direction == "forward" else plans.backward

    def forward_inputs(self) -> list[dict[str, Fields]]:
        x = self.data
        return [{"q": {"q": x.q[i]}, "kv": {"k": x.k[i], "v": x.v[i]}} for i in self.index]

    def backward_inputs(self) -> list[dict[str, Fields]]:
        result: list[dict[str, Fields]] = []
        for i in self.index:
            dout, out, lse = self.data.dout[i], self.want["out"][i], self.want["lse"][i]
            query = {"q": self.data.q[i], "dout": dout, "out": out, "lse": lse, "stats": backward_stats(dout, out, lse)}
            result.append({"q_dout": query, "kv": {"k": self.data.k[i], "v": self.data.v[i]}})
        return result

    def check_forward(self, executions: list[Execution]) -> None:
        for name in ("out", "lse"):
            self.check(name, [execution.argument("out_lse")[name] for execution in executions])

    def check_backward(self, executions: list[Execution]) -> None:
        self.check("dq", [execution.argument("dq")["dq"] for execution in executions])
        for name in ("dk", "dv"):
            self.check(name, [execution.argument("dkv")[name] for execution in executions])

    def check(self, name: str, parts: list[Tensor]) -> None:
        assert ((gather(self.index, parts) - self.want[name]).abs() < 1e-10).all(), name


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ring = draw(st.sampled_from(RINGS))
    rows = draw(st.integers(2 * ring.cp_size, 4 * ring.cp_size + 3))
    return Case(replace(ring, layout=draw(st.sampled_from(["contiguous", "zigzag", "striped"]))), rows)


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from(["forward", "kv", "q"]), st.booleans(), st.integers(0, 1 << 30))
def test_results_do_not_depend_on_the_order_of_streams(
    case: Case, direction: Literal["forward", "kv", "q"], one_queue: bool, seed: int
) -> None:
    group = Group(case.ring.cp_size, one_queue=one_queue)
    inputs = case.forward_inputs() if direction == "forward" else case.backward_inputs()
    executions = group.start(case.plan(direction), inputs)
    assert group.machine.races() == []
    group.machine.run(seed)
    check = case.check_forward if direction == "forward" else case.check_backward
    check(executions)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_merging_partial_results_of_other_ranks_is_free_of_races(
    direction: Literal["forward", "backward"], seed: int
) -> None:
    case, group = Case(ring_method(3), 13), Group(3)
    plan = plan_dispatch(Visibility(Mask(13), case.layout), lambda i, j: (i + j) % 3, direction)
    executions = group.start(plan, case.forward_inputs() if direction == "forward" else case.backward_inputs())
    assert group.machine.races() == []
    group.machine.run(seed)
    check = case.check_forward if direction == "forward" else case.check_backward
    check(executions)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ring", [ring_method(3), ring_method(2, 2)], ids=str)
def test_runs_that_follow_each_other_share_buffers_without_a_race(ring: AttentionMethod, seed: int) -> None:
    first, second = Case(ring, 13, seed=1), Case(ring, 13, seed=2)
    group = Group(ring.cp_size)
    forward, backward = first.plan("forward"), first.plan("q")
    for _ in range(2):  # pools know their size after the first runs
        done = [group.start(forward, first.forward_inputs()), group.start(backward, second.backward_inputs())]
    assert all(pool.idle_bytes > 0 for pool in group.pools)
    done += [group.start(backward, first.backward_inputs()), group.start(forward, second.forward_inputs())]
    assert group.machine.races() == []
    group.machine.run(seed)
    first.check_forward(done[0])
    second.check_backward(done[1])
    first.check_backward(done[2])
    second.check_forward(done[3])


class Forgetful(MachineStreams):
    """Leaves out the waits of one kind of stream: those of channels for compute, or of compute for channels."""

    forgets = "channel"

    def hold(self, stream: Channel | None, event) -> None:
        if (stream is None) != (self.forgets == "compute"):
            super().hold(stream, event)


class ForgetfulCompute(Forgetful):
    forgets = "compute"


class TooEarly(MachineStreams):
    """Records the end of a batch before the channel waited for it: work given to NCCL is not work of the channel."""

    @contextlib.contextmanager
    def under(self, stream: Channel):
        self._early = None
        with super().under(stream):
            self._early = self._machine.record((self._rank, stream))
            yield

    def record(self, stream: Channel | None):
        return super().record(stream) if stream is None else self._early


@pytest.mark.parametrize("streams", [Forgetful, ForgetfulCompute, TooEarly])
@pytest.mark.parametrize("ring", [ring_method(3), ring_method(2, 2)], ids=str)
def test_a_missing_wait_is_detected(ring: AttentionMethod, streams: type[MachineStreams]) -> None:
    case = Case(ring, 13)
    plan = case.plan("kv")  # computes what it sends, and receives what it adds
    for seed in range(20):
        group = Group(ring.cp_size, streams)
        executions = group.start(plan, case.backward_inputs())
        assert group.machine.races()
        group.machine.run(seed)
        try:
            case.check_backward(executions)
        except AssertionError:
            return
    pytest.fail("20 random orders all gave the right numbers")


def exchange_on_two_channels(machine: Machine, starts) -> None:
    """Two ranks exchange a tensor on two channels, each listing them in another order."""
    network = Network(machine, one_queue=True)
    channels = [Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER]
    for rank, order in enumerate((channels, channels[::-1])):
        ends = [
            P2POp(2 * channels.index(channel) + (op == "send") ^ rank, op, channel, 1 - rank, (torch.zeros(1),))
            for channel in order
            for op in ("send", "recv")
        ]
        starts(MachineStreams(machine, rank), network.messenger(rank), ends)


def test_channels_in_different_orders_deadlock_on_one_queue_unless_the_transport_sorts_them() -> None:
    def as_listed(streams, messenger, ends) -> None:
        for pair in (ends[:2], ends[2:]):
            with streams.under(pair[0].channel):
                messenger.start(pair[0].channel, pair)

    def by_transport(streams, messenger, ends) -> None:
        StreamTransport(streams, messenger, Meter(Topology(1, 2), 0)).post(ends)

    machine = Machine()
    exchange_on_two_channels(machine, as_listed)
    with pytest.raises(DeadlockError, match=r"[xg]\.in"):
        machine.run(0)
    machine = Machine()
    exchange_on_two_channels(machine, by_transport)
    machine.run(0)


@pytest.mark.parametrize("seed", range(12))
def test_host_copies_are_ordered_by_the_waits_of_the_plan(seed: int) -> None:
    rows, prefetch = 5 + seed, seed % 4
    method = AttentionMethod(
        "fpdt", "chunk_cyclic", 1, 1, "kv", "float32", chunk_tokens=3, chunk_store="host", prefetch_chunks=prefetch
    )
    plans = plan_method(method, Mask(rows), divide_sequence(method, rows))
    case, group = Case(ring_method(1), rows), Group(1)
    [execution] = group.start(plans.forward, case.forward_inputs())
    assert group.machine.races() == []
    group.machine.run(seed)
    for name, value in execution.argument("out_lse").items():
        case.check(name, [value])


def test_a_run_that_broke_off_leaves_nothing_in_flight_unordered() -> None:
    group = Group(2)
    channel, tensors = Channel.PAYLOAD_INNER, [torch.zeros(3), torch.zeros(3)]
    for rank, op in enumerate(("send", "recv")):
        group.transports[rank].post([P2POp(0, op, channel, 1 - rank, (tensors[rank],))])  # and never waits
        group.transports[rank].wait_pending()
        after = group.machine.enqueue((rank, None), "reuse", [], lambda: None)
        assert all(op.before(after) for op in group.machine.ops[:-1] if op.stream[0] == rank)
