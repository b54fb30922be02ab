"""Kernels of GPUs: windows as their libraries understand them, and large tiles in parts of their heads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from testkit.attention_oracle import Inputs, random_inputs
from testkit.counting import band_mask
from torch import Tensor

from engine.attention.arithmetic import AttentionShape, TensorArithmetic
from engine.attention.merge import backward_stats
from engine.kernels.attention.base import TileGradients, TileKernel, TileResult
from engine.kernels.attention.cuda import (
    AtenCudnnKernel,
    AtenFlashKernel,
    LibraryKernel,
    Window,
    window_calls,
    window_of,
)
from engine.kernels.attention.heads import CUDA_CALL_ELEMENTS
from engine.planning.program.ops import Tile, View
from engine.planning.visibility.mask import UNBOUNDED, Band, normalise

ANY = View(0, 0, 1)  # of which buffer and rows an operand is was resolved when its fields were cut


def run_causal_tile(kernel: TileKernel, inputs: Inputs) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of a causal tile as plans run it, in parts of its heads if it is large."""
    q, device = inputs.q, inputs.q.device
    tile = Tile(ANY, ANY, ANY, Band(0, len(q), 0, len(q), low=0))
    shape = AttentionShape(q.shape[1], inputs.k.shape[1], q.shape[2], q.shape[2], q.dtype, device)
    arithmetic = TensorArithmetic(shape, kernel)
    acc = {"out": torch.zeros(q.shape, device=device), "lse": torch.full(q.shape[:2], -torch.inf, device=device)}
    kv = {"k": inputs.k, "v": inputs.v}
    arithmetic.run_tile(tile, {"q": {"q": q}, "kv": kv, "sums": acc})
    stats = backward_stats(inputs.dout, acc["out"].to(q.dtype), acc["lse"])
    dq = torch.zeros(q.shape, device=device)
    dkv = {name: torch.zeros(inputs.k.shape, device=device) for name in ("dk", "dv")}
    qx = {"q": q, "dout": inputs.dout, "stats": stats}
    arithmetic.run_tile(tile, {"q": qx, "kv": kv, "sums": {"dq": dq}, "kv_sums": dkv})
    arithmetic.finish_step()
    return {**acc, "dq": dq, **dkv}


@pytest.mark.parametrize("kind", [AtenFlashKernel, AtenCudnnKernel])
@pytest.mark.parametrize(("rows", "parts"), [(1 << 16, 1), ((1 << 16) + 1, 2), (3 << 16, 4)])
def test_real_operators_are_given_parts_of_the_heads_of_large_tiles(
    kind: type[LibraryKernel], rows: int, parts: int
) -> None:
    """On meta tensors: 64 heads of 128 reach the limit at 2^16 rows."""
    shapes: list[torch.Size] = []

    class Noting(kind):  # type: ignore[valid-type,misc]
        def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
            shapes.append(q.shape)
            return super()._forward(q, k, v, band)

        def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
            shapes.append(q.shape)
            return super()._backward(grads, q, k, v, band)

    def on_meta(heads: int) -> Tensor:
        return torch.empty(rows, heads, 128, device="meta", dtype=torch.bfloat16)

    found = run_causal_tile(Noting(), Inputs(on_meta(64), on_meta(16), on_meta(16), on_meta(64)))
    assert found["out"].shape == (rows, 64, 128)
    assert found["dk"].shape == (rows, 16, 128)
    assert len(shapes) == 2 * parts
    assert all(shape.numel() <= CUDA_CALL_ELEMENTS for shape in shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AtenFlashKernel, AtenCudnnKernel])
def test_cut_tiles_equal_whole_ones_on_the_gpu(kind: type[LibraryKernel]) -> None:
    class Cut(kind):  # type: ignore[valid-type,misc]
        capabilities = replace(kind.capabilities, max_call_elements=3 * 256 * 64)

    x = random_inputs(256, 8, 2, head_dim=64, dtype=torch.bfloat16)
    inputs = Inputs(x.q.cuda(), x.k.cuda(), x.v.cuda(), x.dout.cuda())
    cut, whole = run_causal_tile(Cut(), inputs), run_causal_tile(kind(), inputs)
    for name in ("out", "lse"):
        torch.testing.assert_close(cut[name], whole[name], rtol=0.01, atol=0.01)  # bf16 resolution
    for name in ("dq", "dk", "dv"):
        assert (cut[name] - whole[name]).norm() <= 0.02 * whole[name].norm(), name


def flash_attention_2_sees(queries: int, keys: int, window: Window) -> Tensor:
    """[queries, keys] as mha_fwd and set_params_fprop of flash_api.cpp take a window."""
    left, right = (-1 if bound >= keys else bound for bound in window)
    left, right = (keys if left < 0 <= right else left), (keys if right < 0 <= left else right)
    corner, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen &= (j >= corner - left) if left >= 0 else seen
    return seen & ((j <= corner + right) if right >= 0 else seen)


def test_windows_that_flash_attention_2_would_mistake_are_cut_into_ones_that_it_does_not() -> None:
    """Every band of up to 8 queries and keys; with more queries than keys some windows mean something else to it."""
    cut = 0
    for rows, keys in itertools.product(range(1, 9), repeat=2):
        for low, high in itertools.product([-UNBOUNDED, *range(-8, 9), UNBOUNDED], repeat=2):
            for found in normalise(Band(0, rows, 0, keys, low, high)):
                nq, nk = found.num_queries, found.num_keys
                band = found.from_0()
                seen = torch.zeros(nq, nk, dtype=torch.bool)
                calls = window_calls(band)
                for part in calls:
                    window = Window(-1, 0) if part.is_causal else window_of(part)  # the flag becomes this one
                    seen[part.queries, part.keys] = flash_attention_2_sees(part.num_queries, part.num_keys, window)
                assert torch.equal(seen, band_mask(band)), band
                assert [call.q_start for call in calls[1:]] == [call.q_stop for call in calls[:-1]]
                cut += len(calls) > 1
                assert len(calls) == 1 or nq > nk
    assert cut > 100
