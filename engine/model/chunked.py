"""Layers that run on a few rows at a time around attention, so that nothing but attention's own tensors is whole.

A transformer layer is row by row but for attention. So q, k and v are made tile by tile, straight into the memory that
the attention plan reads (host memory, when it keeps its chunks there), and the output tile by tile from what it left:

    forward    x rows -> project -> q, k, v rows | attention | x rows, out rows -> finish -> y rows
    backward   x rows, out rows, dy rows -> finish again -> dx, dout rows | attention backward
               x rows -> project again, dq, dk, dv rows -> dx rows

Attention itself is not computed again where its results are kept. No tile needs a message, so ranks may have different
numbers of tiles. Sources: Yao et al. 2024 (FPDT), Bekman et al. 2025 (ALST: tiled MLP).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.attention.merge import backward_stats
from engine.attention.runtime import AttentionRuntime, SavedAttention
from engine.model.llama import LlamaModel, TransformerBlock
from engine.row_blocks import accumulate_dtype
from engine.tiling import Tiling


def tile_layers(model: LlamaModel, tiling: Tiling) -> None:
    """Makes every layer run tile by tile, in place; takes the place of activation checkpointing.

    Layers must then be given attention that has a `runtime` (`engine.attention.runtime.PlannedAttention`).
    """
    for layer in model.layers:
        assert isinstance(layer, TransformerBlock)
        # On the instance, inside FSDP's hooks: weights are gathered before forward and before backward.
        run = functools.partial(_run_layer, layer, tiling)
        layer.forward = torch.compiler.disable(run)  # type: ignore[method-assign, no-untyped-call]


def _run_layer(
    layer: TransformerBlock, tiling: Tiling, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Any
) -> Tensor:
    """TransformerBlock.forward, tiled."""
    work = _TiledLayer(layer, tiling, cos, sin, attention.runtime, torch.is_grad_enabled())
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    out: Tensor = _TiledLayerFunction.apply(work, hidden, *parameters)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _TiledLayer:
    """One call of a layer; holds no results."""

    layer: TransformerBlock
    tiling: Tiling
    cos: Tensor
    sin: Tensor
    runtime: AttentionRuntime
    recording: bool  # a backward pass may follow

    def tiles(self, hidden: Tensor) -> Iterator[slice]:
        """Row ranges of hidden [B, T, d]."""
        for start in range(0, hidden.shape[1], self.tiling.tile_tokens):
            yield slice(start, min(start + self.tiling.tile_tokens, hidden.shape[1]))

    def attend(self, hidden: Tensor, device: torch.device) -> tuple[Tensor, SavedAttention]:
        """(out [T, B*H, D], what to save) of hidden [B, T, d]."""
        stores: list[Tensor] = []
        for rows in self.tiles(hidden):
            parts = self.layer.project(_rows(hidden, rows, device), self.cos[rows], self.sin[rows])
            stores = stores or [self._store(part, hidden.shape[1]) for part in parts]
            for store, part in zip(stores, parts, strict=True):
                store[rows].copy_(part.transpose(0, 1), non_blocking=True)
        q, k, v = (store.flatten(1, 2) for store in stores)
        execution = self.runtime.forward_execution(q, k, v, device)
        execution.run()
        return self.runtime.collect(execution, q, k, v)

    def finish(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The layer's output [B, T, d]."""
        result = torch.empty_like(hidden)
        for rows in self.tiles(hidden):
            out_rows = _unfold(_fetched(out[rows], hidden.device), hidden.shape[0])
            result[:, rows] = self.layer.finish(hidden[:, rows], out_rows)
        return result

    def backpropagate(self, hidden: Tensor, attended: tuple[Tensor, SavedAttention], dy: Tensor) -> _Gradients:
        """Gradients of everything, given that of the output [B, T, d]."""
        gradients = _Gradients(dy, [p for p in self.layer.parameters() if p.requires_grad])
        execution = self._through_finish(hidden, attended, dy, gradients)
        execution.run()
        self._through_project(hidden, execution.pinned("dq")["dq"], execution.pinned("dkv")["dkv"], gradients)
        return gradients

    def _through_finish(
        self, hidden: Tensor, attended: tuple[Tensor, SavedAttention], dy: Tensor, gradients: _Gradients
    ) -> Any:
        """Backward pass of attention, ready to run, after that of all that follows it."""
        out, saved = attended
        dout = self.runtime.empty(out.shape, out.dtype, dy.device)
        exchanged = "dout" in self.runtime.backward.pins
        stats = None if exchanged else self.runtime.empty((*saved.lse.shape, 2), saved.lse.dtype, dy.device)
        for rows in self.tiles(hidden):
            x_rows = _leaf(_rows(hidden, rows, dy.device))
            out_rows = _leaf(_unfold(_fetched(out[rows], dy.device), dy.shape[0]))
            with torch.enable_grad():
                y_rows = self.layer.finish(x_rows, out_rows)
            dx, dout_rows = gradients.add([y_rows], [dy[:, rows]], [x_rows, out_rows])
            gradients.dx[:, rows] = dx
            folded = _fold(dout_rows)
            dout[rows].copy_(folded, non_blocking=True)
            if stats is not None:
                lse = _fetched(saved.lse[rows], dy.device)
                stats[rows].copy_(backward_stats(folded, _fold(out_rows.detach()), lse), non_blocking=True)
        kv_heads = self.layer.self_attn.k_proj.out_features // self.layer.self_attn.head_dim * dy.shape[0]
        return self.runtime.backward_execution(saved, dout, kv_heads, stats=stats, device=dy.device)

    def _through_project(self, hidden: Tensor, dq: Tensor, dkv: Tensor, gradients: _Gradients) -> None:
        """Add what flows back through q, k and v: dq [T, B*H, D], dkv [T, 2, B*K, D]."""
        batch, device = hidden.shape[0], gradients.dx.device
        for rows in self.tiles(hidden):
            x_rows = _leaf(_rows(hidden, rows, device))
            with torch.enable_grad():
                projected = self.layer.project(x_rows, self.cos[rows], self.sin[rows])
            dq_rows, dkv_rows = (_fetched(x[rows], device).to(gradients.dx.dtype) for x in (dq, dkv))
            flowing = [_unfold(part, batch) for part in (dq_rows, dkv_rows[:, 0], dkv_rows[:, 1])]
            (dx,) = gradients.add(projected, flowing, [x_rows])
            gradients.dx[:, rows] += dx

    def _store(self, part: Tensor, tokens: int) -> Tensor:
        """Memory [T, B, heads, D] for what `part` [B, n, heads, D] is a tile of."""
        batch, _, heads, head_dim = part.shape
        return self.runtime.empty((tokens, batch, heads, head_dim), part.dtype, part.device)


class _Gradients:
    """Gradient of a layer's input, and sums over tiles of its parameters', in fp32 (float64 for float64)."""

    def __init__(self, dy: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.dx = torch.empty_like(dy)
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, outputs: Sequence[Tensor], flowing: Sequence[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of `inputs`, given those of `outputs`; the parameters' are added up."""
        found = torch.autograd.grad(outputs, [*inputs, *self._parameters], flowing, allow_unused=True)
        of_parameters: Sequence[Tensor | None] = found[len(inputs) :]
        for index, gradient in enumerate(of_parameters):
            if gradient is None:  # of the layer's other half
                continue
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient.to(accumulate_dtype(gradient.dtype))
            else:
                total += gradient
        return found[: len(inputs)]

    def of_parameters(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes."""
        pairs = zip(self._sums, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


class _TiledLayerFunction(torch.autograd.Function):
    """One layer; every piece of state lives in the autograd context. Parameters are inputs, so that their gradients
    take autograd's own way.
    """

    @staticmethod
    def forward(ctx: Any, work: _TiledLayer, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """[B, T, d]."""
        out, saved = work.attend(hidden, hidden.device)
        if work.recording:
            kept = [out, saved.q, saved.k, saved.v, saved.out, saved.lse] if work.tiling.keep_attention else []
            ctx.save_for_backward(work.runtime.stored(hidden), *kept)
            ctx.work = work
        return work.finish(hidden, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and of the parameters."""
        hidden, *kept = ctx.saved_tensors
        attended = (kept[0], SavedAttention(*kept[1:])) if kept else ctx.work.attend(hidden, dy.device)
        gradients = ctx.work.backpropagate(hidden, attended, dy)
        return None, gradients.dx, *gradients.of_parameters()


def _fetched(x: Tensor, device: torch.device) -> Tensor:
    """x, contiguous, on `device`. A cast or a gap would be the host's work, ahead of copies to x still in flight."""
    assert x.is_contiguous() or x.device == device
    return x.to(device, non_blocking=True)


def _rows(hidden: Tensor, rows: slice, device: torch.device) -> Tensor:
    """Rows of [B, T, d] on `device`."""
    if hidden.device == device:
        return hidden[:, rows]
    return torch.stack([_fetched(sequence[rows], device) for sequence in hidden])


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _fold(x: Tensor) -> Tensor:
    """[n, B*heads, D] from [B, n, heads, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def _unfold(x: Tensor, batch: int) -> Tensor:
    """[B, n, heads, D] from [n, B*heads, D]."""
    return x.view(x.shape[0], batch, -1, x.shape[2]).transpose(0, 1)
