"""Kernels agree with the float64 reference on rectangular tiles, bands and grouped heads; the right one is chosen."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import random_inputs

from engine.attention.kernels import KERNELS, choose_kernel
from engine.attention.kernels.base import BandSpec, TileGradients
from engine.attention.kernels.cpu_flash import CpuFlashKernel
from engine.attention.kernels.cuda import AtenCudnnKernel, AtenFlashKernel, FlashAttnKernel
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.merge import backward_stats, merge_tile, surrogate_out
from engine.errors import ConfigError

CPU = torch.device("cpu")
BANDS = [BandSpec(), BandSpec(0, None), BandSpec(-3, 4), BandSpec(None, 2)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_cpu_flash_equals_the_reference(band: BandSpec, kv_heads: int) -> None:
    rows = 17
    inputs = random_inputs(rows, 6, kv_heads, head_dim=16)
    args = (inputs.q, inputs.k, inputs.v, band)
    out, lse = CpuFlashKernel().forward(*args)
    want_out, want_lse = ReferenceKernel().forward(*args)
    torch.testing.assert_close((out, lse), (want_out, want_lse), rtol=0, atol=1e-12)
    grads = TileGradients(inputs.dout, want_out, want_lse)
    got = CpuFlashKernel().backward(grads, *args)
    torch.testing.assert_close(tuple(got), tuple(ReferenceKernel().backward(grads, *args)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (9, 1), (5, 33), (1, 1)])
def test_rectangular_full_tiles_agree(queries: int, keys: int) -> None:
    q, kv = random_inputs(queries, 4, 2), random_inputs(keys, 4, 2, seed=1)
    got = CpuFlashKernel().forward(q.q, kv.k, kv.v, BandSpec())
    torch.testing.assert_close(got, ReferenceKernel().forward(q.q, kv.k, kv.v, BandSpec()), rtol=0, atol=1e-12)


def test_reference_backward_is_the_gradient_of_its_forward() -> None:
    inputs = random_inputs(7, 4, 2, head_dim=4)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = ReferenceKernel().forward(*leaves, BandSpec(0, None))
    expected = torch.autograd.grad(out, leaves, inputs.dout)
    grads = TileGradients(inputs.dout, out.detach(), lse.detach())
    got = ReferenceKernel().backward(grads, inputs.q, inputs.k, inputs.v, BandSpec(0, None))
    torch.testing.assert_close(tuple(got), expected, rtol=0, atol=1e-12)


def test_surrogate_has_the_rowsum_of_out_and_is_zero_without_gradient() -> None:
    inputs = random_inputs(9, 3, 3)
    dout = inputs.dout.clone()
    dout[4] = 0
    stats = backward_stats(dout, inputs.q, torch.zeros(9, 3, dtype=torch.float64))
    stand_in = surrogate_out(dout, stats)
    torch.testing.assert_close((dout * stand_in).sum(-1), (dout * inputs.q).sum(-1), rtol=0, atol=1e-12)
    assert not stand_in[4].any()


def test_merging_tiles_equals_one_softmax_in_any_order() -> None:
    inputs = random_inputs(12, 4, 4)
    kernel = ReferenceKernel()
    want = kernel.forward(inputs.q, inputs.k, inputs.v, BandSpec())
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = torch.zeros_like(inputs.q), torch.full((12, 4), -torch.inf, dtype=torch.float64)
        for part in order:
            keys = slice(4 * part, 4 * part + 4)
            merge_tile(out, lse, *kernel.forward(inputs.q, inputs.k[keys], inputs.v[keys], BandSpec()))
        torch.testing.assert_close((out, lse), want, rtol=0, atol=1e-12)


def test_auto_takes_the_cpu_kernel_on_cpu() -> None:
    assert choose_kernel("auto", CPU, torch.bfloat16, 64).name == "cpu_flash"


@pytest.mark.parametrize("name", ["aten_flash", "aten_cudnn", "flash_attn"])
def test_a_cuda_kernel_on_cpu_is_refused_with_the_legal_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"runs on cuda only.*legal here: reference, cpu_flash"):
        choose_kernel(name, CPU, torch.bfloat16, 64)  # type: ignore[arg-type]


def test_every_registered_kernel_bears_its_own_name() -> None:
    assert all(kernel().name == name for name, kernel in KERNELS.items())


@pytest.mark.parametrize("kernel", [AtenFlashKernel(), AtenCudnnKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("band", [BandSpec(), BandSpec(0, None)], ids=["full", "causal"])
def test_cuda_ops_accept_our_arguments_and_return_our_shapes(kernel, band: BandSpec) -> None:
    """Without a GPU: the operators' own shape functions run on meta tensors (signatures, ranks, dtypes)."""
    rows, heads, kv_heads, dim = 128, 8, 2, 64
    q = torch.empty(rows, heads, dim, device="meta", dtype=torch.bfloat16)
    k, v = (torch.empty(rows, kv_heads, dim, device="meta", dtype=torch.bfloat16) for _ in range(2))
    out, lse = kernel.forward(q, k, v, band)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (torch.Size([rows, heads]), torch.float32)
    grads = kernel.backward(TileGradients(q, out, lse), q, k, v, band)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_missing_flash_attn_package_is_named() -> None:
    if FlashAttnKernel.is_installed():
        assert choose_kernel("flash_attn", torch.device("cuda"), torch.bfloat16, 64).name == "flash_attn"
        return
    with pytest.raises(ConfigError, match="flash-attn package is not installed"):
        choose_kernel("flash_attn", torch.device("cuda"), torch.bfloat16, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["aten_flash", "aten_cudnn"])
@pytest.mark.parametrize("band", [BandSpec(), BandSpec(0, None)], ids=["full", "causal"])
def test_cuda_kernels_equal_the_reference(name: str, band: BandSpec) -> None:
    device = torch.device("cuda")
    kernel = choose_kernel(name, device, torch.bfloat16, 64)  # type: ignore[arg-type]
    inputs = random_inputs(256, 8, 2, head_dim=64, dtype=torch.bfloat16)
    q, k, v, dout = (x.to(device) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    want_out, want_lse = ReferenceKernel().forward(q, k, v, band)
    out, lse = kernel.forward(q, k, v, band)
    torch.testing.assert_close(out, want_out, rtol=0.02, atol=0.02)  # bf16 resolution
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    stand_in = surrogate_out(dout, backward_stats(dout, want_out, want_lse))
    grads = TileGradients(dout, stand_in, want_lse)
    want = ReferenceKernel().backward(TileGradients(dout, want_out, want_lse), q, k, v, band)
    for mine, theirs in zip(kernel.backward(grads, q, k, v, band), want, strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()
