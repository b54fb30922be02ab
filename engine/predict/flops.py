"""FLOPs of a training step, the parameters behind them, MFU, and the seconds that it takes. Standard library only.

Per sequence of N tokens, with N_mat parameters that take part in matmuls (head included, embedding lookup not), and
P visible (query, key) pairs of the mask:

    forward    2 * N_mat * N           a multiplication and an addition per parameter and token
             + 4 * L * H * D * P       Q K^T and P V, 2 * D each per pair and query head (P: of the mean layer)
    backward   twice the forward       gradients of both operands of every matmul

Conventions differ by more than 2x between publications, so each figure carries the name of its own:

    model                  forward + backward, pairs counted exactly by the mask: basis of `mfu`
    model_full_attention   the same with P = N**2, as if nothing were masked: basis of `mfu_full_attention`
    hardware               model + what activation checkpointing computes again: basis of `hfu`

Not counted anywhere: norms, RoPE, softmax, the optimizer, and what a flash kernel recomputes inside its own backward.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.config.settings import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by what they do; a tied head counts under `head`, and its embedding is 0."""

    embedding: int
    layer_matmuls: int
    vectors: int  # norm gains and biases
    head: int

    @property
    def total(self) -> int:
        """Numbers that are stored and trained."""
        return self.embedding + self.layer_matmuls + self.vectors + self.head

    @property
    def matmul(self) -> int:
        """N_mat: parameters that every token is multiplied with."""
        return self.layer_matmuls + self.head


@dataclass(frozen=True)
class Flops:
    """FLOPs of one optimizer step over all ranks, in the three conventions of this module."""

    model: int
    model_full_attention: int
    hardware: int


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Parameters of `engine.model.llama.LlamaModel(model)`, without building it."""
    query_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * query_size + 2 * kv_size)
    mlp = 3 * model.hidden_size * model.ffn_hidden_size
    vocabulary = model.vocab_size * model.hidden_size
    gains = 2 * model.hidden_size + 2 * model.head_dim * model.qk_norm
    biases = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.qkv_bias
    return ParameterCount(
        embedding=0 if model.tie_embeddings else vocabulary,
        layer_matmuls=model.num_layers * (attention + mlp),
        vectors=model.num_layers * (gains + biases) + model.hidden_size,
        head=vocabulary,
    )


def attention_pairs(mask: Literal["causal", "full"], seq_len: int) -> int:
    """Visible (query, key) pairs of one sequence, exactly; the causal diagonal is visible."""
    return seq_len * (seq_len + 1) // 2 if mask == "causal" else seq_len * seq_len


def forward_flops(model: ModelConfig, *, tokens: int, pairs: int) -> int:
    """FLOPs of one forward pass over `tokens` tokens with `pairs` visible pairs per head, summed over layers."""
    return 2 * count_parameters(model).matmul * tokens + _attention_forward(model, pairs)


def step_flops(
    model: ModelConfig,
    *,
    seq_len: int,
    visible_pairs: int,
    sequences: int = 1,
    recomputed_matrices: int = 0,
    recomputed_pairs: int = 0,
) -> Flops:
    """FLOPs of one optimizer step over `sequences` sequences of `seq_len` tokens (all ranks, all micro-steps).

    `visible_pairs` are those that masks and documents let through, summed over layers and sequences. What backward
    computes again, parameters of matmuls (summed over layers) and pairs, depends on the checkpoint policies
    (`engine.predict.policy_cost`); of the head nothing: the loss computes its logits once.
    """
    tokens = seq_len * sequences
    forward = forward_flops(model, tokens=tokens, pairs=visible_pairs)
    every_pair = model.num_layers * sequences * attention_pairs("full", seq_len)
    again = 2 * recomputed_matrices * tokens + _attention_forward(model, recomputed_pairs)
    return Flops(
        model=3 * forward,
        model_full_attention=3 * forward_flops(model, tokens=tokens, pairs=every_pair),
        hardware=3 * forward + again,
    )


def mfu(flops: float, *, step_time_s: float, devices: int, peak_flops_per_s: float) -> float:
    """`flops` in `step_time_s` as a share of the peak of `devices` devices; the FLOPs given say which MFU it is."""
    return flops / (step_time_s * devices * peak_flops_per_s)


def _attention_forward(model: ModelConfig, pairs: int) -> int:
    return 4 * model.num_heads * model.head_dim * pairs


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step by what they are spent on; those that something hides are left out.

    attention_*        plans replayed: kernels and sums of the busiest rank; what messages add is `attention_exposed`
    matrices           projections and MLP, what a policy computes again too
    elementwise        norms, RoPE, SwiGLU, residual sums and those of weights' gradients over tiles, by the bytes that
                       they read and write
    loss               LM head and loss: the head's three products, and four passes over its logits
    weights            FSDP's gathers, two per micro-step
    gradients          their reduction, and between copies of the model (HSDP) one more
    tensor_parallel    gathers and scatters of rows inside layers
    offload            copies of activations and of weights on the host
    optimizer          AdamW over a rank's shards; of that on the host what computing does not hide
    overhead           of the host, per layer and step, beside starting kernels that a GPU is busy with
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
        """Their sum."""
        return math.fsum(asdict(self).values())


@dataclass(frozen=True)
class StepTime:
    """One optimizer step.

    tokens              of the step, over all ranks
    flops               of the step, over all ranks, pairs as the masks count them
    peak_flops_per_s    of a device, configured or published; None: nobody knows it
    """

    machine: str
    parts: StepParts
    tokens: int
    world_size: int
    flops: Flops
    peak_flops_per_s: float | None

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.parts.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput as publications give it."""
        return self.tokens / self.seconds / self.world_size

    @property
    def device_s_per_token(self) -> float:
        """What a token costs, however many devices work on it."""
        return self.seconds * self.world_size / self.tokens

    def mfu(self, flops: int) -> float | None:
        """FLOPs of this step as a share of the peak; those given say which MFU it is."""
        if self.peak_flops_per_s is None:
            return None
        return mfu(flops, step_time_s=self.seconds, devices=self.world_size, peak_flops_per_s=self.peak_flops_per_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; each MFU by the convention of its name, as in `metrics.jsonl`."""
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
