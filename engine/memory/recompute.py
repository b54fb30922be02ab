"""What backward computes again under a run's policies: matrix products and attention. No torch."""

from __future__ import annotations

from engine.config.settings import ModelConfig, RunConfig
from engine.memory.policy import LayerPolicy, layer_policies
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.tiling import tile_tokens_of
from engine.planning.sequence.layers import attended_pairs, attention_layers
from engine.planning.time.flops import Flops, Recomputed, step_flops


def recomputed_matrices(config: RunConfig, method: AttentionMethod) -> int:
    """Parameters that every token is multiplied with again, all layers."""
    tiled, exchanged = tile_tokens_of(config, method) is not None, method.head_parallel_size > 1
    policies = layer_policies(config.memory, config.model.num_layers)
    return sum(recomputed_parameters(one, config.model, tiled=tiled, exchanged=exchanged) for one in policies)


def planned_flops(config: RunConfig, method: AttentionMethod, dp_size: int) -> Flops:
    """FLOPs of an optimizer step over all ranks as the masks count them: the most where packed documents hide pairs."""
    train = config.train
    sequences = dp_size * train.micro_batch_size * train.grad_accum_steps
    pairs = attended_pairs(attention_layers(config, method), config.model.num_layers, sequences=sequences)
    return step_flops(
        config.model,
        seq_len=train.seq_len,
        visible_pairs=pairs.visible,
        sequences=sequences,
        recomputed=Recomputed(recomputed_matrices(config, method), pairs.again),
    )


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
