"""Which ranks of a run can need most memory, so that a prediction need not run as all of them. No torch.

The first rank has the largest shards of the weights, unless all are equal. Attention's buffers differ by what a rank
sees of the sequence, and results that a policy keeps by how much of its end the rank holds.
"""

from __future__ import annotations

from engine.config.settings import ModelConfig, RunConfig
from engine.planning.methods.blocks import Blocks, divide_run
from engine.planning.methods.methods import plan_method
from engine.planning.methods.presets import AttentionMethod
from engine.planning.schedule.plan import Kind, TokenBytes
from engine.planning.sequence.layers import LayerAttention, attention_layers

MOST_RANKS_COMPARED = 64  # that share a sequence; planning for more takes too long
_NOTEWORTHY = 1.02  # share by which a rank must keep more than the first to be worth another prediction


def worst_ranks(config: RunConfig, method: AttentionMethod) -> list[int]:
    """Global ranks of which one needs most: one in most runs, at most three."""
    layers = tuple(dict.fromkeys(attention_layers(config, method)))
    blocks = divide_run(config, method, layers)
    if method.cp_size <= MOST_RANKS_COMPARED:
        places = {_largest([_attention_bytes(layer, blocks, config.model) for layer in layers])}
        if not _shards_are_equal(config, method):
            places.add(0)
    else:
        places = _ends(layers, blocks, method)
    return sorted(place * config.parallel.tp_size for place in places)


def _ends(layers: tuple[LayerAttention, ...], blocks: Blocks, method: AttentionMethod) -> set[int]:
    """Without plans: the last rank of a contiguous layout sees most; elsewhere the first sees as much as any, up to a
    part of a block.
    """
    kept = [_kept_rows(layer, blocks) for layer in layers]
    best = _largest(kept)
    places = {0, method.cp_size - 1} if method.layout == "contiguous" else {0}
    if sum(rows[best] for rows in kept) > _NOTEWORTHY * sum(rows[0] for rows in kept):
        places.add(best)
    return places


def _attention_bytes(layer: LayerAttention, blocks: Blocks, model: ModelConfig) -> list[int]:
    """Bytes of one layer's buffers, and of the results that all layers like it keep, on every rank; to compare."""
    token = TokenBytes(model.num_heads, model.num_kv_heads, model.head_dim)
    plans = plan_method(layer.method, layer.mask, blocks)
    passes = [
        [sum(slot.rows * token.of(slot.kind, slot.heads) for slot in plan.ranks[rank].slots) for rank in plan.ranks]
        for plan in (plans.forward, plans.backward)
    ]
    kept = [model.num_layers * rows * token.of(Kind.SAVED) for rows in _kept_rows(layer, blocks)]
    return [max(sizes) + results for *sizes, results in zip(*passes, kept, strict=True)]


def _shards_are_equal(config: RunConfig, method: AttentionMethod) -> bool:
    """Whether the rows of every weight divide evenly among the ranks that share it (FSDP2 cuts the first dimension)."""
    model, parallel = config.model, config.parallel
    kv_size = model.num_kv_heads * model.head_dim
    rows = (model.vocab_size, model.hidden_size, model.ffn_hidden_size, model.num_heads * model.head_dim, kv_size)
    parts = parallel.dp_shard_size * method.cp_size * parallel.tp_size
    return all(count % parts == 0 for count in rows)


def _kept_rows(layer: LayerAttention, blocks: Blocks) -> list[int]:
    """Rows whose attention is not computed again, of the ring block that every rank works on."""
    cut = layer.recompute_before or 0
    by_member = blocks.ring_rows_from(cut)
    return [by_member[blocks.grid.place(rank)[0]] for rank in range(blocks.grid.size)]


def _largest(by_layer: list[list[int]]) -> int:
    totals = [sum(of_rank) for of_rank in zip(*by_layer, strict=True)]
    return totals.index(max(totals))
