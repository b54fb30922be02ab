"""Tiles too large for one call of a CUDA kernel are computed in parts of their heads, with the same result."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import random_inputs
from torch import Tensor

from engine.attention.counting import band_mask
from engine.attention.kernels.base import BandSpec, TileGradients, TileResult
from engine.attention.kernels.cuda import (
    MAX_ELEMENTS,
    AtenCudnnKernel,
    AtenFlashKernel,
    _CudaKernel,
    split_heads,
    window_of,
)
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.mask import Band, normalise

ROWS, HEADS, HEAD_DIM = 6, 12, 4


class LimitedKernel(_CudaKernel):
    """The reference behind the cutting of the CUDA kernels; refuses what is too large, notes every call's heads."""

    def __init__(self, max_elements: int) -> None:
        super().__init__(max_elements)
        self.limit = max_elements
        self.calls: list[tuple[int, int]] = []

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        self._note(q, k, v)
        return ReferenceKernel().forward(q, k, v, band)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        self._note(grads.dout, grads.out, q, k, v)
        return ReferenceKernel().backward(grads, q, k, v, band)

    def _note(self, *tensors: Tensor) -> None:
        for x in tensors:
            reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
            assert reach <= self.limit, (x.shape, x.stride())
        self.calls.append((tensors[-3].shape[1], tensors[-2].shape[1]))


@pytest.mark.parametrize("band", [BandSpec(), BandSpec(0, None)], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [12, 4, 1])
@pytest.mark.parametrize("heads_per_call", [1, 2, 3, 5, 11, 12])
def test_parts_of_the_heads_give_the_whole_tile(heads_per_call: int, kv_heads: int, band: BandSpec) -> None:
    x = random_inputs(ROWS, HEADS, kv_heads, HEAD_DIM)
    kernel = LimitedKernel(heads_per_call * ROWS * HEAD_DIM)
    out, lse = kernel.forward(x.q, x.k, x.v, band)
    want = ReferenceKernel().forward(x.q, x.k, x.v, band)
    torch.testing.assert_close((out, lse), want, rtol=0, atol=1e-12)
    grads = TileGradients(x.dout, out, lse)
    got = kernel.backward(grads, x.q, x.k, x.v, band)
    torch.testing.assert_close(
        tuple(got), tuple(ReferenceKernel().backward(grads, x.q, x.k, x.v, band)), rtol=0, atol=1e-12
    )
    assert (len(kernel.calls) > 2) == (heads_per_call < HEADS)
    assert sum(queries for queries, _ in kernel.calls) == 2 * HEADS


def test_more_keys_than_queries_count_with_the_query_heads() -> None:
    q, k = torch.empty(2, 8, 4, device="meta"), torch.empty(10, 2, 4, device="meta")
    parts = split_heads(q, k, max_elements=4 * 10 * 4)
    assert [(part.queries, part.keys) for part in parts] == [
        (slice(0, 4), slice(0, 1)),
        (slice(4, 8), slice(1, 2)),
    ]


def test_bf16_gradients_of_a_shared_kv_head_are_summed_in_fp32() -> None:
    x = random_inputs(ROWS, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    kernel = LimitedKernel(3 * ROWS * HEAD_DIM)
    out, lse = kernel.forward(x.q, x.k, x.v, BandSpec())
    result = kernel.backward(TileGradients(x.dout, out, lse), x.q, x.k, x.v, BandSpec())
    assert (result.dk.dtype, result.dv.dtype, result.dq.dtype) == (torch.float32, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("kind", [AtenFlashKernel, AtenCudnnKernel])
@pytest.mark.parametrize(("rows", "parts"), [((1 << 20) - 1, 1), (1 << 20, 2), (3 << 20, 4)])
def test_real_operators_are_cut_at_two_to_the_31_elements(kind: type[_CudaKernel], rows: int, parts: int) -> None:
    """On meta tensors: 16 heads of 128 reach the limit at 2^20 rows."""
    shapes: list[torch.Size] = []

    class Noting(kind):  # type: ignore[valid-type,misc]
        def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
            shapes.append(q.shape)
            return super()._forward(q, k, v, band)

        def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
            shapes.append(q.shape)
            return super()._backward(grads, q, k, v, band)

    q = torch.empty(rows, 16, 128, device="meta", dtype=torch.bfloat16)
    k, v = (torch.empty(rows, 4, 128, device="meta", dtype=torch.bfloat16) for _ in range(2))
    kernel = Noting()
    out, lse = kernel.forward(q, k, v, BandSpec(0, None))
    grads = kernel.backward(TileGradients(q, out, lse), q, k, v, BandSpec(0, None))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert len(shapes) == 2 * parts
    assert all(shape.numel() <= MAX_ELEMENTS for shape in shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AtenFlashKernel, AtenCudnnKernel])
def test_cut_tiles_equal_whole_ones_on_the_gpu(kind: type[_CudaKernel]) -> None:
    x = random_inputs(256, 8, 2, head_dim=64, dtype=torch.bfloat16)
    q, k, v, dout = (tensor.cuda() for tensor in (x.q, x.k, x.v, x.dout))
    whole, cut = kind(), kind(3 * 256 * 64)
    out, lse = whole.forward(q, k, v, BandSpec(0, None))
    for mine, theirs in zip(cut.forward(q, k, v, BandSpec(0, None)), (out, lse), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01)  # bf16 resolution
    grads = TileGradients(dout, out, lse)
    pairs = zip(
        cut.backward(grads, q, k, v, BandSpec(0, None)), whole.backward(grads, q, k, v, BandSpec(0, None)), strict=True
    )
    for mine, theirs in pairs:
        assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()


@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (5, 12), (12, 5)])
def test_a_band_is_the_window_of_the_same_queries_and_keys(rows: int, keys: int) -> None:
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
    for low in (None, *range(-4, 5)):
        for high in (None, *range(-4, 5)):
            bands = normalise(Band(0, rows, 0, keys, low, high)) if low is None or high is None or low <= high else []
            for band in bands:
                if band.is_causal:
                    continue
                nq, nk = band.num_queries, band.num_keys
                window = window_of(BandSpec(band.low, band.high), nq, nk)
                corner = i[:nq] + nk - nq
                seen = (window.left < 0) | (j[:, :nk] >= corner - window.left)
                seen = seen & ((window.right < 0) | (j[:, :nk] <= corner + window.right))
                assert torch.equal(seen.expand(nq, nk), band_mask(nq, nk, band.low, band.high)), band


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [AtenFlashKernel, AtenCudnnKernel])
@pytest.mark.parametrize(
    ("rows", "keys", "low", "high"), [(512, 512, 0, 99), (300, 700, -650, 20), (700, 300, -10, 500)]
)
def test_windows_on_a_gpu_equal_the_reference(
    kernel: type[_CudaKernel], rows: int, keys: int, low: int, high: int
) -> None:
    for band in normalise(Band(0, rows, 0, keys, low, high)):
        nq, nk, spec = band.num_queries, band.num_keys, BandSpec(band.low, band.high)
        queries = random_inputs(nq, 8, 8, 64, torch.bfloat16)
        others = random_inputs(nk, 8, 2, 64, torch.bfloat16)
        q, dout, k, v = (x.cuda() for x in (queries.q, queries.dout, others.k, others.v))
        out, lse = kernel().forward(q, k, v, spec)
        want_out, want_lse = ReferenceKernel().forward(q, k, v, spec)
        torch.testing.assert_close(out, want_out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
        grads = TileGradients(dout, want_out, want_lse)
        got, want = kernel().backward(grads, q, k, v, spec), ReferenceKernel().backward(grads, q, k, v, spec)
        for mine, reference in zip(got, want, strict=True):
            assert (mine.double() - reference.double()).norm() <= 2e-2 * reference.double().norm()
