"""The autograd function of attention whose keys and values travel as latents (see `engine.attention.latent`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.latent import LatentExpansion, LatentHeads
from engine.attention.runtime import (
    AttentionRuntime,
    KvOperand,
    SavedAttention,
    fold_sequences,
    fold_sinks,
    unfold_sequences,
)
from engine.attention.sinks import SinkGradients
from engine.device.row_blocks import accumulate_dtype


class _LatentAttention(torch.autograd.Function):
    """Runs the two plans on latents; every piece of state lives in the autograd context."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latents: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        runtime: AttentionRuntime,
        heads: LatentHeads,
    ) -> Tensor:
        expansion = LatentExpansion(heads, weight, bias, q.dtype, sequences=latents.shape[1])
        kv = KvOperand.compressed(latents, expansion)
        execution = runtime.execution(runtime.forward, q, kv, sinks=sinks)
        execution.run()
        out, saved = runtime.collect_of(execution, q, kv.fields)
        ctx.save_for_backward(saved.q, saved.kv["latent"], saved.out, saved.lse, weight, bias, sinks)
        ctx.runtime, ctx.heads = runtime, heads
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (q, latents, out, lse, weight, bias, sinks), (dout,) = ctx.saved_tensors, grad_outputs
        trains = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        expansion = LatentExpansion(ctx.heads, weight, bias, q.dtype, sequences=latents.shape[1], trains=trains)
        saved = SavedAttention(q, {"latent": latents}, out, lse)
        sink_gradients = SinkGradients(sinks) if ctx.needs_input_grad[4] else None
        backward = LatentBackward(ctx.runtime, saved, dout.contiguous(), expansion, sink_gradients)
        backward.execution.run()
        dq, dlatent = backward.gradients()
        return (
            dq.to(dout.dtype),
            dlatent.to(dout.dtype),
            expansion.weight_gradient if ctx.needs_input_grad[2] else None,
            expansion.bias_gradient if ctx.needs_input_grad[3] else None,
            None if sink_gradients is None else sink_gradients.total,
            None,
            None,
        )


class LatentBackward:
    """The backward pass of attention whose forward pass moved latents.

    Where keys and values move, latents and their gradients do. Where queries move, k and v stay: the own ones are
    expanded once, and their gradients are complete when the pass has run.

    Attributes:
        execution: Not yet run; collective.
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        saved: SavedAttention,
        dout: Tensor,
        expansion: LatentExpansion,
        sink_gradients: SinkGradients | None = None,
    ) -> None:
        """Make it ready to run.

        Args:
            runtime: Of the forward pass.
            saved: Its results, with `latent`.
            dout: [T, H, v_dim], contiguous.
            expansion: Sums the gradients of its weight.
            sink_gradients: Of learnable sinks, if there are some.
        """
        self._runtime, self._expansion, self._sink_gradients = runtime, expansion, sink_gradients
        self._latents = saved.kv["latent"]
        self._moves = runtime.kv_moves_backward
        if not self._moves:
            saved = SavedAttention(saved.q, expansion.expand(self._latents), saved.out, saved.lse)
        self._saved = saved
        self.execution = runtime.backward_execution(
            saved, dout, sink_gradients=sink_gradients, expansion=expansion if self._moves else None
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """dq [T, H, qk_dim] and that of latents [T, sequences, rank + rope_dim], once, after the pass ran."""
        if self._sink_gradients is not None:
            self._runtime.add_sink_gradients(self.execution, self._saved, self._sink_gradients)
        dq, dkv = self.execution.argument("dq")["dq"], self.execution.argument("dkv")
        if self._moves:
            return dq, dkv["dlatent"]
        dlatent = torch.zeros_like(self._latents, dtype=accumulate_dtype(self._latents.dtype))
        self._expansion.add_gradients(dlatent, self._latents, dkv["dk"], dkv["dv"])
        return dq, dlatent


def run_latent_attention(
    q: Tensor,
    latents: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    runtime: AttentionRuntime,
    heads: LatentHeads,
    sinks: Tensor | None = None,
) -> Tensor:
    """out [B, T, H, v_dim]; as `run_attention`, of latents.

    Args:
        q: [B, T, H, qk_dim].
        latents: [B, T, rank + rope_dim]: c, and the key that all heads share.
        weight: [K * (nope_dim + v_dim), rank] of any floating dtype.
        bias: [K * (nope_dim + v_dim)], or None.
        runtime: Plans without a head exchange or chunks.
        heads: What the latents are expanded to.
        sinks: [H]; None: there are none.

    The gradients of weight, bias and sinks are this rank's shares.
    """
    folded, by_row = fold_sequences(q), latents.transpose(0, 1).contiguous()
    out: Tensor = _LatentAttention.apply(  # type: ignore[no-untyped-call]
        folded, by_row, weight, bias, fold_sinks(sinks, q), runtime, heads
    )
    return unfold_sequences(out, q.shape[0])
