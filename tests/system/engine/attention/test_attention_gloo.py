"""THE table of real processes over gloo: every preset equals dense float64 attention, and its bytes are the plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from testkit.attention_oracle import causal, errors, gather, oracle, random_inputs

from engine.attention.buffers import BufferLocation, BufferPool, allocate_bytes
from engine.attention.library import ContextParallel, open_channels, resolve_here
from engine.attention.transport import P2POp, Transport
from engine.config.cluster import ClusterConfig
from engine.config.settings import AttentionConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.distributed.mesh import build_mesh
from engine.planning.methods.presets import PRESETS
from engine.planning.program.ops import LinkBytes, TokenBytes
from engine.planning.schedules.plan import plan_method
from engine.planning.visibility.mask import Mask

HEADS, HEAD_DIM = 4, 8
TABLE: list[tuple[int, int, int, dict[str, Any]]] = [  # ranks, nodes, kv heads, a point on the axes
    (1, 1, 2, {"preset": "single"}),
    (2, 1, 2, {"preset": "ring"}),
    (3, 1, 4, {"preset": "striped"}),
    (3, 1, 2, {"preset": "burst"}),
    (3, 3, 2, {"preset": "burst"}),
    (4, 4, 2, {"preset": "burst"}),  # one rank per node
    (4, 2, 2, {"preset": "burst", "backward_circulates": "q"}),
    (4, 2, 4, {"preset": "burst", "backward_circulates": "kv", "gradient_wire_dtype": "bfloat16"}),
    (4, 2, 2, {"preset": "burst", "backward_order": "reversed", "backward_circulates": "kv"}),
    (4, 2, 4, {"preset": "burst_ulysses"}),
    (4, 1, 2, {"preset": "ulysses"}),  # replicates the kv heads
    (4, 2, 4, {"preset": "loongtrain", "backward_circulates": "q"}),
    (4, 1, 2, {"preset": "usp", "head_parallel_size": 2, "placement": "context_first"}),
    (4, 1, 2, {"preset": "megatron_cp"}),
    (4, 2, 4, {"preset": "megatron_allgather", "ring_inner_size": 2, "ring_outer_size": 2}),
    (4, 2, 2, {"preset": "megatron_hierarchical"}),
    (2, 1, 4, {"preset": "fpdt", "chunk_tokens": 3}),
    (2, 1, 2, {"preset": "alst"}),
]


class Recording:
    """A transport that notes the ends of the messages that go through it."""

    def __init__(self, transport: Transport) -> None:
        self.meter = transport.meter
        self._transport = transport
        self.wait = transport.wait
        self.ends: set[tuple[str, str, int]] = set()

    def post(self, ops: Sequence[P2POp]) -> None:
        self.ends |= {(op.channel, op.op, op.peer) for op in ops}
        self._transport.post(ops)


def config_of(seq_len: int, kv_heads: int, attention: dict[str, Any], nodes: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_heads=HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM),
        attention=AttentionConfig(**attention),
        parallel=ParallelConfig(),
        train=TrainConfig(seq_len=seq_len, compute_dtype="float32"),
        cluster=ClusterConfig(topology_nodes=nodes),
    )


def build(seq_len: int, kv_heads: int, attention: dict[str, Any], nodes: int) -> ContextParallel:
    config = config_of(seq_len, kv_heads, attention, nodes)
    mesh = build_mesh(config.parallel, config.cluster)
    return ContextParallel.of_run(resolve_here(config, mesh), mesh)


def local_rows(attention: ContextParallel, x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of [N, heads, D], zero-padded, as a leaf [1, T, heads, D]."""
    padded = torch.zeros(attention.padded_seq_len, *x.shape[1:], dtype=x.dtype)
    padded[: len(x)] = x
    index = torch.from_numpy(attention.layout.positions(attention.rank))
    return padded[index][None].clone()


def run_rank(seq_len: int, kv_heads: int, attention: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Forward and backward of one rank: values, bytes counted by the transport and bytes of the plan."""
    layer = build(seq_len, kv_heads, attention, nodes)
    inputs = random_inputs(seq_len, HEADS, kv_heads, HEAD_DIM)
    q, k, v = (local_rows(layer, x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    layer.reset_traffic()
    out = layer(q, k, v)
    forward = layer.traffic()
    layer.reset_traffic()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), local_rows(layer, inputs.dout))
    values = {"out": out.detach()[0], "dq": dq[0], "dk": dk[0], "dv": dv[0]}
    return {
        "values": values,
        "positions": layer.layout.positions(layer.rank),
        "counted": (forward, layer.traffic()),
        "planned": planned_bytes(layer, seq_len, kv_heads),
    }


def planned_bytes(layer: ContextParallel, seq_len: int, kv_heads: int) -> tuple[LinkBytes, LinkBytes]:
    rank, tokens = layer.rank, TokenBytes(HEADS, kv_heads, HEAD_DIM, HEAD_DIM, 8, 8, 8)  # float64
    plans = plan_method(layer.method, Mask(seq_len), layer.run_context().blocks, rank)
    forward, backward = (plan.bytes_by_link(tokens, layer.topology)[rank] for plan in (plans.forward, plans.backward))
    return forward, backward


def test_every_preset_is_in_the_table() -> None:
    assert {row[-1]["preset"] for row in TABLE} == {*PRESETS} - {"megatron_tp"}  # which is `single` to attention


@pytest.mark.parametrize(("size", "nodes", "kv_heads", "attention"), TABLE, ids=str)
def test_preset_equals_dense_attention_with_the_planned_traffic(
    ranks, size: int, nodes: int, kv_heads: int, attention: dict[str, Any]
):
    seq_len = 8 * size + 3  # does not divide: the tail is padding
    replies = ranks(size).run(run_rank, seq_len, kv_heads, attention, nodes)
    index = [torch.from_numpy(reply["positions"]) for reply in replies]
    inputs = random_inputs(seq_len, HEADS, kv_heads, HEAD_DIM)
    want = oracle(inputs, causal(seq_len))
    got = {
        name: gather(index, [reply["values"][name] for reply in replies])[:seq_len]
        for name in ("out", "dq", "dk", "dv")
    }
    found = errors({**got, "lse": want["lse"]}, want)
    assert all(error < 1e-10 for error in found.values()), found
    for reply in replies:
        assert reply["counted"] == reply["planned"]
    assert size == 1 or sum(reply["counted"][0].total for reply in replies) > 0
    crosses = nodes > 1
    assert crosses == (sum(reply["counted"][1].inter_bytes for reply in replies) > 0)


def ends_met_and_used(seq_len: int, nodes: int) -> tuple[set[Any], set[Any]]:
    """Ends of messages of one rank: when its attention is built, and of a step."""
    config = config_of(seq_len, 2, {"preset": "burst"}, nodes)
    mesh = build_mesh(config.parallel, config.cluster)
    recording = Recording(open_channels(config, mesh))
    layer = ContextParallel.of_run(resolve_here(config, mesh), mesh, recording)
    met, recording.ends = recording.ends, set()
    inputs = random_inputs(seq_len, HEADS, 2, HEAD_DIM)
    q, k, v = (local_rows(layer, x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    layer(q, k, v).backward(local_rows(layer, inputs.dout))
    return met, recording.ends


def test_ranks_meet_exactly_those_that_a_step_talks_to_before_the_first(ranks) -> None:
    for met, used in ranks(4).run(ends_met_and_used, 32, 2):
        assert met == used
        assert len({channel for channel, _, _ in used}) == 4  # payload and gradients, inside a node and between


def multiprocessors_left() -> list[int | None]:
    """What torch's kernels leave free under parallel.comm_sms=8, and under null after that."""
    found = []
    for count in (8, None):
        config = replace(config_of(8, 2, {"preset": "single"}, 1), parallel=ParallelConfig(comm_sms=count))
        mesh = build_mesh(config.parallel, config.cluster)
        ContextParallel.of_run(resolve_here(config, mesh), mesh)
        found.append(torch._C._get_sm_carveout_experimental())
    return found


def test_kernels_leave_the_multiprocessors_that_messages_are_to_have(ranks) -> None:
    assert ranks(1).run(multiprocessors_left) == [[8, None]]


def two_micro_batches(seq_len: int) -> list[float]:
    """Two forwards in flight with an evaluation between them, backward in the other order; differences to one at a
    time.
    """
    layer = build(seq_len, 2, {"preset": "burst"}, 2)
    batches = [random_inputs(seq_len, HEADS, 2, HEAD_DIM, seed=seed) for seed in range(2)]

    def leaves(batch):
        return [local_rows(layer, x).requires_grad_() for x in (batch.q, batch.k, batch.v)]

    def gradients(args, out, batch):
        return torch.autograd.grad(out, args, local_rows(layer, batch.dout))

    alone = [gradients(args, layer(*args), batch) for batch in batches for args in [leaves(batch)]]
    args = [leaves(batch) for batch in batches]
    first = layer(*args[0])
    with torch.no_grad():
        layer(*args[1])
    second = layer(*args[1])
    together = [gradients(args[1], second, batches[1]), gradients(args[0], first, batches[0])][::-1]
    return [float((a - b).abs().max()) for x, y in zip(alone, together, strict=True) for a, b in zip(x, y, strict=True)]


def test_interleaved_micro_batches_are_independent(ranks) -> None:
    for differences in ranks(4).run(two_micro_batches, 35):
        assert differences == [0.0] * 6


def blocks_per_step() -> tuple[list[int], int]:
    """Blocks allocated up to each of five training steps, and bytes that stay."""
    sizes: list[int] = []

    def allocate(location: BufferLocation, size: int) -> torch.Tensor:
        sizes.append(size)
        return allocate_bytes(location, size)

    pool = BufferPool(allocate=allocate)
    layer = build(35, 2, {"preset": "burst"}, 2).with_runtimes(lambda runtime: replace(runtime, pool=pool))
    inputs = random_inputs(35, HEADS, 2, HEAD_DIM)
    counts = []
    for _ in range(5):
        args = [local_rows(layer, x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        torch.autograd.grad(layer(*args), args, local_rows(layer, inputs.dout))
        counts.append(len(sizes))
    return counts, pool.idle_bytes


def test_training_steps_stop_allocating_buffers(ranks) -> None:
    for counts, idle_bytes in ranks(4).run(blocks_per_step):
        assert 0 < counts[2] == counts[3] == counts[4]
        assert idle_bytes > 0
