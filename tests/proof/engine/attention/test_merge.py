"""Merging, statistics and the surrogate: plain torch against a float64 softmax, Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention import merge

ROWS = 2 * merge.ROWS_PER_PASS + 5  # three passes, the last one short


def accumulators(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """[out, lse] of which every third row has seen no key yet."""
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    lse = (4 * torch.randn(rows, heads, generator=generator, dtype=torch.float64)).to(dtype)
    out[::3], lse[::3] = 0.0, -torch.inf
    return [out, lse]


def block(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, wide: torch.dtype, *, heads_first: bool, device="cpu"
):
    """(block_out, block_lse), contiguous or as a kernel that works heads first returns them."""
    generator = torch.Generator().manual_seed(2)
    out = torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    lse = (4 * torch.randn(rows, heads, generator=generator, dtype=torch.float64)).to(wide)
    if heads_first:
        return out.transpose(0, 1).contiguous().transpose(0, 1), lse.T.contiguous().T
    return out, lse


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance"),
    # Both sides see the same rounded inputs: what remains is fp32 arithmetic on values of size 4.
    [
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.float32, 2e-6),
    ],
)
def test_merge_is_the_weighted_mean_by_sums_of_exponentials(
    dtype: torch.dtype, wide: torch.dtype, tolerance: float, heads_first: bool
) -> None:
    out, lse = accumulators(ROWS, 3, 8, wide)
    block_out, block_lse = block(ROWS, 3, 8, dtype, wide, heads_first=heads_first)
    old, new = lse.double().exp()[..., None], block_lse.double().exp()[..., None]
    want = (old * out.double() + new * block_out.double()) / (old + new)
    want_lse = (old + new).log()[..., 0]
    merge.merge_tile(out, lse, block_out, block_lse)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=tolerance)


def test_rows_of_a_tile_without_keys_change_nothing() -> None:
    out, lse = accumulators(9, 2, 8, torch.float32)
    block_out, block_lse = block(9, 2, 8, torch.float32, torch.float32, heads_first=False)
    block_lse[::2] = -torch.inf  # every sixth row has seen no key before either
    before = out.clone(), lse.clone()
    merge.merge_tile(out, lse, block_out, block_lse)
    assert torch.equal(out[::2], before[0][::2])
    assert torch.equal(lse[::2], before[1][::2])
    assert torch.isfinite(lse[1::2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_surrogate_has_the_rowsum_of_out_across_passes(dtype: torch.dtype) -> None:
    dout, lse = block(ROWS, 2, 16, dtype, torch.float32, heads_first=False)
    out, _ = accumulators(ROWS, 2, 16, dtype)
    dout[5] = 0
    stats = merge.backward_stats(dout, out, lse)
    stand_in = merge.surrogate_out(dout, stats)
    assert stand_in.dtype == dtype
    assert torch.equal(stats[..., 0], lse)
    assert not stand_in[5].any()
    delta = (dout.double() * out.double()).sum(-1)
    assert torch.isfinite(stand_in).all()
    # Two roundings: of the fp32 sums that make the scale, and of the stand-in to its dtype.
    of_sums = 8 * torch.finfo(torch.float32).eps * (dout.double() * out.double()).abs().sum(-1)
    of_cast = torch.finfo(dtype).eps * (dout.double() * stand_in.double()).abs().sum(-1)
    assert (((dout.double() * stand_in.double()).sum(-1) - delta).abs() <= of_sums + of_cast).all()


def test_surrogate_of_a_narrow_dtype_needs_no_wide_copy_of_everything() -> None:
    """Rounded once, from the product in fp32, in every pass."""
    dout, lse = block(ROWS, 2, 16, torch.bfloat16, torch.float32, heads_first=True)
    stats = torch.stack((lse, lse + 0.3), -1)
    assert torch.equal(merge.surrogate_out(dout, stats), (dout.float() * stats[..., 1:]).to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 40])
@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance"),
    [
        (torch.bfloat16, torch.float32, 4e-6),
        (torch.float32, torch.float32, 4e-6),
        (torch.float64, torch.float64, 1e-12),
    ],
)
def test_triton_kernels_equal_plain_torch(
    dtype: torch.dtype, wide: torch.dtype, tolerance: float, head_dim: int, heads_first: bool
) -> None:
    pytest.importorskip("triton")
    state = accumulators(ROWS, 3, head_dim, wide)
    tile = block(ROWS, 3, head_dim, dtype, wide, heads_first=heads_first)
    on_gpu = [x.cuda() for x in state]
    layout = [x.transpose(0, 1).contiguous().transpose(0, 1) if heads_first else x for x in map(Tensor.cuda, tile)]
    merge.merge_tile(*state, *tile)
    merge.merge_tile(on_gpu[0], on_gpu[1], layout[0], layout[1])
    for mine, plain in zip(on_gpu, state, strict=True):
        torch.testing.assert_close(mine.cpu(), plain, rtol=tolerance, atol=tolerance)
    dout = tile[0].clone()
    dout[7] = 0
    out = state[0].to(dtype)
    stats = merge.backward_stats(dout.cuda(), out.cuda(), state[1].cuda())
    want = merge.backward_stats(dout, out, state[1])
    torch.testing.assert_close(stats.cpu(), want, rtol=1e-4, atol=tolerance)
    stand_in = merge.surrogate_out(dout.cuda(), want.cuda())
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(stand_in.cpu(), merge.surrogate_out(dout, want), rtol=rounding, atol=0)


@pytest.mark.gpu
def test_triton_kernels_reach_beyond_two_to_the_31_elements() -> None:
    rows, heads, head_dim = (1 << 31) // (8 * 128) + 64, 8, 128  # 8.6 GB in fp32 and 4.3 GB in bf16
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    out = torch.zeros(rows, heads, head_dim, device="cuda")
    lse = torch.full((rows, heads), -torch.inf, device="cuda")
    tile = torch.ones(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    merge.merge_tile(out, lse, tile, torch.zeros(rows, heads, device="cuda"))
    assert bool((out[-64:] == 1).all())
    assert bool((lse[-64:] == 0).all())
    assert float(out[::4096].sum()) == out[::4096].numel()
