"""Which ranks of a run need most memory, and the memory of a rank beyond its tensors. No torch.

A prediction runs as these ranks only. The first rank has the largest shards of the weights, unless all are equal.
Attention's buffers differ by the part of the sequence that a rank attends to, and saved results by how much of the
sequence's end the rank holds.
"""

from __future__ import annotations

from engine.config.settings import ModelConfig, ParallelConfig, RunConfig
from engine.planning.methods.blocks import Blocks, divide_run
from engine.planning.methods.layers import LayerAttention, attention_layers
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import Channel, Kind, TokenBytes
from engine.planning.schedules.plan import channels_of, plan_method

MOST_RANKS_COMPARED = 64  # ranks that share a sequence; planning for more takes too long
_NOTEWORTHY = 1.02  # a rank that saves more than the first by this factor is predicted, too
# Driver and loaded kernels before the first tensor: 0.4 to 0.8 GB from A100 to H200.
CUDA_CONTEXT_BYTES = 800 * 2**20
# Free blocks of the wrong size in the caching allocator, and cuBLAS's workspace.
FRAGMENTATION = 0.03


def worst_ranks(config: RunConfig, method: AttentionMethod) -> list[int]:
    """Return global ranks of which one needs most memory: mostly one, at most three."""
    layers = tuple(dict.fromkeys(layer for layer in attention_layers(config, method) if layer.attends))
    blocks = divide_run(config, method, layers)
    saved = [_saved_rows(layer, blocks) for layer in layers]
    if method.cp_size <= MOST_RANKS_COMPARED:
        of_layers = zip(layers, saved, strict=True)
        places = {_largest([_attention_bytes(layer, blocks, config.model, rows) for layer, rows in of_layers])}
        places |= set() if _shards_are_equal(config, method) else {0}
    else:
        # Without plans: in a contiguous layout the last rank attends to most keys; in others the first attends to as
        # many as any, up to part of a block.
        best = _largest(saved)
        places = {0, method.cp_size - 1} if method.layout == "contiguous" else {0}
        if sum(rows[best] for rows in saved) > _NOTEWORTHY * sum(rows[0] for rows in saved):
            places.add(best)
    return sorted(place * config.parallel.tp_size for place in places)


def _attention_bytes(layer: LayerAttention, blocks: Blocks, model: ModelConfig, saved: list[int]) -> list[int]:
    """Return for each rank the bytes of one layer's buffers plus saved results of all layers, for comparison."""
    token = TokenBytes(model.num_heads, model.num_kv_heads, model.head_dim, model.v_head_dim or model.head_dim)
    plans = plan_method(layer.method, layer.mask, blocks)
    passes = [
        [
            sum(buffer.rows * token.of(buffer.kind, buffer.heads) for buffer in plan.ranks[rank].buffers)
            for rank in plan.ranks
        ]
        for plan in (plans.forward, plans.backward)
    ]
    results = model.num_layers * token.of(Kind.OUT_LSE)
    return [max(sizes) + rows * results for *sizes, rows in zip(*passes, saved, strict=True)]


def _shards_are_equal(config: RunConfig, method: AttentionMethod) -> bool:
    """Return whether the rows of every weight divide evenly over its ranks (FSDP2 shards the first dimension)."""
    model, parallel = config.model, config.parallel
    kv_size = model.num_kv_heads * model.head_dim
    rows = (model.vocab_size, model.hidden_size, model.ffn_hidden_size, model.num_heads * model.head_dim, kv_size)
    parts = parallel.dp_shard_size * method.cp_size * parallel.tp_size
    return all(count % parts == 0 for count in rows)


def _saved_rows(layer: LayerAttention, blocks: Blocks) -> list[int]:
    """Return for each rank the rows of its ring block whose attention is not recomputed."""
    by_member = blocks.ring_rows_from(layer.recompute_before or 0)
    return [by_member[blocks.grid.coordinates(rank)[0]] for rank in range(blocks.grid.size)]


def _largest(by_layer: list[list[int]]) -> int:
    totals = [sum(of_rank) for of_rank in zip(*by_layer, strict=True)]
    return totals.index(max(totals))


def reserve_bytes(parallel: ParallelConfig, method: AttentionMethod, world_size: int, peak_bytes: int) -> int:
    """Return the bytes of CUDA context, NCCL communicators and fragmentation of a rank with `peak_bytes` of tensors.

    NCCL's part follows published measurements, each of one setup. A communicator of two ranks takes 544 MiB, of more
    688 MiB (https://github.com/NVIDIA/nccl/issues/964, A100). All-to-all takes 3.3 GB on 8 GPUs, since each pair in a
    node gets up to 32 channels (https://github.com/NVIDIA/nccl/issues/1685, H100); counted in proportion to a rank's
    peers, at most 8, because pairs on different nodes get few. A communicator of one rank takes 512 MiB
    (https://github.com/NVIDIA/nccl/issues/2363, NCCL 2.28); counted if the run has one rank.
    """
    groups = [world_size, parallel.dp_shard_size * method.cp_size, parallel.dp_replicate_size, parallel.tp_size]
    for channel in channels_of(method):
        if channel is not Channel.HEADS:
            inner = channel in (Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER)
            groups.append(method.ring_inner_size if inner else method.ring_outer_size)
    heads = method.head_parallel_size
    all_to_all = max(_group_bytes(heads), 3_300_000_000 * min(heads - 1, 7) // 7)
    nccl = 512 * 2**20 if world_size == 1 else sum(map(_group_bytes, groups)) + all_to_all
    return CUDA_CONTEXT_BYTES + nccl + round(FRAGMENTATION * peak_bytes)


def _group_bytes(ranks: int) -> int:
    return {1: 0, 2: 544 * 2**20}.get(ranks, 688 * 2**20)
