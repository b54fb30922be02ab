"""Running a rank's two plans on tensors, and the autograd function around them; no state outside the autograd context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.arithmetic import AttentionShape, TensorArithmetic
from engine.attention.executor import Execution, Fields
from engine.attention.kernels.base import TileKernel
from engine.attention.merge import backward_stats
from engine.attention.plan import RankPlan
from engine.attention.transport import Transport


@dataclass(frozen=True)
class SavedAttention:
    """What backward needs, as the forward plan left it: of the own rows or, after a head exchange, of the ring's.

    q, k, v, out in the compute dtype; lse [T, H] in fp32 (float64). k and v are those that backward starts from: after a
    reversed ring the last block held.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class AttentionRuntime:
    """One rank's plans with what runs them; stateless between calls, so several micro-batches may be in flight."""

    forward: RankPlan
    backward: RankPlan
    kernel: TileKernel
    transport: Transport
    wire_gradient_dtype: torch.dtype = torch.float32
    poisoned: bool = False  # fill buffers with NaN first (tests)

    def arithmetic(self, q: Tensor, num_kv_heads: int) -> TensorArithmetic:
        """Arithmetic for q [T, H, D], all heads, and so many kv heads."""
        wire = torch.float64 if q.dtype == torch.float64 else self.wire_gradient_dtype
        shape = AttentionShape(q.shape[1], num_kv_heads, q.shape[2], q.dtype, q.device, wire)
        return TensorArithmetic(shape, self.kernel, poisoned=self.poisoned)

    def forward_execution(self, q: Tensor, k: Tensor, v: Tensor) -> Execution:
        """The forward pass over contiguous q [T, H, D], k and v [T, K, D], not yet run."""
        pinned = {"q": {"q": q}, "kv": {"k": k, "v": v}}
        return Execution(self.forward, self.arithmetic(q, k.shape[1]), self.transport, pinned)

    def collect(self, execution: Execution, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SavedAttention]:
        """(out [T, H, D], what to save) after the forward pass ran."""
        pins = self.forward.pins
        query = execution.pinned("ring_q")["q"] if "ring_q" in pins else q
        kv: Fields = {"k": k, "v": v}
        for name in ("ring_kv", "kv_last"):
            kv = execution.pinned(name) if name in pins else kv
        if "saved" in pins:
            saved = execution.pinned("saved")
            kept = SavedAttention(query, kv["k"], kv["v"], saved["out"], saved["lse"])
            return execution.pinned("out")["out"] if "out" in pins else saved["out"], kept
        acc = execution.pinned("acc")
        out = acc["out"].to(q.dtype)
        return out, SavedAttention(query, kv["k"], kv["v"], out, acc["lse"])

    def backward_execution(self, saved: SavedAttention, dout: Tensor, num_kv_heads: int | None = None) -> Execution:
        """The backward pass, not yet run; dout [T, H, D] of the own rows; `num_kv_heads` of all parts of the heads."""
        pins = self.backward.pins
        kv = {"k": saved.k, "v": saved.v}
        pinned: dict[str, Fields] = {name: kv for name in ("kv", "kv_last", "ring_kv") if name in pins}
        if "dout" in pins:
            pinned["dout"] = {"dout": dout}
            pinned["saved"] = {"out": saved.out, "lse": saved.lse}
            stats = torch.empty(*saved.lse.shape, 2, dtype=saved.lse.dtype, device=dout.device)
            ring_dout = torch.empty_like(saved.q)
        else:
            stats, ring_dout = backward_stats(dout, saved.out, saved.lse), dout
        pinned["qx"] = {"q": saved.q, "dout": ring_dout, "out": saved.out, "stats": stats}
        return Execution(self.backward, self.arithmetic(dout, num_kv_heads or saved.k.shape[1]), self.transport, pinned)


class _Attention(torch.autograd.Function):
    """Runs the two plans; every piece of state lives in the autograd context."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runtime: AttentionRuntime) -> Tensor:
        execution = runtime.forward_execution(q, k, v)
        execution.run()
        out, saved = runtime.collect(execution, q, k, v)
        ctx.save_for_backward(saved.q, saved.k, saved.v, saved.out, saved.lse)
        ctx.runtime, ctx.num_kv_heads = runtime, k.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = SavedAttention(*ctx.saved_tensors)
        execution = ctx.runtime.backward_execution(saved, grad_outputs[0].contiguous(), ctx.num_kv_heads)
        execution.run()
        dkv = execution.pinned("dkv")["dkv"].to(saved.k.dtype)
        return execution.pinned("dq")["dq"].to(saved.q.dtype), dkv[:, 0], dkv[:, 1], None


def run_attention(q: Tensor, k: Tensor, v: Tensor, runtime: AttentionRuntime) -> Tensor:
    """out [B, T, H, D] of q [B, T, H, D], k and v [B, T, K, D]; sequences of a batch are folded into the heads."""
    batch = q.shape[0]
    folded = [_fold(x) for x in (q, k, v)]
    out: Tensor = _Attention.apply(*folded, runtime)  # type: ignore[no-untyped-call]
    return out.view(out.shape[0], batch, -1, out.shape[2]).transpose(0, 1)


def _fold(x: Tensor) -> Tensor:
    """[B, T, heads, D] -> [T, B*heads, D]; a view when B is 1. Query head h of sequence b still meets its own kv
    head.
    """
    return x.transpose(0, 1).flatten(1, 2).contiguous()
