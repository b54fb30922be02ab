"""FLOPs of a training step, parameter counts, MFU, and the parts of a step's time. Standard library only.

Per sequence of N tokens, with N_mat parameters that a token is multiplied with (head included, embedding lookup not; of
experts those that it is routed to) and P visible (query, key) pairs of the mask:

    forward    2 * N_mat * N           a multiplication and an addition per parameter and token
             + 2 * L * H * (D + Dv) * P    Q K^T and P V, per pair and query head (P: of the mean layer)
             + linear layers               products of the chunk rule (`delta_rule_flops`); no pairs
    backward   twice the forward       gradients of both operands of every matmul; of frozen weights (LoRA) of one

Conventions differ by more than 2x between publications, so each figure names its convention:

    model                  forward + backward, pairs counted exactly by the mask: basis of `mfu`
    model_full_attention   the same with P = N**2, as if nothing were masked: basis of `mfu_full_attention`
    hardware               model + recomputation of activation checkpointing: basis of `hfu`

Never counted: norms, RoPE, softmax, the optimizer, and what a flash kernel recomputes inside its backward.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.config.settings import ModelConfig

CHUNK_TOKENS = 64  # of the gated delta rule, in every library


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by use; a tied weight counts under `head`, and `embedding` is 0.

    active_layer_matmuls: those of `layer_matmuls` that one token is multiplied with.
    """

    embedding: int
    layer_matmuls: int
    active_layer_matmuls: int
    vectors: int  # norm gains and biases
    head: int

    @property
    def total(self) -> int:
        """All parameters of the model."""
        return self.embedding + self.layer_matmuls + self.vectors + self.head

    @property
    def matmul(self) -> int:
        """N_mat: parameters that every token is multiplied with."""
        return self.active_layer_matmuls + self.head


Shapes = tuple[tuple[int, int], ...]  # (inputs, outputs) of matrices


@dataclass(frozen=True)
class LayerShapes:
    """Shapes of the matrices of layers.

    Attributes:
        attention: Of attention, in a layer that has it.
        linear: Of a linear layer, in the place of these; without its convolution.
        dense: Of the feed-forward of a layer without experts.
        shared: In a layer with experts, what every token is multiplied with: the router and the shared experts.
        expert: Of one expert.
    """

    attention: Shapes
    linear: Shapes
    dense: Shapes
    shared: Shapes
    expert: Shapes


@dataclass(frozen=True)
class Flops:
    """FLOPs of one optimizer step over all ranks, in the three conventions of this module."""

    model: int
    model_full_attention: int
    hardware: int


def layer_shapes(model: ModelConfig) -> LayerShapes:
    """Return the shapes of the matrices of the layers."""
    hidden, heads, head_dim = model.hidden_size, model.num_heads, model.head_dim
    output = (heads * (model.v_head_dim or head_dim), hidden)
    if model.kv_lora_rank is None:
        queries = heads * head_dim * (1 + model.gated_attention)
        attention: Shapes = ((hidden, queries), (hidden, 2 * model.num_kv_heads * head_dim), output)
    else:
        attention = (*_latent_shapes(model), output)
    moe = model.num_moe_layers > 0
    return LayerShapes(
        attention=attention,
        linear=_linear_shapes(model),
        dense=_ffn_shapes(model, model.ffn_hidden_size),
        shared=_shared_shapes(model) if moe else (),
        expert=_ffn_shapes(model, model.expert_ffn_hidden_size) if moe else (),
    )


def _shared_shapes(model: ModelConfig) -> Shapes:
    gate = ((model.hidden_size, 1),) if model.gated_shared_expert else ()
    experts = _ffn_shapes(model, model.shared_expert_ffn_hidden_size)
    return ((model.hidden_size, model.num_experts), *experts, *gate)


def _linear_shapes(model: ModelConfig) -> Shapes:
    """Return the projections of a linear layer: Gated DeltaNet (arXiv:2412.06464), or the short convolution of LFM2."""
    linear, hidden = model.linear_layers, model.hidden_size
    if not linear.num_layers:
        return ()
    if not linear.num_value_heads:
        return (hidden, 3 * hidden), (hidden, hidden)
    values = linear.num_value_heads * linear.value_head_dim
    keys = linear.num_key_heads * linear.key_head_dim
    return (hidden, 2 * keys + 2 * values), (hidden, 2 * linear.num_value_heads), (values, hidden)


def conv_channels(model: ModelConfig) -> int:
    """Return the channels of the short convolution of a linear layer: q, k and v, or the hidden states."""
    linear = model.linear_layers
    if not linear.num_value_heads:
        return model.hidden_size if linear.num_layers else 0
    return 2 * linear.num_key_heads * linear.key_head_dim + linear.num_value_heads * linear.value_head_dim


def delta_rule_flops(model: ModelConfig) -> int:
    """Return the FLOPs per token of the products of the gated delta rule in one linear layer.

    In chunks of C rows, per head of the state [dk, dv]: three products with the state, of which two read it (W S and
    Q S) and one adds to it (K' U); between the rows of a chunk, of which each sees half, K K' and Q K' over dk, the
    solution of the triangular system for dk + dv columns, and the product of Q K' with dv columns.
    """
    linear = model.linear_layers
    keys, values = linear.key_head_dim, linear.value_head_dim
    within = CHUNK_TOKENS * (3 * keys + 2 * values)
    return linear.num_value_heads * (6 * keys * values + within)


def _latent_shapes(model: ModelConfig) -> Shapes:
    """Return the projections of latent attention (DeepSeek-V2, arXiv:2405.04434): down to the latent, up to heads."""
    assert model.kv_lora_rank is not None
    rope, queries = model.rope_head_dim or 0, model.num_heads * model.head_dim
    keys_and_values = model.num_heads * (model.head_dim - rope + (model.v_head_dim or model.head_dim))
    down_up = ((model.hidden_size, model.kv_lora_rank + rope), (model.kv_lora_rank, keys_and_values))
    if model.q_lora_rank is None:
        return ((model.hidden_size, queries), *down_up)
    return ((model.hidden_size, model.q_lora_rank), (model.q_lora_rank, queries), *down_up)


def _ffn_shapes(model: ModelConfig, width: int) -> Shapes:
    return ((model.hidden_size, width * (1 + model.gated_ffn)), (width, model.hidden_size)) if width else ()


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of the model without building it.

    Exact for `engine.model.llama.LlamaModel(model)`. With `implementation=hf` matrices are exact for families of a
    common pattern, and norms and biases beyond those of the settings are left out.
    """
    shapes, moe_layers, linear = layer_shapes(model), model.num_moe_layers, model.linear_layers
    common = (model.num_layers - linear.num_layers) * _numbers(shapes.attention)
    common += linear.num_layers * (_numbers(shapes.linear) + linear.conv_kernel * conv_channels(model))
    common += (model.num_layers - moe_layers) * _numbers(shapes.dense)
    common += moe_layers * _numbers(shapes.shared)
    experts = moe_layers * _numbers(shapes.expert)
    vocabulary = model.vocab_size * model.hidden_size
    attending = (model.num_layers - linear.num_layers) / model.num_layers
    gains = 2 * model.hidden_size + attending * 2 * model.head_dim * model.qk_norm
    biases = attending * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.qkv_bias
    return ParameterCount(
        embedding=0 if model.tie_embeddings else vocabulary,
        layer_matmuls=common + experts * model.num_experts,
        active_layer_matmuls=common + experts * model.experts_per_token,
        vectors=round(model.num_layers * (gains + biases)) + model.hidden_size,
        head=vocabulary,
    )


def ffn_rows(model: ModelConfig) -> float:
    """Return the elements per token of the tensors inside the feed-forward: gate, up and their product; the mean over
    layers, of experts those that a token is routed to.
    """
    routed = model.experts_per_token * model.expert_ffn_hidden_size + model.shared_expert_ffn_hidden_size
    dense = (model.num_layers - model.num_moe_layers) * model.ffn_hidden_size
    return (2 + model.gated_ffn) * (dense + model.num_moe_layers * routed) / model.num_layers


def _numbers(shapes: Shapes) -> int:
    return sum(inputs * outputs for inputs, outputs in shapes)


def attention_pairs(mask: Literal["causal", "full"], seq_len: int) -> int:
    """Return the visible (query, key) pairs of one sequence; the causal diagonal is visible."""
    return seq_len * (seq_len + 1) // 2 if mask == "causal" else seq_len * seq_len


def forward_flops(model: ModelConfig, *, tokens: int, pairs: int) -> int:
    """Return the FLOPs of a forward pass over `tokens` tokens with `pairs` visible pairs per head over all layers."""
    linear = model.linear_layers.num_layers * delta_rule_flops(model)
    return (2 * count_parameters(model).matmul + linear) * tokens + attention_flops(model, pairs)


def step_flops(
    model: ModelConfig,
    *,
    seq_len: int,
    visible_pairs: int,
    sequences: int = 1,
    recomputed_matrices: int = 0,
    recomputed_pairs: int = 0,
    recomputed_linear_layers: int = 0,
) -> Flops:
    """Return the FLOPs of one optimizer step over all ranks and micro-steps.

    Args:
        model: Shape.
        seq_len: Tokens per sequence.
        visible_pairs: Pairs that masks and documents leave visible, summed over layers and sequences.
        sequences: Of the step.
        recomputed_matrices: Parameters whose matmuls are recomputed in backward, summed over layers
            (`engine.predict.policy_cost`). The head is never recomputed.
        recomputed_pairs: Pairs recomputed in backward, summed over layers and sequences.
        recomputed_linear_layers: Linear layers that run again in backward.
    """
    tokens = seq_len * sequences
    forward = forward_flops(model, tokens=tokens, pairs=visible_pairs)
    every_pair = (model.num_layers - model.linear_layers.num_layers) * sequences * attention_pairs("full", seq_len)
    recomputed = (2 * recomputed_matrices + recomputed_linear_layers * delta_rule_flops(model)) * tokens
    recomputed += attention_flops(model, recomputed_pairs)
    frozen = 2 * count_parameters(model).matmul * tokens if model.lora.rank else 0  # gradients that nothing needs
    return Flops(
        model=3 * forward - frozen,
        model_full_attention=3 * forward_flops(model, tokens=tokens, pairs=every_pair) - frozen,
        hardware=3 * forward - frozen + recomputed,
    )


def mfu(flops: float, *, step_time_s: float, devices: int, peak_flops_per_s: float) -> float:
    """Return `flops` / `step_time_s` as a fraction of the peak of `devices` devices, 0 to 1."""
    return flops / (step_time_s * devices * peak_flops_per_s)


def attention_flops(model: ModelConfig, pairs: int) -> int:
    """Return the FLOPs of attention's forward pass over `pairs` visible pairs per head."""
    return 2 * model.num_heads * (model.head_dim + (model.v_head_dim or model.head_dim)) * pairs


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step by part; time that overlaps with another part is not counted.

    attention_*        replayed plans: kernels and sums of the busiest rank; exposed messages are `attention_exposed`
    matrices           projections and MLP, recomputation included
    elementwise        norms, RoPE, SwiGLU, residual sums, and sums of weight gradients over tiles, by memory traffic
    loss               LM head and loss: the head's three matmuls and four passes over its logits
    weights            FSDP's all-gathers, two per micro-step
    gradients          FSDP's reduce-scatters, and the all-reduce between replicas (HSDP)
    tensor_parallel    all-gathers and reduce-scatters of rows inside layers
    offload            copies of activations and weights to and from the host
    optimizer          AdamW over a rank's shards; if on the host, what computation does not hide
    overhead           of the host per layer and step, beyond kernel launches that a busy GPU hides
    """

    attention_forward: float
    attention_again: float
    attention_backward: float
    attention_exposed: float
    matrices: float
    elementwise: float
    loss: float
    weights: float
    gradients: float
    tensor_parallel: float
    offload: float
    optimizer: float
    overhead: float

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return math.fsum(asdict(self).values())


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one optimizer step.

    Attributes:
        machine: Name of the machine.
        parts: Seconds by part.
        tokens: Of the step, over all ranks.
        world_size: Ranks.
        flops: Of the step, over all ranks, with the pairs of the masks.
        peak_flops_per_s: Of a device, configured or published; None: unknown.
    """

    machine: str
    parts: StepParts
    tokens: int
    world_size: int
    flops: Flops
    peak_flops_per_s: float | None

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.parts.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput per device."""
        return self.tokens / self.seconds / self.world_size

    @property
    def device_s_per_token(self) -> float:
        """Device seconds per token, which compares runs on different numbers of devices."""
        return self.seconds * self.world_size / self.tokens

    def mfu(self, flops: int) -> float | None:
        """Return `flops` of this step as a fraction of the peak; None if the peak is unknown."""
        if self.peak_flops_per_s is None:
            return None
        return mfu(flops, step_time_s=self.seconds, devices=self.world_size, peak_flops_per_s=self.peak_flops_per_s)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the keys of metrics.jsonl for MFU."""
        return {
            "machine": self.machine,
            "seconds": self.seconds,
            "parts": asdict(self.parts),
            "tokens": self.tokens,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "mfu": self.mfu(self.flops.model),
            "mfu_full_attention": self.mfu(self.flops.model_full_attention),
            "hfu": self.mfu(self.flops.hardware),
        }
