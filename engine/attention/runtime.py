"""Running a rank's two plans on tensors, and the autograd function around them; all state is in its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.arithmetic import AttentionShape, TensorArithmetic
from engine.attention.buffers import BufferPool
from engine.attention.executor import Execution, Fields
from engine.attention.latent import LatentExpansion
from engine.attention.merge import backward_stats
from engine.attention.sinks import SinkGradients
from engine.attention.transport import Transport
from engine.device.host_memory import host_empty
from engine.device.row_blocks import accumulate_dtype
from engine.kernels.attention.base import TileKernel
from engine.planning.program.ops import Kind, RankPlan


@dataclass(frozen=True)
class SavedAttention:
    """What backward needs, as the forward plan left it: of the own rows or, after a head exchange, of the ring's.

    q, kv, out in the compute dtype; lse [T, H] in fp32 (float64). kv, which is k and v or their `latent`, is what
    backward starts from: after a reversed ring the last block held.
    """

    q: Tensor
    kv: Fields
    out: Tensor
    lse: Tensor


class KvOperand(NamedTuple):
    """Keys and values of the own rows for a forward plan.

    fields      k [T, K, qk_dim] and v [T, K, v_dim], or latent [T, B, rank + rope_dim]; contiguous
    num_heads   K
    v_dim       width of a head of v
    expansion   of latents; None: they are k and v
    """

    fields: Fields
    num_heads: int
    v_dim: int
    expansion: LatentExpansion | None = None

    @classmethod
    def expanded(cls, k: Tensor, v: Tensor) -> KvOperand:
        """k and v themselves."""
        return cls({"k": k, "v": v}, k.shape[1], v.shape[2])

    @classmethod
    def compressed(cls, latents: Tensor, expansion: LatentExpansion) -> KvOperand:
        """Latents of k and v."""
        return cls({"latent": latents}, expansion.num_heads, expansion.heads.v_dim, expansion)


@dataclass(frozen=True)
class SavedResults:
    """Attention's out and lse of the last rows, as `SavedAttention` has them: those not computed again."""

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
    pool: BufferPool = field(default_factory=BufferPool)  # of the group: its layers run in turn
    recompute: RankPlan | None = None  # forward again, for queries whose results were not saved
    recomputed_rows: int = 0  # first rows of the ring block that it computes

    @property
    def takes_stats(self) -> bool:
        """Whether backward needs `backward_stats` of the caller: queries travel, and so does a stand-in for `out`."""
        return self._has_stats and "dout" not in self.backward.arguments

    @property
    def _plan_forms_stats(self) -> bool:
        """Whether backward forms them itself, of rows that a head exchange brings; once of every row with keys."""
        return self._has_stats and "dout" in self.backward.arguments

    @property
    def kv_moves_backward(self) -> bool:
        """Whether keys and values move in backward, with their gradients; else queries do."""
        return not self._has_stats

    @property
    def _has_stats(self) -> bool:
        return self.backward.buffers[self.backward.argument("q_dout")].kind == Kind.Q_DOUT_STATS

    @property
    def on_host(self) -> bool:
        """Whether the plans read their inputs from host memory and leave their results there."""
        return self.forward.buffers[self.forward.argument("q")].where == "host"

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory for an input of the plans that `device` computes: its own, or pinned host memory."""
        if not self.on_host:
            return torch.empty(*shape, dtype=dtype, device=device)
        return host_empty(tuple(shape), dtype, pinned=device.type == "cuda")

    def stored(self, x: Tensor) -> Tensor:
        """x where the plans want it, contiguous; a copy only if it must move (on a CPU, host memory is a place too)."""
        if not self.on_host:
            return x.contiguous()
        return self.empty(x.shape, x.dtype, x.device).copy_(x, non_blocking=True)

    def arithmetic(
        self,
        x: Tensor,
        num_kv_heads: int,
        qk_dim: int,
        v_dim: int,
        device: torch.device | None = None,
        **options: Any,
    ) -> TensorArithmetic:
        """Arithmetic for all heads of x [T, H, ...] and this many kv heads, on `device` (None: that of x).

        `sinks`, `sink_gradients`, `expansion`: see `TensorArithmetic`.
        """
        wire = torch.float64 if x.dtype == torch.float64 else self.wire_gradient_dtype
        shape = AttentionShape(x.shape[1], num_kv_heads, qk_dim, v_dim, x.dtype, device or x.device, wire)
        return TensorArithmetic(shape, self.kernel, lease=self.pool.lease(), **options)

    def forward_execution(
        self, q: Tensor, k: Tensor, v: Tensor, device: torch.device | None = None, sinks: Tensor | None = None
    ) -> Execution:
        """Return the forward pass, not yet run.

        Args:
            q: [T, H, qk_dim], contiguous, as k and v.
            k: [T, K, qk_dim].
            v: [T, K, v_dim].
            device: Computes; None: where q is.
            sinks: Learnable attention sinks [H] on that device, in the dtype of sums: one logit more per query head in
                the softmax's denominator (see `merge.finish`). None: there are none.
        """
        return self.execution(self.forward, q, KvOperand.expanded(k, v), device, sinks=sinks)

    def execution(
        self,
        plan: RankPlan,
        q: Tensor,
        kv: KvOperand,
        device: torch.device | None = None,
        out_lse: Fields | None = None,
        sinks: Tensor | None = None,
    ) -> Execution:
        """A forward plan, not yet run; `out_lse`: results of all rows, of which the plan computes the first ones."""
        arithmetic = self.arithmetic(q, kv.num_heads, q.shape[2], kv.v_dim, device, sinks=sinks, expansion=kv.expansion)
        arguments: dict[str, Fields] = {"q": {"q": q}, "kv": kv.fields}
        if out_lse is not None:
            arguments["out_lse"] = out_lse
        if "partial" in plan.arguments and accumulate_dtype(q.dtype) == q.dtype:
            # Finished in place: both have the same rows, heads and dtypes.
            partial = arithmetic.allocate(plan.buffers[plan.argument("partial")])
            arguments |= {"partial": partial, "out_lse": partial}
        return Execution(plan, arithmetic, self.transport, arguments)

    def attend_again(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        results: SavedResults | None,
        device: torch.device,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, SavedAttention]:
        """Run forward again for contiguous q, k, v, given saved `results` of the last rows; (out, saved tensors).

        `sinks` are those of the forward pass; saved results include them.
        """
        q, k, v = operands
        if self.recompute is None or results is None:
            execution = self.forward_execution(q, k, v, device, sinks)
            execution.run()
            return self.collect(execution, q, k, v)
        joins = "partial" in self.recompute.arguments  # its results are of the recomputed rows alone
        completed = None if joins else self._completed(results)
        execution = self.execution(self.recompute, q, KvOperand.expanded(k, v), device, completed, sinks)
        execution.run()
        out, saved = self.collect(execution, q, k, v)
        if joins:
            del execution, out  # and the partial result, before there is memory for all rows
            saved = replace(saved, out=_joined(saved.out, results.out), lse=_joined(saved.lse, results.lse))
            out = saved.out
        return out, saved

    def saved_results(self, saved: SavedAttention) -> SavedResults:
        """Results of the rows whose attention is not computed again; the views of more where the host holds them.

        On the host nothing is cut off: what is still on its way there must not be copied by the host.
        """
        first = 0 if self.on_host or self.recompute is None else self.recomputed_rows
        return SavedResults(saved.out[first:], saved.lse[first:])

    def _completed(self, results: SavedResults) -> Fields:
        """Tensors of all rows with the saved ones in place."""
        rows = self.recomputed_rows
        if rows == 0 or self.on_host:
            return {"out": results.out, "lse": results.lse}
        return {name: _with_room(rows, tensor) for name, tensor in (("out", results.out), ("lse", results.lse))}

    def collect(self, execution: Execution, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SavedAttention]:
        """(out [T, H, v_dim], what to save) after the forward pass ran."""
        return self.collect_of(execution, q, {"k": k, "v": v})

    def collect_of(self, execution: Execution, q: Tensor, kv: Fields) -> tuple[Tensor, SavedAttention]:
        """As `collect`, of k and v or of their latents."""
        names = self.forward.arguments
        query = execution.argument("ring_q")["q"] if "ring_q" in names else q
        for name in ("ring_kv", "final_kv"):
            kv = execution.argument(name) if name in names else kv
        results = execution.argument("out_lse")
        saved = SavedAttention(query, kv, results["out"], results["lse"])
        return execution.argument("out")["out"] if "out" in names else saved.out, saved

    def backward_execution(
        self,
        saved: SavedAttention,
        dout: Tensor,
        num_kv_heads: int | None = None,
        *,
        stats: Tensor | None = None,
        device: torch.device | None = None,
        sink_gradients: SinkGradients | None = None,
        expansion: LatentExpansion | None = None,
    ) -> Execution:
        """The backward pass, not yet run; dout [T, H, v_dim] of the own rows.

        num_kv_heads     of all parts of the heads
        stats            `backward_stats` [T, H, 2], if the caller has them; asked for if `takes_stats`
        device           computes; None: where dout lies
        sink_gradients   of learnable sinks; complete after the pass ran and `add_sink_gradients`
        expansion        of latents, where these were saved and move; sums the gradients of its weight
        """
        names = self.backward.arguments
        arguments: dict[str, Fields] = {name: saved.kv for name in ("kv", "final_kv", "ring_kv") if name in names}
        ring_dout = dout
        if "dout" in names:
            arguments["dout"] = {"dout": dout}
            arguments["out_lse"] = {"out": saved.out, "lse": saved.lse}
            ring_dout = self.empty(saved.out.shape, saved.out.dtype, device or dout.device)
        arguments["q_dout"] = {"q": saved.q, "dout": ring_dout, "out": saved.out, "lse": saved.lse}
        # Where queries move, two numbers per row and head replace out: lse, and what rowsum(dout * out) follows from.
        if self.backward.buffers[self.backward.argument("q_dout")].kind == Kind.Q_DOUT_STATS:
            if stats is None and self.takes_stats:
                stats = backward_stats(dout, saved.out, saved.lse)
            elif stats is None:  # after a head exchange the plan forms them
                stats = self.empty((*saved.lse.shape, 2), saved.lse.dtype, device or dout.device)
            arguments["q_dout"] = {"q": saved.q, "dout": ring_dout, "stats": stats}
        qk_dim, v_dim = saved.q.shape[2], dout.shape[2]
        if num_kv_heads is None:
            num_kv_heads = saved.kv["k"].shape[1] if expansion is None else expansion.num_heads
        options = {"sink_gradients": sink_gradients, "expansion": expansion}
        arithmetic = self.arithmetic(dout, num_kv_heads, qk_dim, v_dim, device, **options)
        return Execution(self.backward, arithmetic, self.transport, arguments)

    def add_sink_gradients(self, backward: Execution, saved: SavedAttention, gradients: SinkGradients) -> None:
        """Complete the gradients that were given to `backward_execution`, after that ran.

        A plan that forms statistics of its rows has added their shares. Else dout of all rows is in an argument of it:
        of this rank's, or after a head exchange of the ring's.
        """
        if not self._plan_forms_stats:
            buffer = self.backward.buffers[self.backward.argument("q_dout")]
            gradients.add(buffer.heads, backward.argument("q_dout")["dout"], saved.out, saved.lse)


class _Attention(torch.autograd.Function):
    """Runs the two plans; every piece of state lives in the autograd context."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        runtime: AttentionRuntime,
        results: SavedResults | None,
    ) -> Tensor:
        device, num_kv_heads = q.device, k.shape[1]
        q, k, v = (runtime.stored(x) for x in (q, k, v))
        out, saved = runtime.attend_again((q, k, v), results, device, sinks)
        ctx.save_for_backward(saved.q, saved.kv["k"], saved.kv["v"], saved.out, saved.lse, sinks)
        ctx.runtime, ctx.num_kv_heads = runtime, num_kv_heads
        return out.to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        (q, k, v, out, lse, sinks), (dout,), runtime = ctx.saved_tensors, grad_outputs, ctx.runtime
        saved = SavedAttention(q, {"k": k, "v": v}, out, lse)
        device, stats = dout.device, None
        if runtime.on_host and runtime.takes_stats:
            # Formed on the device: the host must not read what is still being copied there.
            out, lse = (x.to(device, non_blocking=True) for x in (saved.out, saved.lse))
            stats = runtime.stored(backward_stats(dout, out, lse))
        gradients = SinkGradients(sinks) if ctx.needs_input_grad[3] else None
        execution = runtime.backward_execution(
            saved, runtime.stored(dout), ctx.num_kv_heads, stats=stats, device=device, sink_gradients=gradients
        )
        execution.run()
        if gradients is not None:
            runtime.add_sink_gradients(execution, saved, gradients)
        # Cast on the device, for the same reason.
        found = {**execution.argument("dq"), **execution.argument("dkv")}
        dq, dk, dv = (found[n].to(device, non_blocking=True).to(dout.dtype) for n in ("dq", "dk", "dv"))
        return dq, dk, dv, None if gradients is None else gradients.total, None, None


class ForwardPass:
    """What the layers of one forward pass hand to the next: the group of layers that share a saved input."""

    def __init__(self) -> None:
        self.group: Any = None


class PlannedAttention:
    """An AttentionFn whose runtime a layer may use directly, to run its own work chunk by chunk around the plans.

    The functions of a model's layers share a `forward_pass`. A plain class: FSDP2 of torch 2.13 walks through every
    dataclass among a layer's arguments in search of tensors, and so would visit all operations of the plans, in every
    forward pass of every layer.
    """

    def __init__(self, runtime: AttentionRuntime, forward_pass: ForwardPass | None = None) -> None:
        self.runtime = runtime
        self.forward_pass = forward_pass or ForwardPass()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """As `run_attention`."""
        return run_attention(q, k, v, self.runtime, sinks)


def run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runtime: AttentionRuntime,
    sinks: Tensor | None = None,
    results: SavedResults | None = None,
) -> Tensor:
    """out [B, T, H, v_dim] of q [B, T, H, qk_dim], k [B, T, K, qk_dim] and v [B, T, K, v_dim]; sequences of a batch are
    folded into the heads.

    `sinks` [H] are learnable: one logit more per query head in the softmax's denominator. Their gradient is this rank's
    share, to be summed over the ranks that share the sequences as that of any parameter. `results`: what
    `record_attention` returned for equal operands, which is not computed again.
    """
    batch = q.shape[0]
    folded = [fold_sequences(x) for x in (q, k, v)]
    out: Tensor = _Attention.apply(*folded, fold_sinks(sinks, q), runtime, results)  # type: ignore[no-untyped-call]
    return unfold_sequences(out, batch)


@torch.no_grad()
def record_attention(
    q: Tensor, k: Tensor, v: Tensor, runtime: AttentionRuntime, sinks: Tensor | None = None
) -> tuple[Tensor, SavedResults]:
    """`run_attention` without a graph; also the results that need not be computed again when it is repeated."""
    operands = (runtime.stored(fold_sequences(q)), runtime.stored(fold_sequences(k)), runtime.stored(fold_sequences(v)))
    out, saved = runtime.attend_again(operands, None, q.device, fold_sinks(sinks, q))
    return unfold_sequences(out.to(q.device, non_blocking=True), q.shape[0]), runtime.saved_results(saved)


def fold_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """[H] -> [B * H] in the dtype of sums: head h of sequence b is number b * H + h."""
    return None if sinks is None else sinks.to(accumulate_dtype(q.dtype)).repeat(q.shape[0])


def _joined(first: Tensor, last: Tensor) -> Tensor:
    """Recomputed first rows and the others, which were saved; no copy where either has none."""
    if first.shape[0] and last.shape[0]:
        return torch.cat([first, last])
    return first if first.shape[0] else last


def _with_room(rows: int, last: Tensor) -> Tensor:
    """A copy behind `rows` uninitialised rows."""
    whole = last.new_empty(rows + last.shape[0], *last.shape[1:])
    whole[rows:].copy_(last)
    return whole


def fold_sequences(x: Tensor) -> Tensor:
    """[B, T, heads, D] -> [T, B*heads, D]; a view when B is 1. Query head h of sequence b still meets its own kv
    head.
    """
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def unfold_sequences(out: Tensor, batch: int) -> Tensor:
    """[T, B*H, D] -> [B, T, H, D], a view."""
    return out.view(out.shape[0], batch, -1, out.shape[2]).transpose(0, 1)
