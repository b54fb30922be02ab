"""Without a GPU: kernels call torch's CUDA operators by their contracts."""

from __future__ import annotations

from collections.abc import Iterator

import operator_stand_in
import pytest
import torch
from attention_oracle import random_inputs

from engine.attention.kernels.base import BandSpec, TileGradients, TileResult
from engine.attention.kernels.cuda import AtenCudnnKernel, AtenFlashKernel, LibraryKernel
from engine.attention.kernels.efficient import AtenEfficientKernel
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.merge import backward_stats, surrogate_out
from engine.planning.sequence.mask import Band, normalise

KERNELS = [AtenFlashKernel, AtenCudnnKernel, AtenEfficientKernel]
TILES = {
    "full": (9, 9, None, None),
    "causal": (9, 9, 0, None),
    "more keys": (5, 40, None, None),
    "more queries": (40, 5, None, None),
    "one key": (7, 1, None, None),
    "one query": (1, 7, None, None),
    "window": (9, 9, 0, 3),
    "window of a later block": (9, 14, -8, -2),
    "lower bound": (12, 7, -2, None),
    "upper bound": (7, 12, None, 3),
    "more queries than a window's keys": (20, 8, 0, 12),
    "upper bound, many queries": (30, 4, None, 6),
    "several strips": (1100, 30, None, 1090),
}
TOLERANCE = 2e-5  # fp32 results of both


@pytest.fixture(autouse=True)
def operators_on_cpu() -> Iterator[None]:
    with operator_stand_in.on_cpu():
        yield


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KERNELS)
def test_forward_and_backward_equal_the_reference(kind: type[LibraryKernel], kv_heads: int, tile: tuple) -> None:
    """Backward from the lse over other keys besides, and from a stand-in for out."""
    rows, keys, low, high = tile
    for band in normalise(Band(0, rows, 0, keys, low, high)):
        spec = BandSpec(band.low, band.high)
        queries = random_inputs(band.num_queries, 4, kv_heads, 16, torch.float32)
        others = random_inputs(band.num_keys, 4, kv_heads, 16, torch.float32, seed=1)
        args = (queries.q, others.k, others.v, spec)
        out, lse = ReferenceKernel().forward(*args)
        torch.testing.assert_close(kind().forward(*args), (out, lse), rtol=TOLERANCE, atol=TOLERANCE)
        global_lse = lse + 0.5  # of more keys than the tile's
        stand_in = surrogate_out(queries.dout, backward_stats(queries.dout, 0.6 * out, global_lse))
        want = ReferenceKernel().backward(TileGradients(queries.dout, 0.6 * out, global_lse), *args)
        got = kind().backward(TileGradients(queries.dout, stand_in, global_lse), *args)
        torch.testing.assert_close(tuple(got), tuple(want), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KERNELS)
def test_strided_views_are_taken(kind: type[LibraryKernel]) -> None:
    """As the fields of one buffer: rows lie further apart than their own numbers."""
    x = random_inputs(12, 4, 2, 16, torch.float32)
    packed = torch.cat([x.q, x.k, x.v, x.dout], dim=1)
    q, k, v, dout = packed.split([4, 2, 2, 4], dim=1)
    band = BandSpec(0, None)
    out, lse = kind().forward(q, k, v, band)
    want = ReferenceKernel().forward(q, k, v, band)
    torch.testing.assert_close((out, lse), want, rtol=TOLERANCE, atol=TOLERANCE)
    spread = torch.stack([*want[:1], x.q], dim=2)[:, :, 0]
    got = kind().backward(TileGradients(dout, spread, want[1]), q, k, v, band)
    expected: TileResult = ReferenceKernel().backward(TileGradients(dout, want[0], want[1]), q, k, v, band)
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=TOLERANCE, atol=TOLERANCE)
