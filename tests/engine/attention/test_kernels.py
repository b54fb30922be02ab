"""Kernels agree with the float64 reference on rectangular tiles, bands and grouped heads; the right one is chosen."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import random_inputs

from engine.attention.kernels import choose_kernel
from engine.attention.kernels.base import BandSpec, TileGradients
from engine.attention.kernels.cpu_flash import CpuFlashKernel
from engine.attention.kernels.reference import ReferenceKernel
from engine.config.errors import ConfigError

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


def test_reference_backward_is_the_gradient_of_its_forward() -> None:
    inputs = random_inputs(7, 4, 2, head_dim=4)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = ReferenceKernel().forward(*leaves, BandSpec(0, None))
    expected = torch.autograd.grad(out, leaves, inputs.dout)
    grads = TileGradients(inputs.dout, out.detach(), lse.detach())
    got = ReferenceKernel().backward(grads, inputs.q, inputs.k, inputs.v, BandSpec(0, None))
    torch.testing.assert_close(tuple(got), expected, rtol=0, atol=1e-12)


def test_auto_takes_the_cpu_kernel_on_cpu() -> None:
    assert choose_kernel("auto", CPU, torch.bfloat16, 64).name == "cpu_flash"


@pytest.mark.parametrize("name", ["aten_flash", "aten_cudnn", "flash_attn"])
def test_a_cuda_kernel_on_cpu_is_refused_with_the_legal_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"runs on cuda only.*legal here: reference, cpu_flash"):
        choose_kernel(name, CPU, torch.bfloat16, 64)  # type: ignore[arg-type]
