"""Exact costs of a checkpoint policy: bytes saved and moved, FLOPs recomputed. No torch.

Bytes per layer and rank in a 16-bit compute dtype, for T tokens, width d and H heads with H * D = d (memory of
Chen et al. 2016, Gu et al. 2024 and Sun et al. 2025):

    full              2 T d
    attn_out          4 T d + 4 T H
    seq_fraction      2 T d + rho (2 T d + 4 T H)
    attn_out_every    2 T d + 4 T H, and 2 T d in every k-th layer

Other memory of a rank is not counted here: `engine.training.fake_run.memory` runs the step.
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
from engine.predict.flops import Flops, attention_flops, conv_channels, count_parameters, ffn_rows, step_flops
from engine.predict.trained import trained_parameters

_WIDE_BYTES = 4  # master weights, gradients, attention's log-sum-exp
_INT8_MOMENT_BYTES = 1  # and a scale per 256 of them


@dataclass(frozen=True)
class PolicyCost:
    """The cost of a checkpoint policy over all layers of a step.

    Attributes:
        layer_bytes: Bytes that each layer saves per micro-step on the rank that saves most.
        layer_matrices: Parameters of each layer whose matmuls are recomputed in backward, outside attention.
        least: Lower bound of the (device, host) bytes at the end of a forward pass: weights, optimizer states and saved
            activations.
        moved_bytes: Bytes copied between device and host per rank and optimizer step, both directions together.
        flops: FLOPs of an optimizer step over all ranks, with the pairs of the masks: an upper bound if packed
            documents hide some.
        attention_flops: The part of `flops` that recomputes attention.
    """

    layer_bytes: tuple[int, ...]
    layer_matrices: tuple[int, ...]
    least: tuple[int, int]
    moved_bytes: int
    flops: Flops
    attention_flops: int

    @property
    def saved_bytes(self) -> int:
        """Bytes saved on one rank at the end of a forward pass."""
        return sum(self.layer_bytes)

    @property
    def recompute_flops(self) -> int:
        """FLOPs of recomputation in one optimizer step, over all ranks."""
        return self.flops.hardware - self.flops.model

    @property
    def linear_flops(self) -> int:
        """FLOPs of recomputation outside attention."""
        return self.recompute_flops - self.attention_flops


def layers_on_host(config: RunConfig, method: AttentionMethod) -> int:
    """Return how many layers, from the first, save to host memory.

    The first ones, because backward reaches them last: by then the later layers have freed their device memory.

    Raises:
        ConfigError: memory.host_layers is set although attention leaves the results of all layers on the host.
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


def saved_bytes(
    policy: LayerPolicy,
    config: RunConfig,
    method: AttentionMethod,
    saved_rows: float = 0.0,
    *,
    tiled: bool = False,
    attends: bool = True,
) -> int:
    """Return the bytes that one layer saves on one rank.

    Args:
        policy: Of the layer.
        config: Shape, dtypes and batch.
        method: Of attention.
        saved_rows: Rows whose attention results are saved under seq_fraction.
        tiled: Whether the layer runs in tiles.
        attends: Whether the layer has attention; a linear layer has no results to save.
    """
    model, tp_size = config.model, config.parallel.tp_size
    element = BYTES_OF[config.train.compute_dtype]
    # Rows inside attention and MLP, of all sequences of a micro-batch.
    padded = padded_length(config.train.seq_len, method.cp_size, tp_size)
    rows = -(-padded // method.cp_size) * config.train.micro_batch_size
    hidden = rows // tp_size * model.hidden_size * element  # between the layers a rank has T / tp rows
    v_dim = model.v_head_dim or model.head_dim
    result_row = model.num_heads // tp_size * (v_dim * element + _WIDE_BYTES)  # out and lse
    if policy.kind == "full" or (policy.kind != "none" and not attends):
        return hidden
    if policy.kind == "attn_out_every":
        return rows * result_row + hidden * policy.saves_input
    if policy.kind != "none":
        return hidden + round((rows if policy.kind == "attn_out" else saved_rows) * result_row)
    # Tiled layers recompute all but attention whatever the policy, so they save attention's tensors only.
    kv_heads = model.num_kv_heads * max(1, method.head_parallel_size * tp_size // model.num_kv_heads)
    projected = model.num_heads * model.head_dim + kv_heads * (model.head_dim + v_dim)
    if not attends:  # inputs and results of convolution and rule, which computes in fp32
        linear = model.linear_layers
        projected = 2 * conv_channels(model) + 2 * linear.num_value_heads * linear.value_head_dim
        result_row = _WIDE_BYTES * conv_channels(model) * (linear.num_value_heads > 0)
    inputs = hidden + rows * (projected // tp_size * element + result_row)
    if tiled:
        return inputs
    # Outputs of both norms, the residual stream between (a norm saves one fp32 per row), gate, up and their product.
    # Inputs of tensor-parallel matrices are gathered, so they have T rows.
    inside = round(rows * (2 * model.hidden_size + ffn_rows(model) / tp_size) * element)
    return inputs + inside + hidden + 2 * _WIDE_BYTES * (rows // tp_size)


def rank_parameters(config: RunConfig, method: AttentionMethod) -> int:
    """Return the parameters that one rank holds and updates: all, divided by the ranks that share them."""
    parallel = config.parallel
    return count_parameters(config.model).total // (parallel.tp_size * parallel.dp_shard_size * method.cp_size)


def rank_trained(config: RunConfig, method: AttentionMethod) -> int:
    """Return the parameters that one rank updates."""
    parallel = config.parallel
    return trained_parameters(config.model) // (parallel.tp_size * parallel.dp_shard_size * method.cp_size)


def state_bytes(memory: MemoryConfig, parameters: int, trained: int | None = None, *, gradients: bool = True) -> int:
    """Return the bytes of fp32 master weights, and of AdamW's moments and fp32 gradients of those that are trained.

    With optimizer_in_backward gradients exist for one layer at a time and are not counted.

    Args:
        memory: Dtype of the moments, and when weights are updated.
        parameters: All that are held.
        trained: Those that are not frozen; None: all.
        gradients: Whether gradients count.
    """
    moment = _INT8_MOMENT_BYTES if memory.moments_dtype == "int8" else _WIDE_BYTES
    gradient = _WIDE_BYTES if gradients and not memory.optimizer_in_backward else 0
    return parameters * _WIDE_BYTES + (parameters if trained is None else trained) * (gradient + 2 * moment)


def policy_cost(config: RunConfig, method: AttentionMethod) -> PolicyCost:
    """Return the cost of the configured policy; `memory=auto` must have been resolved."""
    model, memory, micro_steps = config.model, config.memory, config.train.grad_accum_steps
    layer_pattern = attention_layers(config, method)
    kept, matrices = zip(*_layer_costs(config, method, layer_pattern), strict=True)
    on_host = sum(kept[: layers_on_host(config, method)])
    on_device = sum(kept) - on_host
    numbers, moved = rank_parameters(config, method), 2 * micro_steps * on_host
    trained = rank_trained(config, method)
    states = state_bytes(memory, numbers, trained, gradients=False)
    if memory.optimizer_store == "host":  # per micro-step weights are copied to the device twice, gradients back once
        moved += micro_steps * _WIDE_BYTES * (2 * numbers + trained)
    offloads = memory.optimizer_store == "host" and config.cluster.backend != "gloo"
    sequences = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
    sequences *= config.train.micro_batch_size * micro_steps
    pairs = attended_pairs(layer_pattern, model.num_layers, sequences=sequences)
    again = [
        layer_pattern[index % len(layer_pattern)]
        for index, policy in enumerate(layer_policies(memory, model.num_layers))
        if policy.kind != "none"
    ]
    flops = step_flops(
        model,
        seq_len=config.train.seq_len,
        visible_pairs=pairs.visible,
        sequences=sequences,
        recomputed_matrices=sum(matrices),
        recomputed_pairs=pairs.again,
        recomputed_linear_layers=sum(not layer.attends for layer in again),
    )
    least = (on_device, on_host + states) if offloads else (on_device + states, on_host)
    return PolicyCost(kept, matrices, least, moved, flops, attention_flops(model, pairs.again))


def _layer_costs(
    config: RunConfig, method: AttentionMethod, layer_pattern: tuple[LayerAttention, ...]
) -> Iterator[tuple[int, int]]:
    """Yield the saved bytes and recomputed parameters of every layer; attention repeats `layer_pattern`."""
    blocks = divide_run(config, method, layer_pattern)
    # Head-parallel ranks save an equal part each.
    kept = {
        layer: max(blocks.ring_rows_from(layer.recompute_before or 0)) / blocks.grid.heads
        for layer in set(layer_pattern)
    }
    tiled, exchanged = tile_tokens_of(config, method) is not None, method.head_parallel_size > 1
    for index, policy in enumerate(layer_policies(config.memory, config.model.num_layers)):
        layer = layer_pattern[index % len(layer_pattern)]
        rows = config.train.micro_batch_size * kept[layer]
        recomputed = recomputed_parameters(policy, config.model, tiled=tiled, exchanged=exchanged)
        yield saved_bytes(policy, config, method, rows, tiled=tiled, attends=layer.attends), recomputed


def recomputed_parameters(policy: LayerPolicy, model: ModelConfig, *, tiled: bool, exchanged: bool) -> int:
    """Return the parameters of one layer whose matmuls are recomputed in backward.

    The last matmul, down_proj, is skipped (`engine.model.linear`), unless the next layer's input is recomputed from it
    (attn_out_every). After a head exchange that needs q, k and v again, because attention's saved results are those of
    other rows. With `implementation=hf` layers are recomputed as a whole, and the mean one is returned.

    Args:
        policy: Of the layer.
        model: Shape.
        tiled: Whether the layer runs in tiles.
        exchanged: Whether attention exchanges heads.
    """
    if model.implementation == "hf":
        return 0 if policy.kind == "none" else count_parameters(model).active_layer_matmuls // model.num_layers
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    project = model.hidden_size * (query + 2 * kv)
    finish = model.hidden_size * (query + 2 * model.ffn_hidden_size)
    if policy.kind == "none":
        return finish if tiled else 0
    recomputed = project + finish
    if policy.index < policy.group_size - 1:  # the next layer's input is recomputed from this layer
        recomputed += finish + model.hidden_size * model.ffn_hidden_size + (project if exchanged else 0)
    return recomputed
