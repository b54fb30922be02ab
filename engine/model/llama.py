"""A Llama-style decoder on one device: unaware of parallelism, which comes in through `positions` and `attention`.

    tokens [B, T] -> embedding -> num_layers x TransformerBlock -> RMSNorm -> hidden [B, T, d] -> LMHead -> loss sum

Module names inside a block are those of Hugging Face's Llama, so that weights map by name. q, k and v are separate
matmuls: on the machines measured the fused ones gain nothing, and they would need a copy to take their gradients apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.settings import LossConfig, ModelConfig
from engine.loss.head import LMHead
from engine.model.dropout import Dropout, dropped
from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.linear import Linear
from engine.model.rope import apply_rope, rope_table

# q [B, T, H, D], k and v [B, T, K, D] -> out [B, T, H, D]; softmax scale 1 / sqrt(D); differentiable.
AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size], dtype of x."""
        return rms_norm(x, self.gain(), self.eps)

    def of_sum(self, branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(branch + residual, in branch's memory; that sum normed), both [..., size]."""
        return add_rms_norm(branch, residual, self.gain(), self.eps)

    def gain(self) -> Tensor:
        """[size]; tensor parallelism puts this rank's part of a DTensor in its place."""
        return self.weight


class SelfAttention(nn.Module):
    """What surrounds attention: q, k and v with RoPE before it, the output projection after; kv heads are never
    expanded.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, values: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D], k and v [B, T, K, D] from x [B, T, d]; cos, sin [T, D / 2].

        `values` False: for their gradients only, see `engine.model.linear`.
        """
        # One after the other: what is not rotated yet is freed as soon as it is.
        q = apply_rope(self._heads(self.q_proj, self.q_norm, x, values), cos, sin, values=values)
        k = apply_rope(self._heads(self.k_proj, self.k_norm, x, values), cos, sin, values=values)
        return q, k, self._heads(self.v_proj, None, x, values)

    def _heads(self, projection: Linear, norm: RMSNorm | None, x: Tensor, values: bool) -> Tensor:
        """[B, T, heads, D] before RoPE; the gradient of a norm needs what it norms."""
        projected: Tensor = projection(x, values or norm is not None)
        heads = projected.view(*x.shape[:2], -1, self.head_dim)
        return heads if norm is None else norm(heads)

    def combine(self, out: Tensor) -> Tensor:
        """[B, T, d] from what attention gave for every head, out [B, T, H, D]."""
        combined: Tensor = self.o_proj(out.flatten(2))
        return combined


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_hidden_size)
        self.up_proj = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down_proj = Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor, values: bool = True) -> Tensor:
        """[B, T, d] from x [B, T, d]; `values` False: for its gradients only."""
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)), values)
        return out


class TransformerBlock(nn.Module):
    """Pre-norm block: attention, then MLP, each added to the residual stream.

    Its two halves work row by row; only attention between them mixes rows. `index`: which layer of its model it is.
    """

    def __init__(self, config: ModelConfig, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn, dropout: Dropout | None = None
    ) -> Tensor:
        """[B, T, d] from hidden [B, T, d]; cos, sin [T, D / 2] of the rows' global positions; dropout of these rows."""
        return self.finish(hidden, attention(*self.project(hidden, cos, sin)), dropout=dropout)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, values: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D], k and v [B, T, K, D] of some rows, from hidden [B, T, d]; cos, sin [T, D / 2].

        `values` False: for their gradients only; what they hold is anything.
        """
        q, k, v = self.self_attn(self.input_layernorm(hidden), cos, sin, values)
        return q, k, v

    def finish(self, hidden: Tensor, out: Tensor, values: bool = True, dropout: Dropout | None = None) -> Tensor:
        """The layer's output [B, T, d] of some rows, from hidden [B, T, d] and attention's out [B, T, H, D].

        `values` False: for its gradients only; what it holds is anything.
        """
        # Added in place to the branch's own output, which no backward needs: one buffer per branch less.
        attended = self.self_attn.combine(out)
        if dropout is not None:
            attended = dropped(attended, dropout, 2 * self.index)
        hidden, normed = self.post_attention_layernorm.of_sum(attended, hidden)
        branch: Tensor = self.mlp(normed, values)
        if dropout is not None:
            branch = dropped(branch, dropout, 2 * self.index + 1)
        return branch.add_(hidden)


class LlamaModel(nn.Module):
    """The decoder. Build it on the meta device for large shapes, then `to_empty`, then `init_weights`."""

    def __init__(self, config: ModelConfig, loss: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TransformerBlock(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size, loss or LossConfig())
        self.activation_store: object = None  # where its layers keep what backward needs, once they are told
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionFn | Sequence[AttentionFn],
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Hidden states [B, T, d] after the final norm; tokens [B, T] int64, positions [T] int64 global.

        Row t of every sequence has position `positions[t]`, in whatever order the layout put the rows. `attention` is
        one function for all layers or one for each. `dropout` is of the rows that hidden has on this rank.
        """
        hidden: Tensor = self.embedding(tokens)
        shape = self.config
        cos, sin = rope_table(positions, shape.head_dim, shape.rope_theta, shape.rope_scaling)
        functions = attention if isinstance(attention, Sequence) else [attention] * len(self.layers)
        for layer, function in zip(self.layers, functions, strict=True):
            hidden = layer(hidden, cos, sin, function, dropout)
        normed: Tensor = self.norm(hidden)
        return normed

    def tie_weights(self) -> None:
        """Makes head and embedding one parameter if the config says so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LlamaModel:
        """As nn.Module's (`to`, `to_empty`, ...), which would leave two parameters where one was shared."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie_weights()
        return self
