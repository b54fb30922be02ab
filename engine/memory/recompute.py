"""What backward computes again under a run's policies: matrix products and attention. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.layers import LayerAttention
from engine.attention.presets import AttentionMethod
from engine.config import ModelConfig, RunConfig
from engine.flops import Recomputed
from engine.memory.policy import LayerPolicy, layer_policies
from engine.tiling import tile_tokens_of


def recomputed_by(config: RunConfig, method: AttentionMethod, turn: Sequence[LayerAttention]) -> Recomputed:
    """Of all layers, for one sequence; `turn`: attention of the layers in turn."""
    tiled = tile_tokens_of(config, method) is not None
    parameters = pairs = 0
    for index, policy in enumerate(layer_policies(config.memory, config.model.num_layers)):
        parameters += recomputed_parameters(policy, config.model, tiled=tiled, exchanged=method.head_parallel_size > 1)
        pairs += recomputed_pairs(turn[index % len(turn)])
    return Recomputed(parameters, pairs)


def recomputed_parameters(policy: LayerPolicy, model: ModelConfig, *, tiled: bool, exchanged: bool) -> int:
    """Parameters of one layer that every token is multiplied with again.

    The layer's last product, down_proj, is left out (`engine.model.linear`), but where the next layer's input follows
    from it. After a head exchange (`exchanged`) attention's results lie with other ranks: then that input asks for q,
    k and v once more.
    """
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    project = model.hidden_size * (query + 2 * kv)
    finish = model.hidden_size * (query + 2 * model.ffn_hidden_size)
    if policy.kind == "none":
        return finish if tiled else 0
    again = project + finish
    if policy.place < policy.group_size - 1:  # the chain of inputs
        again += finish + model.hidden_size * model.ffn_hidden_size + (project if exchanged else 0)
    return again


def recomputed_pairs(layer: LayerAttention) -> int:
    """Visible (query, key) pairs of one sequence that one layer attends again."""
    if not layer.recompute_before:
        return 0
    return layer.mask.queries_before(layer.recompute_before).num_pairs()
