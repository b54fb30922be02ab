"""Every figure that people see, against a count that shares nothing with it."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from testkit.metered import meter_of, metered_rows
from testkit.ranks import Pools
from testkit.resolved import method_of
from testkit.tiny_training import TINY_MODEL, own_part, random_batches, start_run, tiny_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from engine.config.settings import ModelConfig, ParallelConfig, RunConfig
from engine.data.sampler import Batch
from engine.model.llama import LlamaModel
from engine.planning.checkpoint_policy import LayerPolicy
from engine.planning.methods.layers import attended_pairs, attention_layers
from engine.planning.topology import Topology
from engine.predict.flops import count_parameters, step_flops
from engine.predict.policy_cost import recomputed_parameters
from engine.runs.oom import peak_resident_bytes
from engine.training.metrics import PeakMemory

SEQ_LEN = 30
# Of the four sequences of a step: one document, many, one that starts late, one of single tokens.
DOCUMENTS = ((0,), (0, 1, 6, 7, 20), (0, 29), tuple(range(SEQ_LEN)))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"mask": "window", "window_tokens": 5},
    "layers that differ": {"mask_layers": ("window", "causal"), "window_tokens": 7},
}


def dense_mask(settings: dict[str, Any], layer: int, starts: tuple[int, ...]) -> Tensor:
    """Whether a query sees a key in one layer, bool [queries, keys]."""
    position = torch.arange(SEQ_LEN)
    query, key = position[:, None], position[None, :]
    document = torch.bucketize(position, torch.tensor(starts), right=True)
    visible = (key <= query) & (document[:, None] == document[None, :])
    kinds = settings.get("mask_layers", (settings.get("mask", "causal"),))
    if kinds[layer % len(kinds)] == "window":
        visible &= query - key < settings["window_tokens"]
    return visible


def dense_pairs(settings: dict[str, Any], layer: int, starts: tuple[int, ...], *, before: int = SEQ_LEN) -> int:
    """Visible pairs of one sequence in one layer whose query is `before` a position."""
    return int(dense_mask(settings, layer, starts)[:before].sum())


def packed() -> Batch:
    """The sequences of DOCUMENTS, one for every micro-batch."""
    batch = random_batches(0, sequences=len(DOCUMENTS))
    return Batch(batch.tokens, batch.labels, tuple(map(np.array, DOCUMENTS)), batch.samples)


@pytest.mark.parametrize(("mask", "documents"), [("causal", True), ("layers that differ", True), ("window", False)])
def test_a_step_counts_the_pairs_of_the_documents_that_it_computed(ranks: Pools, mask: str, documents: bool) -> None:
    config = tiny_config(
        attention={"preset": "ring", "documents": documents, **MASKS[mask]},
        parallel=ParallelConfig(dp_shard_size=2, cp_size=2),
        memory={"activation_checkpoint": "full"},
        train={"grad_accum_steps": 2},
    )
    (row,) = ranks(4).run(metered_rows, config, packed())[0]
    starts = DOCUMENTS if documents else ((0,),) * len(DOCUMENTS)
    pairs = sum(dense_pairs(MASKS[mask], layer, one) for layer in range(TINY_MODEL.num_layers) for one in starts)
    assert row["visible_pairs"] == pairs
    assert row["recomputed_pairs"] == pairs
    model = TINY_MODEL
    flops = 6 * count_parameters(model).matmul * 4 * SEQ_LEN + 12 * model.num_heads * model.head_dim * pairs
    assert row["mfu"] == pytest.approx(flops / row["step_time_s"] / 4 / 1e9)
    assert row["model_tflops_per_device"] == pytest.approx(flops / row["step_time_s"] / 4 / 1e12)
    assert row["hfu"] > row["mfu"]


def test_pairs_attended_again_are_those_of_the_first_part_of_the_sequence(ranks: Pools) -> None:
    config = tiny_config(
        attention={"preset": "single", "documents": True},
        memory={"activation_checkpoint": "seq_fraction", "saved_fraction": 0.5},
        train={"grad_accum_steps": 4},
    )
    ((row,),) = ranks(1).run(metered_rows, config, packed())
    halves = sum(dense_pairs({}, 0, starts, before=SEQ_LEN // 2) for starts in DOCUMENTS)
    assert row["recomputed_pairs"] == TINY_MODEL.num_layers * halves


def attention_of_visible_pairs(mask: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention that multiplies every query with the keys that it sees and no others."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        rows = []
        for index, seen in enumerate(mask):
            scores = q[:, :, index : index + 1] @ k[:, :, seen].transpose(2, 3)
            rows.append(scores.softmax(-1) @ v[:, :, seen])
        return torch.cat(rows, 2).transpose(1, 2)

    return attend


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_flops_equal_the_count_of_torch(mask: str, kv_heads: int, tied: bool) -> None:
    shape: ModelConfig = replace(TINY_MODEL, num_kv_heads=kv_heads, tie_embeddings=tied)
    config = tiny_config(model=shape, attention={"preset": "single", "documents": True, **MASKS[mask]})
    model, starts = LlamaModel(shape), DOCUMENTS[1]
    layers = [attention_of_visible_pairs(dense_mask(MASKS[mask], layer, starts)) for layer in range(shape.num_layers)]
    tokens = torch.randint(0, shape.vocab_size, (1, SEQ_LEN))
    counted = counted_flops(model, tokens, layers)
    turn = attention_layers(config, method_of(config, Topology(1, 1)), starts)
    pairs = attended_pairs(turn, shape.num_layers)
    assert step_flops(shape, seq_len=SEQ_LEN, visible_pairs=pairs.visible).model == counted
    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)  # type: ignore[method-assign]
    again = recomputed_parameters(LayerPolicy("full"), shape, tiled=False, exchanged=False) * shape.num_layers
    flops = step_flops(
        shape, seq_len=SEQ_LEN, visible_pairs=pairs.visible, recomputed_matrices=again, recomputed_pairs=pairs.visible
    )
    assert flops.model == counted
    assert flops.hardware == counted_flops(model, tokens, layers)


def counted_flops(model: LlamaModel, tokens: Tensor, layers: list[Any]) -> int:
    """What torch counts in one step."""
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens, torch.arange(SEQ_LEN), layers), tokens).backward()
    return counter.get_total_flops()


def sent_bytes(config: RunConfig) -> tuple[int, dict[str, Any]]:
    """(bytes that gloo was given to send by this rank in a step, the step's row)."""
    run = start_run(config)
    meter = meter_of(run)
    (batch,) = own_part(random_batches(0, sequences=1), run.mesh)
    meter.start()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        result = run.train_step(0, [batch])
    row, _ = meter.finish(1, result)
    sends = [event.input_shapes for event in profiler.events() if event.name == "gloo:send"]
    return sum(4 * math.prod(shape) for shapes in sends for shape in shapes), row


@pytest.mark.parametrize(("preset", "nodes"), [("burst", 1), ("usp", 4)])
def test_bytes_of_a_step_are_those_that_gloo_sends(ranks: Pools, preset: str, nodes: int) -> None:
    """On one node all are inside it, with a rank per node all between them; fp32 on the wire."""
    config = tiny_config(attention={"preset": preset}, cluster={"topology_nodes": nodes})
    found = ranks(4).run(sent_bytes, config)
    assert min(size for size, _ in found) > 0
    used, unused = ("comm_intra_bytes", "comm_inter_bytes") if nodes == 1 else ("comm_inter_bytes", "comm_intra_bytes")
    row = found[0][1]
    assert row[used] == max(size for size, _ in found)
    assert row[unused] == 0


def timed_step(config: RunConfig, slow_rank: int) -> tuple[float, int, dict[str, Any]]:
    """(seconds by a clock outside, tokens of this rank's batches, row) of a step that one rank begins late."""
    run = start_run(config)
    meter = meter_of(run)
    batches = own_part(random_batches(0, sequences=8), run.mesh, micro_steps=2)
    run.train_step(0, batches)  # makes the optimizer's state
    torch.distributed.barrier()
    meter.start()
    started = time.perf_counter()
    if run.mesh.rank == slow_rank:
        time.sleep(0.5)
    result = run.train_step(1, batches)
    seconds = time.perf_counter() - started
    return seconds, sum(batch.tokens.size for batch in batches), meter.finish(2, result)[0]


def test_speed_is_the_batches_tokens_over_the_seconds_of_a_clock_outside(ranks: Pools) -> None:
    config = tiny_config(parallel=ParallelConfig(dp_shard_size=4), train={"grad_accum_steps": 2})
    found = ranks(4).run(timed_step, config, 1)
    slowest, tokens = max(seconds for seconds, _, _ in found), sum(tokens for _, tokens, _ in found)
    row = found[0][2]
    assert row["tokens"] == tokens == 8 * SEQ_LEN
    assert 0.5 < slowest <= row["step_time_s"] + 1e-3
    assert row["step_time_s"] == pytest.approx(slowest, abs=0.25)
    assert row["tokens_per_s"] == pytest.approx(tokens / row["step_time_s"])
    assert row["tokens_per_s_per_device"] == pytest.approx(tokens / row["step_time_s"] / 4)


def test_the_peak_of_a_cpu_process_is_the_kernels() -> None:
    block = torch.ones(1 << 26, dtype=torch.uint8)
    allocated = PeakMemory(torch.device("cpu")).read()["peak_memory_bytes"]
    assert allocated is not None
    assert allocated >= block.nbytes
    # Of a program started by a larger one ru_maxrss is the larger one's; both are counted in pages, on each core apart.
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert allocated <= 1.02 * largest
    assert peak_resident_bytes("/a system that does not tell") == largest
