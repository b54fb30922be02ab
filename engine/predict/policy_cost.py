"""What a checkpoint policy keeps, computes again and moves: exact counts, without torch.

Bytes per layer and rank in a 16-bit compute dtype, for T tokens, width d and H heads with H * D = d (memory of
Chen et al. 2016, Gu et al. 2024 and Sun et al. 2025):

    full              2 T d
    attn_out          4 T d + 4 T H
    seq_fraction      2 T d + rho (2 T d + 4 T H)
    attn_out_every    2 T d + 4 T H, and 2 T d in every k-th layer

Of what else a rank needs nothing is reckoned here: `engine.training.fake_run.memory` runs the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, ModelConfig, RunConfig
from engine.planning.checkpoint_policy import LayerPolicy, layer_policies
from engine.planning.methods.blocks import divide_run
from engine.planning.methods.layers import LayerAttention, attended_pairs, attention_layers
from engine.planning.methods.presets import BYTES_OF, AttentionMethod, tile_tokens_of
from engine.planning.topology import padded_length
from engine.predict.flops import Flops, count_parameters, step_flops

_WIDE_BYTES = 4  # master weights, gradients, attention's log-sum-exp
_INT8_MOMENT_BYTES = 1  # and a scale per 256 of them


@dataclass(frozen=True)
class PolicyCost:
    """A checkpoint policy over all layers of a step.

    layer_bytes       that every layer keeps on one rank (on the one that keeps most), per micro-step
    layer_matrices    parameters of every layer that backward multiplies every token with again, outside attention
    least             (device, host) bytes that a rank has at the end of a forward pass, whatever else it needs:
                      weights, optimizer states and what the layers keep
    moved_bytes       between the device of one rank and host memory in one optimizer step, both directions
    flops             of an optimizer step over all ranks, pairs as the masks count them: the most where packed
                      documents hide some
    attention_flops   of `flops`, those of attention that is computed again
    """

    layer_bytes: tuple[int, ...]
    layer_matrices: tuple[int, ...]
    least: tuple[int, int]
    moved_bytes: int
    flops: Flops
    attention_flops: int

    @property
    def kept_bytes(self) -> int:
        """Of one rank at the end of a forward pass."""
        return sum(self.layer_bytes)

    @property
    def recompute_flops(self) -> int:
        """All that is computed again in one optimizer step, over all ranks."""
        return self.flops.hardware - self.flops.model

    @property
    def linear_flops(self) -> int:
        """Of these, those outside attention."""
        return self.recompute_flops - self.attention_flops


def layers_on_host(config: RunConfig, method: AttentionMethod) -> int:
    """How many layers, the first ones, keep what they keep in host memory: there as configured, else beside the chunks
    of attention.

    Backward ends with the first layers: the device is emptier with every layer until then. Raises ConfigError where
    memory.host_layers cannot be had.
    """
    layers, chosen = config.model.num_layers, config.memory.host_layers
    if chosen is not None and method.chunk_store == "host":
        raise ConfigError(
            f"memory.host_layers={chosen}: attention leaves its results in host memory (attention.chunk_store=host), "
            "those of all layers; set memory.host_layers=null, or attention.chunk_store=device"
        )
    if (config.memory.activation_store or method.chunk_store) != "host":
        return 0
    return layers if chosen is None else min(layers, chosen)


def kept_bytes(
    policy: LayerPolicy, config: RunConfig, method: AttentionMethod, kept_rows: float = 0.0, *, tiled: bool = False
) -> int:
    """Bytes that one layer keeps on one rank; `kept_rows` tokens have attention's results kept under seq_fraction."""
    model, tp_size = config.model, config.parallel.tp_size
    element = BYTES_OF[config.train.compute_dtype]
    # Inside attention and MLP; the sequences of a micro-batch count as more tokens.
    padded = padded_length(config.train.seq_len, method.cp_size, tp_size)
    rows = -(-padded // method.cp_size) * config.train.micro_batch_size
    hidden = rows // tp_size * model.hidden_size * element  # between the layers a rank has T / tp rows
    result_row = model.num_heads // tp_size * (model.head_dim * element + _WIDE_BYTES)  # out and lse
    if policy.kind == "full":
        return hidden
    if policy.kind == "attn_out_every":
        return rows * result_row + hidden * policy.keeps_input
    if policy.kind != "none":
        return hidden + round((rows if policy.kind == "attn_out" else kept_rows) * result_row)
    # Tiled layers compute all but attention again whatever the policy: they keep what attention saves.
    kv_heads = model.num_kv_heads * max(1, method.head_parallel_size * tp_size // model.num_kv_heads)
    inputs = hidden + rows * ((model.num_heads + 2 * kv_heads) // tp_size * model.head_dim * element + result_row)
    if tiled:
        return inputs
    # Both norms' results, the stream between (a norm keeps one fp32 number per row), gate, up and product; inputs of
    # sliced matrices are gathered, so they have T rows.
    inside = rows * (2 * model.hidden_size + 3 * model.ffn_hidden_size // tp_size) * element
    return inputs + inside + hidden + 2 * _WIDE_BYTES * (rows // tp_size)


def own_parameters(config: RunConfig, method: AttentionMethod) -> int:
    """Parameters that one rank holds and updates: all, over the ranks that share them."""
    parallel = config.parallel
    return count_parameters(config.model).total // (parallel.tp_size * parallel.dp_shard_size * method.cp_size)


def state_bytes(memory: MemoryConfig, parameters: int, *, gradients: bool = True) -> int:
    """fp32 master weights, AdamW's two moments and fp32 gradients of so many parameters; inside backward gradients
    come and go one layer at a time.
    """
    moment = _INT8_MOMENT_BYTES if memory.moments_dtype == "int8" else _WIDE_BYTES
    gradient = _WIDE_BYTES if gradients and not memory.optimizer_in_backward else 0
    return parameters * (_WIDE_BYTES + gradient + 2 * moment)


def policy_cost(config: RunConfig, method: AttentionMethod) -> PolicyCost:
    """The cost of the configured policy. `memory=auto` must have been resolved."""
    model, memory, micro_steps = config.model, config.memory, config.train.grad_accum_steps
    layer_pattern = attention_layers(config, method)
    kept, matrices = zip(*_layer_costs(config, method, layer_pattern), strict=True)
    on_host = sum(kept[: layers_on_host(config, method)])
    on_device = sum(kept) - on_host
    numbers, moved = own_parameters(config, method), 2 * micro_steps * on_host
    states = state_bytes(memory, numbers, gradients=False)
    if memory.optimizer_store == "host":  # weights go up for every pass, gradients down
        moved += 3 * micro_steps * _WIDE_BYTES * numbers
    offloads = memory.optimizer_store == "host" and config.cluster.backend != "gloo"
    sequences = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
    sequences *= config.train.micro_batch_size * micro_steps
    pairs = attended_pairs(layer_pattern, model.num_layers, sequences=sequences)
    flops = step_flops(
        model,
        seq_len=config.train.seq_len,
        visible_pairs=pairs.visible,
        sequences=sequences,
        recomputed_matrices=sum(matrices),
        recomputed_pairs=pairs.again,
    )
    least = (on_device, on_host + states) if offloads else (on_device + states, on_host)
    return PolicyCost(kept, matrices, least, moved, flops, 4 * model.num_heads * model.head_dim * pairs.again)


def _layer_costs(
    config: RunConfig, method: AttentionMethod, layer_pattern: tuple[LayerAttention, ...]
) -> Iterator[tuple[int, int]]:
    """(bytes that it keeps, parameters that it multiplies with again) of every layer, whose attention is that of `turn`
    in turn.
    """
    blocks = divide_run(config, method, layer_pattern)
    # Head parallel ranks keep an equal part each.
    kept = {
        one: max(blocks.ring_rows_from(one.recompute_before or 0)) / blocks.grid.heads for one in set(layer_pattern)
    }
    tiled, exchanged = tile_tokens_of(config, method) is not None, method.head_parallel_size > 1
    for index, policy in enumerate(layer_policies(config.memory, config.model.num_layers)):
        rows = config.train.micro_batch_size * kept[layer_pattern[index % len(layer_pattern)]]
        again = recomputed_parameters(policy, config.model, tiled=tiled, exchanged=exchanged)
        yield kept_bytes(policy, config, method, rows, tiled=tiled), again


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
