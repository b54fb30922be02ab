"""A Llama-style decoder, written for one device. Parallelism comes in through `positions` and `attention` alone.

    tokens [B, T] -> embedding -> num_layers x TransformerBlock -> RMSNorm -> hidden [B, T, d] -> LMHead -> loss sum

Notable choices: pre-norm with RMSNorm, RoPE, grouped-query attention, SwiGLU, optional q/k norm and qkv bias (Qwen).
Module names inside a block are those of Hugging Face's Llama, so that weights map by name. q, k and v are separate
matmuls: on the machines measured a fused one gains nothing, and splitting its gradient would need a copy.

Dimensions: B sequences, T local rows (tokens) of each, d hidden size, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.config.settings import LossConfig, ModelConfig
from engine.loss.head import LMHead
from engine.model.decoder import AttentionFn, Decoder, Initial, Routing
from engine.model.dropout import Dropout, dropped
from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.linear import Linear
from engine.model.rope import apply_rope, rope_table
from engine.model.weights import load_weights


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned gain (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * gain, [..., size] in the dtype of x; statistics in fp32."""
        return rms_norm(x, self.gain(), self.eps)

    def of_sum(self, branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return branch + residual, written over `branch`, and its norm, both [..., size]."""
        return add_rms_norm(branch, residual, self.gain(), self.eps)

    def gain(self) -> Tensor:
        """Return the gain, [size]. Tensor parallelism replaces this method to return a DTensor's local part."""
        return self.weight


class SelfAttention(nn.Module):
    """The projections around attention: q, k and v with RoPE before it, the output projection after it.

    Attention itself is a function of the caller. kv heads are never repeated to match the query heads.
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
        """Return q [B, T, H, D], k and v [B, T, K, D] of x [B, T, d].

        Args:
            x: Normed hidden states, [B, T, d].
            cos, sin: Rotary tables of the rows' global positions, [T, D / 2] fp32.
            values: False skips the matmuls whose values are not needed for gradients (`engine.model.linear`).
        """
        # One projection after another, so that q before its rotation is freed before k is computed.
        q = apply_rope(self._heads(self.q_proj, self.q_norm, x, values), cos, sin, values=values)
        k = apply_rope(self._heads(self.k_proj, self.k_norm, x, values), cos, sin, values=values)
        return q, k, self._heads(self.v_proj, None, x, values)

    def _heads(self, projection: Linear, norm: RMSNorm | None, x: Tensor, values: bool) -> Tensor:
        """Return the projection of x split into heads and normed, before RoPE, [B, T, heads, D]."""
        projected: Tensor = projection(x, values or norm is not None)  # the gradient of a norm needs its input
        heads = projected.view(*x.shape[:2], -1, self.head_dim)  # [B, T, heads * D] -> [B, T, heads, D]
        return heads if norm is None else norm(heads)

    def combine(self, out: Tensor) -> Tensor:
        """Return the output projection, [B, T, d], of attention's out [B, T, H, D]."""
        combined: Tensor = self.o_proj(out.flatten(2))  # [B, T, H, D] -> [B, T, H * D] -> [B, T, d]
        return combined


class MLP(nn.Module):
    """SwiGLU feed-forward network (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_hidden_size)
        self.up_proj = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down_proj = Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor, values: bool = True) -> Tensor:
        """Return [B, T, d] for x [B, T, d]; `values` False skips the last matmul (`engine.model.linear`)."""
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)), values)
        return out


class TransformerBlock(nn.Module):
    """Pre-norm block: attention, then MLP, each added to the residual stream.

    `project` (before attention) and `finish` (after it) work row by row; only attention mixes rows. So the two can be
    compiled, tiled and recomputed on their own. `index` is the layer's number in the model, for dropout.
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
        """Return the block's output, [B, T, d].

        Args:
            hidden: Residual stream of the local rows, [B, T, d].
            cos, sin: Rotary tables of the rows' global positions, [T, D / 2] fp32.
            attention: See `AttentionFn`; may communicate over the cp group.
            dropout: Dropout of these rows, or None.
        """
        return self.finish(hidden, attention(*self.project(hidden, cos, sin)), dropout=dropout)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, values: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H, D], k and v [B, T, K, D] of hidden [B, T, d], which may be a tile of the rows.

        `values` False: the results are uninitialised but have correct gradients.
        """
        q, k, v = self.self_attn(self.input_layernorm(hidden), cos, sin, values)
        return q, k, v

    def finish(self, hidden: Tensor, out: Tensor, values: bool = True, dropout: Dropout | None = None) -> Tensor:
        """Return the block's output [B, T, d] for hidden [B, T, d] and attention's out [B, T, H, D], or a tile of them.

        `values` False: the result is uninitialised but has correct gradients.
        """
        # Residual additions write into the branch's output, which no backward pass needs: one buffer less per branch.
        attended = self.self_attn.combine(out)
        if dropout is not None:
            attended = dropped(attended, dropout, 2 * self.index)  # branches are numbered 2i (attention), 2i + 1 (MLP)
        hidden, normed = self.post_attention_layernorm.of_sum(attended, hidden)
        branch: Tensor = self.mlp(normed, values)
        if dropout is not None:
            branch = dropped(branch, dropout, 2 * self.index + 1)
        return branch.add_(hidden)


class LlamaModel(Decoder):
    """The decoder. For large shapes build it on the meta device, then call `to_empty` and `init_weights`."""

    def __init__(self, config: ModelConfig, loss: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TransformerBlock(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size, loss or LossConfig())
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionFn | Sequence[AttentionFn],
        dropout: Dropout | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """See `Decoder`; it has no routers."""
        hidden: Tensor = self.embedding(tokens)
        shape = self.config
        cos, sin = rope_table(positions, shape.head_dim, shape.rope_theta, shape.rope_scaling)
        functions = attention if isinstance(attention, Sequence) else [attention] * len(self.layers)
        for layer, function in zip(self.layers, functions, strict=True):
            hidden = layer(hidden, cos, sin, function, dropout)
        normed: Tensor = self.norm(hidden)
        return normed

    def initial(self, name: str) -> Initial:
        """Norm gains are 1, biases 0, all matrices and the embedding normal with std `init_std`.

        o_proj and down_proj, which write to the residual stream, have init_std / sqrt(2 * num_layers), so that its
        variance does not grow with depth (GPT-2, Radford et al. 2019).
        """
        if name.endswith(".bias"):
            return Initial(0.0, 0.0)
        if "norm" in name:
            return Initial(1.0, 0.0)
        std = self.config.init_std
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * self.config.num_layers)
        return Initial(0.0, std)

    def load(self, folder: Path) -> frozenset[str]:
        """See `Decoder`."""
        load_weights(self, folder)
        return frozenset(name for name, _ in self.named_parameters())
