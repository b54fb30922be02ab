"""Independent oracles and an in-process group for attention tests."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.arithmetic import TensorArithmetic
from engine.attention.executor import Execution, Fields
from engine.attention.runtime import AttentionRuntime, SavedAttention
from engine.attention.sinks import SinkGradients
from engine.config.settings import LayoutName
from engine.kernels.attention.base import TileKernel
from engine.planning.methods.blocks import Blocks, divide_sequence
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import AttentionPlan, Buffer, HeadPart, LinkBytes
from engine.planning.schedules.plan import PlanPair, plan_method
from engine.planning.topology import Topology
from engine.planning.visibility.mask import BlockList, Mask
from engine.planning.visibility.visible import Visibility
from testkit.hub import Hub, lockstep, poison

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Inputs:
    """Random q [N, H, D] and k [N, K, D], dout [N, H, v_dim] and v [N, K, v_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def random_inputs(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    v_dim: int | None = None,
) -> Inputs:
    """`v_dim`: of v and dout; None: head_dim."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, width: int) -> Tensor:
        return torch.randn(rows, count, width, dtype=torch.float64, generator=generator).to(dtype)

    v_dim = v_dim or head_dim
    return Inputs(draw(heads, head_dim), draw(kv_heads, head_dim), draw(kv_heads, v_dim), draw(heads, v_dim))


def visible(mask: Mask, query: int, key: int) -> bool:
    """Whether the query at one position sees the key at another: the definition all else is tested against."""
    if max(query, key) >= mask.seq_len or (mask.causal and key > query):
        return False
    if mask.query_stop is not None and query >= mask.query_stop:
        return False
    starts = mask.documents or (0,)
    document = bisect_right(starts, key)
    if document != bisect_right(starts, query):
        return False
    if mask.window is not None and abs(query - key) >= mask.window and key - starts[document - 1] >= mask.sink:
        return False
    size = mask.blocks.block_size if mask.blocks else 1
    return mask.blocks is None or (query // size, key // size) in block_pairs(mask.blocks)


@functools.cache
def block_pairs(blocks: BlockList) -> set[tuple[int, int]]:
    """Every (query block, key block)."""
    return {(a, b) for r in blocks.rectangles for a in range(r.q_first, r.q_stop) for b in range(r.k_first, r.k_stop)}


def dense_visibility(mask: Mask, rows: int) -> Tensor:
    return torch.tensor([[visible(mask, i, j) for j in range(rows)] for i in range(rows)])


def oracle(inputs: Inputs, visible: Tensor, sinks: Tensor | None = None) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv by dense float64 attention and autograd; rows that see nothing give 0 and -inf.

    With learnable `sinks` [H] also dsinks: the softmax is over the keys and a sink, which has no value.
    """
    if sinks is not None:
        return _oracle_with_sinks(inputs, visible, sinks)
    q, k, v = (x.double().detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~visible.any(1)[None, :, None], 0.0)
    out = torch.einsum("hij,jhd->ihd", weights, values)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    lse = torch.logsumexp(scores.detach(), -1).T
    return dict(zip(NAMES, (out.detach(), lse, dq, dk, dv), strict=True))


def _oracle_with_sinks(inputs: Inputs, visible: Tensor, sinks: Tensor) -> dict[str, Tensor]:
    leaves = [x.double().detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, sinks)]
    q, k, v, logit = leaves
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) / q.shape[-1] ** 0.5
    column = logit[:, None, None].expand(-1, len(q), 1)
    logits = torch.cat([scores.masked_fill(~visible, -torch.inf), column], -1)
    out = torch.einsum("hij,jhd->ihd", torch.softmax(logits, -1)[..., :-1], values)
    gradients = torch.autograd.grad(out, leaves, inputs.dout.double())
    results = (out.detach(), torch.logsumexp(logits.detach(), -1).T, *gradients)
    return dict(zip((*NAMES, "dsinks"), results, strict=True))


def causal(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


def pairs_between(visibility: Visibility, q_rank: int, kv_rank: int) -> int:
    """Visible pairs of two blocks."""
    return sum(band.area() for band in visibility.bands(q_rank, kv_rank))


def num_pairs(mask: Mask) -> int:
    """Visible pairs of the whole mask, as it counts them."""
    return int(mask.pairs_before(np.array([mask.seq_len]))[0])


def ring_method(
    inner: int, outer: int = 1, layout: LayoutName = "zigzag", heads: int = 1, **axes: Any
) -> AttentionMethod:
    """A method by its degrees."""
    return AttentionMethod(
        "loongtrain", layout, ring_inner_size=inner, ring_outer_size=outer, head_parallel_size=heads, **axes
    )


@dataclass(frozen=True)
class GroupResult:
    """Gathered results in global order and the bytes that every rank sent."""

    values: dict[str, Tensor]
    forward_bytes: dict[int, LinkBytes]
    backward_bytes: dict[int, LinkBytes]


@dataclass(frozen=True)
class Group:
    """All ranks of a group in this process."""

    plans: PlanPair
    blocks: Blocks
    kernel: TileKernel
    late: bool = True
    topology: Topology | None = None
    wire: torch.dtype = torch.float32
    before: int | None = None  # where the queries end that the recompute pass attends again
    sinks: Tensor | None = None  # [heads]

    def run(self, inputs: Inputs) -> GroupResult:
        rank_layout = self.blocks.rank_layout
        index = [torch.from_numpy(rank_layout.positions(rank)) for rank in range(rank_layout.size)]
        local = [(inputs.q[i], inputs.k[i], inputs.v[i]) for i in index]
        forward_hub = Hub(rank_layout.size, self.topology, late=self.late)
        runtimes = [self._runtime(rank, forward_hub) for rank in range(rank_layout.size)]
        forwards = [
            runtime.forward_execution(*qkv, sinks=self.sinks) for runtime, qkv in zip(runtimes, local, strict=True)
        ]
        lockstep(forwards, forward_hub)
        finished = [r.collect(e, *qkv) for r, e, qkv in zip(runtimes, forwards, local, strict=True)]
        if self.plans.recompute is not None:
            finished = self._run_again(self.plans.recompute, local, [saved for _, saved in finished])
        backward_hub = Hub(rank_layout.size, self.topology, late=self.late)
        shares = [None if self.sinks is None else SinkGradients(self.sinks) for _ in index]
        backwards = [
            self._runtime(r, backward_hub).backward_execution(
                saved, inputs.dout[i], inputs.k.shape[1], sink_gradients=shares[r]
            )
            for r, (i, (_, saved)) in enumerate(zip(index, finished, strict=True))
        ]
        lockstep(backwards, backward_hub)
        dkv = [execution.argument("dkv") for execution in backwards]
        parts = {
            "out": [out for out, _ in finished],
            "dq": [execution.argument("dq")["dq"].to(inputs.q.dtype) for execution in backwards],
            "dk": [x["dk"].to(inputs.k.dtype) for x in dkv],
            "dv": [x["dv"].to(inputs.v.dtype) for x in dkv],
        }
        values = {name: gather(index, tensors) for name, tensors in parts.items()}
        values["lse"] = self._lse([saved.lse for _, saved in finished], inputs)
        for runtime, execution, (_, saved), share in zip(runtimes, backwards, finished, shares, strict=True):
            if share is not None:
                runtime.add_sink_gradients(execution, saved, share)
        if self.sinks is not None:
            values["dsinks"] = torch.stack([share.total for share in shares if share is not None]).sum(0)
        return GroupResult(values, forward_hub.sent, backward_hub.sent)

    def _run_again(
        self, plan: AttentionPlan, local: list[tuple[Tensor, Tensor, Tensor]], saved: list[SavedAttention]
    ) -> list[tuple[Tensor, SavedAttention]]:
        """As `collect` of the forward pass, after a recompute pass that was given nothing but the kept rows."""
        hub = Hub(self.blocks.rank_layout.size, late=self.late)
        again = []
        rows = [self.blocks.recomputed_rows(self.before or 0, rank) for rank in range(len(local))]
        for rank, (q, k, v) in enumerate(local):
            arguments = {"q": {"q": q}, "kv": {"k": k, "v": v}}
            if "partial" not in plan.ranks[rank].arguments:
                arguments["out_lse"] = _forgotten(saved[rank], rows[rank])
            arithmetic = self._runtime(rank, hub).arithmetic(q, k.shape[1], q.shape[2], v.shape[2], sinks=self.sinks)
            again.append(Execution(plan.ranks[rank], arithmetic, hub.transport(rank), arguments))
        lockstep(again, hub)
        return [
            _results(plan.ranks[rank].arguments, rows[rank], again[rank], local[rank], saved[rank])
            for rank in range(len(local))
        ]

    def _lse(self, parts: list[Tensor], inputs: Inputs) -> Tensor:
        """lse [N, H]: every rank has the rows of its ring member and its part of the heads."""
        whole = torch.full(inputs.q.shape[:2], torch.nan, dtype=torch.float64)
        for rank, part in enumerate(parts):
            ring_index, head = self.blocks.grid.coordinates(rank)
            first, last = HeadPart(head, self.blocks.grid.heads).queries(inputs.q.shape[1])
            whole[torch.from_numpy(self.blocks.ring.positions(ring_index)), first:last] = part.double()
        return whole

    def _runtime(self, rank: int, hub: Hub) -> AttentionRuntime:
        return PoisonedRuntime(
            self.plans.forward.ranks[rank],
            self.plans.backward.ranks[rank],
            self.kernel,
            hub.transport(rank),
            self.wire,
        )


class PoisonedArithmetic(TensorArithmetic):
    """Its buffers begin with NaN, so that reading what nobody wrote shows."""

    def allocate(self, buffer: Buffer) -> Fields:
        return {name: poison(tensor) for name, tensor in super().allocate(buffer).items()}


@dataclass(frozen=True)
class PoisonedRuntime(AttentionRuntime):
    """Whose arithmetic is poisoned."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return poison(super().empty(shape, dtype, device))

    def arithmetic(
        self,
        x: Tensor,
        num_kv_heads: int,
        qk_dim: int,
        v_dim: int,
        device: torch.device | None = None,
        **sinks: Any,
    ) -> TensorArithmetic:
        shape = super().arithmetic(x, num_kv_heads, qk_dim, v_dim, device).shape
        return PoisonedArithmetic(shape, self.kernel, **sinks)


def _forgotten(saved: SavedAttention, rows: int) -> dict[str, Tensor]:
    """out and lse without the rows that will be computed again."""
    kept = {"out": saved.out.clone(), "lse": saved.lse.clone()}
    for tensor in kept.values():
        poison(tensor[:rows])
    return kept


def _results(
    names: frozenset[str], rows: int, again: Execution, qkv: tuple[Tensor, Tensor, Tensor], before: SavedAttention
) -> tuple[Tensor, SavedAttention]:
    """(out, what backward starts from) of the recompute pass."""
    query = again.argument("ring_q")["q"] if "ring_q" in names else qkv[0]
    kv = {"k": qkv[1], "v": qkv[2]}
    for name in ("ring_kv", "final_kv"):
        kv = again.argument(name) if name in names else kv
    results = _forgotten(before, rows)
    if "partial" in names:  # of the recomputed rows alone
        for name in ("out", "lse"):
            results[name][:rows] = again.argument("out_lse")[name]
    else:
        results = again.argument("out_lse")
    out = again.argument("out")["out"] if "out" in names else results["out"]
    return out, SavedAttention(query, kv, results["out"], results["lse"])


def gather(index: list[Tensor], parts: list[Tensor]) -> Tensor:
    """Rows of all ranks in global order, float64."""
    whole = torch.full((sum(len(i) for i in index), *parts[0].shape[1:]), torch.nan, dtype=torch.float64)
    for i, part in zip(index, parts, strict=True):
        whole[i] = part.double()
    return whole


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest absolute difference per result; NaN counts as infinite, equal infinities as none."""
    result = {}
    for name in want:
        same = got[name] == want[name]
        difference = (got[name] - want[name]).abs().masked_fill(same, 0.0)
        result[name] = float(difference.nan_to_num(nan=torch.inf).max())
    return result


def relative_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """||got - want|| / ||want|| per result."""
    return {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in ("out", "dq", "dk", "dv")}


def build_group(method: AttentionMethod, mask: Mask, kernel: TileKernel, *, rows: int | None = None) -> Group:
    """A method under a mask, over a hub that delivers late."""
    blocks = divide_sequence(method, rows or mask.seq_len, [mask])
    wire = getattr(torch, method.gradient_wire_dtype)
    return Group(plan_method(method, mask, blocks), blocks, kernel, wire=wire)
