"""The kernels on a GPU: the checks of the interpreter and larger ones, more than 2^31 elements, and their speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from testkit import kernel_checks as checks
from testkit.kernel_checks import CASES, name_of
from testkit.kernel_model import loss_and_gradients

from benchmarks.gpu.elementwise import bench_elementwise
from engine.config.settings import LossConfig
from engine.kernels.dispatch import uses_triton
from engine.loss.fused import linear_cross_entropy, losses_of_logits
from engine.model.elementwise import rms_norm, swiglu
from engine.model.rope import apply_rope

pytestmark = pytest.mark.gpu

LARGE: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (checks.check_rms_norm, ("bfloat16", 5000, 4096)),
    (checks.check_rms_norm, ("float32", 80000, 128)),
    (checks.check_rms_norm, ("bfloat16", 1000, 16384)),
    (checks.check_add_rms_norm, ("bfloat16", 1, 2000, 5120)),
    (checks.check_add_rms_norm, ("float32", 2, 500, 8192)),
    (checks.check_swiglu, ("bfloat16", 1500, 14336)),
    (checks.check_rope, ("bfloat16", 1, 5000, 32, 128)),
    (checks.check_loss, ("bfloat16", 256, 128256, 0.0001)),
    (checks.check_loss, ("float32", 300, 50257, 0.0)),
    (checks.check_sliced_loss, ("bfloat16", 64, 16032, 8)),
    (checks.check_merge, ("bfloat16", "float32", 1000, 32, 128)),
    (checks.check_surrogate, ("bfloat16", "float32", 1000, 32, 128)),
]
BEYOND = 2**31


@pytest.mark.parametrize(("check", "sizes"), [*CASES, *LARGE], ids=name_of)
def test_kernels_on_a_gpu_give_what_the_formulas_give(check: Callable[..., None], sizes: tuple[Any, ...]) -> None:
    assert uses_triton(torch.zeros(1, device="cuda"))
    check("cuda", *sizes)


@pytest.mark.parametrize(("tile_tokens", "dropout"), [(None, 0.0), (5, 0.3)])
def test_a_model_on_a_gpu_has_the_gradients_of_the_cpu(tile_tokens: int | None, dropout: float) -> None:
    ours, want = (loss_and_gradients(device, tile_tokens, dropout) for device in ("cuda", "cpu"))
    for name, reference in want.items():
        torch.testing.assert_close(ours[name], reference, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def large(*shape: int) -> torch.Tensor:
    """Ones in bf16, of which the last row is 2; 4.3 GB for 2^31 elements."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")  # 2^31 elements cannot be made smaller
    x = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    x[..., -1, :] = 2.0
    return x


def test_norms_reach_beyond_two_to_the_31_elements() -> None:
    width = 4096
    x = large(BEYOND // width + 5, width).requires_grad_()
    weight = torch.full((width,), 3.0, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    normed = rms_norm(x, weight, 0.0)
    assert bool((normed == 3.0).all())
    dx, dweight = torch.autograd.grad(normed, (x, weight), torch.ones_like(normed))
    assert float(dx.abs().max()) < 1e-5  # a longer row has the same direction
    assert bool(((dweight.float() - x.shape[0]).abs() <= x.shape[0] / 128).all())


def test_swiglu_reaches_beyond_two_to_the_31_elements() -> None:
    x = large(1, BEYOND // 4096 + 5, 4096)
    assert bool((swiglu(x, x)[0, -1] == torch.tensor(4 / (1 + 0.1353352832)).bfloat16()).all())


def test_rope_reaches_beyond_two_to_the_31_elements() -> None:
    heads, head_dim = 32, 128
    x = large(1, BEYOND // (heads * head_dim) + 5, heads * head_dim)
    quarter = torch.zeros(x.shape[1], head_dim // 2, device="cuda")
    turned = apply_rope(x.view(1, -1, heads, head_dim), quarter, quarter + 1)
    assert bool((turned[0, -1, :, : head_dim // 2] == -2).all())
    assert bool((turned[0, -1, :, head_dim // 2 :] == 2).all())


def test_losses_reach_beyond_two_to_the_31_elements() -> None:
    vocab = 128256
    logits = large(BEYOND // vocab + 5, vocab)
    labels = torch.full((logits.shape[0],), vocab - 1, device="cuda")
    losses = losses_of_logits(logits, labels, LossConfig(), overwrite=True)
    torch.testing.assert_close(losses, torch.full_like(losses, vocab).log(), rtol=1e-5, atol=0)
    assert bool((logits[-1, :-1] > 0).all())
    assert logits[-1, -1] == -1


def test_long_loss_fits_where_the_plain_one_cannot() -> None:
    free, _ = torch.cuda.mem_get_info()
    rows, vocab, size = 65536, 128256, 512
    assert rows * vocab * 12 > free / 2  # plain: bf16 logits, fp32 logits, their softmax and gradient
    hidden = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, options=LossConfig()).backward()
    chunk_bytes, weight_bytes = 2048 * vocab * 2, vocab * size * 4
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes  # whose gradient is there once
    assert extra <= chunk_bytes + weight_bytes + 2**26  # no copy of a block, no product or gradient beside its sum


def test_no_kernel_is_slower_than_the_operations_of_torch() -> None:
    rows = bench_elementwise(torch.device("cuda"))
    slower = [row for row in rows if "error" in row or row["speedup"] < 0.95]  # medians of ten vary by some percent
    assert not slower, slower
