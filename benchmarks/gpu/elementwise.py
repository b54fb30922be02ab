"""Triton kernels against torch's own operations that do the same: seconds, and GB/s of the bytes that must move.

Must move means: every input read once, every result written once. Torch's side is what one would write without kernels
of one's own (fused operations of torch included), with autograd's backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.timing import time_call
from engine.attention.merge import add_kv, backward_stats, merge_tile, surrogate_out
from engine.config.settings import LossConfig
from engine.kernels.dispatch import uses_triton
from engine.loss.fused import losses_of_logits
from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.rope import apply_rope

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer's tensors: rows, widths, heads, and a chunk of logits."""

    rows: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    chunk: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16


LLAMA_8B = Shape(rows=32768, hidden=4096, ffn=14336, heads=32, head_dim=128, chunk=2048, vocab=128256)
TINY = Shape(rows=8, hidden=16, ffn=24, heads=2, head_dim=8, chunk=4, vocab=40, dtype=torch.float32)


@dataclass(frozen=True)
class Contest:
    """Two calls that do the same, and the bytes that must move."""

    name: str
    moved_bytes: int
    ours: Callable[[], object]
    torch: Callable[[], object]


def bench_elementwise(device: torch.device, shape: Shape | None = None) -> list[dict[str, Any]]:
    """A row per kernel and direction: seconds, gb_per_s (both by side, "triton" and "torch"), speedup, or its error.

    On a CPU, and on a GPU without Triton, there is the side of torch alone, by default at a tiny size.
    """
    shape = shape or (LLAMA_8B if device.type == "cuda" else TINY)
    return [_row(contest, shape, device) for build in CONTESTS for contest in build(shape, device)]


def _row(contest: Contest, shape: Shape, device: torch.device) -> dict[str, Any]:
    calls = {"torch": contest.torch}
    if uses_triton(torch.empty(0, device=device)):
        calls["triton"] = contest.ours
    row: dict[str, Any] = {"kernel": contest.name, "dtype": str(shape.dtype).removeprefix("torch.")}
    row["moved_bytes"] = contest.moved_bytes
    try:
        seconds = {name: time_call(call, device).median_s for name, call in calls.items()}
    except Exception as error:  # Triton's compiler has errors of its own; the other kernels are measured all the same
        return row | {"error": f"{type(error).__name__}: {error}"}
    row["seconds"] = seconds
    row["gb_per_s"] = {name: contest.moved_bytes / value / 1e9 for name, value in seconds.items()}
    return row | {"speedup": seconds["torch"] / seconds["triton"] if "triton" in seconds else None}


def _draw(shape: Shape, device: torch.device, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(sizes, device=device, dtype=dtype or shape.dtype)


def _both_ways(
    name: str,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moved_bytes: tuple[int, int],
) -> Iterator[Contest]:
    """The forward passes of (ours, torch's) without a graph, then their backward passes."""

    def forward(function: Callable[..., Any]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return function(*inputs)

        return call

    def backward(function: Callable[..., Any]) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in inputs]

        @functools.cache
        def outputs() -> Sequence[Tensor]:  # made by the first call, which is not measured
            found = function(*(x.clone() for x in leaves))
            return found if isinstance(found, tuple) else (found,)

        return lambda: torch.autograd.grad(outputs(), leaves, gradients, retain_graph=True)

    yield Contest(name, moved_bytes[0], *map(forward, functions))
    yield Contest(f"{name} backward", moved_bytes[1], *map(backward, functions))


def _norms(shape: Shape, device: torch.device) -> Iterator[Contest]:
    """The norm alone and after an addition."""

    def added(branch: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = branch.add_(residual)
        return total, F.rms_norm(total, weight.shape, weight, EPS)

    sizes = (1, shape.rows, shape.hidden)
    x, residual, dnormed, dtotal = (_draw(shape, device, *sizes) for _ in range(4))
    weight = _draw(shape, device, shape.hidden)
    functions = (lambda x, w: rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, w.shape, w, EPS))
    yield from _both_ways("rms_norm", functions, (x, weight), (dnormed,), (2 * x.nbytes, 3 * x.nbytes))
    with_sum = (lambda b, r, w: add_rms_norm(b, r, w, EPS), added)
    inputs, gradients = (x, residual, weight), (dtotal, dnormed)
    yield from _both_ways("add_rms_norm", with_sum, inputs, gradients, (4 * x.nbytes, 4 * x.nbytes))


def _rope(shape: Shape, device: torch.device) -> Iterator[Contest]:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (torch.cat((table, table), -1).unsqueeze(1).to(x.dtype) for table in (cos, sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x, dout = (_draw(shape, device, 1, shape.rows, shape.heads, shape.head_dim) for _ in range(2))
    angles = _draw(shape, device, shape.rows, shape.head_dim // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    functions = (lambda x: apply_rope(x, cos, sin), lambda x: rotated(x, cos, sin))
    moved = 2 * x.nbytes + 2 * cos.nbytes
    yield from _both_ways("rope", functions, (x,), (dout,), (moved, moved))


def _swiglu(shape: Shape, device: torch.device) -> Iterator[Contest]:
    gate, up, dout = (_draw(shape, device, 1, shape.rows, shape.ffn) for _ in range(3))
    functions = (swiglu, lambda gate, up: F.silu(gate) * up)
    yield from _both_ways("swiglu", functions, (gate, up), (dout,), (3 * gate.nbytes, 5 * gate.nbytes))


def _loss(shape: Shape, device: torch.device) -> Iterator[Contest]:
    """Loss and gradient of a chunk of logits; torch's side has its fp32 copy and the graph of one loss."""
    logits = _draw(shape, device, shape.chunk, shape.vocab)
    labels = torch.randint(0, shape.vocab, (shape.chunk,), device=device)

    def ours(*, overwrite: bool) -> Tensor:
        return losses_of_logits(logits, labels, LossConfig(), overwrite=overwrite).sum()

    def value() -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def gradient() -> Tensor:
        leaf = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(F.cross_entropy(leaf.float(), labels, reduction="sum"), leaf)
        return found

    yield Contest("cross_entropy", logits.nbytes, lambda: ours(overwrite=False), value)
    yield Contest("cross_entropy with gradient", 2 * logits.nbytes, lambda: ours(overwrite=True), gradient)


def _merge(shape: Shape, device: torch.device) -> Iterator[Contest]:
    """A tile's result into fp32 accumulators, and what stands in for `out` in backward."""
    sizes = (shape.rows, shape.heads, shape.head_dim)
    out = _draw(shape, device, *sizes, dtype=torch.float32)
    block, dout = (_draw(shape, device, *sizes) for _ in range(2))
    lse, block_lse = (_draw(shape, device, *sizes[:2], dtype=torch.float32) for _ in range(2))

    def merged() -> None:
        weight = torch.sigmoid(block_lse - lse).unsqueeze(-1)
        out.lerp_(block.to(out.dtype), weight)
        torch.logaddexp(lse, block_lse, out=lse)

    def stats() -> Tensor:
        wide = dout.float()
        norm, delta = wide.square().sum(-1), (wide * block.float()).sum(-1)
        return torch.stack((lse, torch.where(norm > 0, delta / norm, 0.0)), -1)

    found = stats()
    yield Contest(
        "merge_tile",
        2 * out.nbytes + block.nbytes + 3 * lse.nbytes,
        lambda: merge_tile(out, lse, block, block_lse),
        merged,
    )
    sums, arrived = (
        {name: _draw(shape, device, *sizes, dtype=torch.float32) for name in ("dk", "dv")} for _ in range(2)
    )
    gradients = {"dk": block, "dv": dout}

    def summed() -> None:
        for name, total in sums.items():
            total.copy_(gradients[name]).add_(arrived[name])

    moved = 4 * sums["dk"].nbytes + block.nbytes + dout.nbytes
    yield Contest("add_kv", moved, lambda: add_kv(sums, gradients, arrived, stores=True), summed)
    yield Contest("backward_stats", 2 * dout.nbytes + 3 * lse.nbytes, lambda: backward_stats(dout, block, lse), stats)
    yield Contest(
        "surrogate_out",
        2 * dout.nbytes + lse.nbytes,
        lambda: surrogate_out(dout, found),
        lambda: (dout * found[..., 1:]).to(dout.dtype),
    )


CONTESTS = (_norms, _rope, _swiglu, _loss, _merge)
