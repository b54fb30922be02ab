"""What takes another path on CUDA: the fused loss's weight gradient, RMSNorm's kernel, larger blocks."""

from __future__ import annotations

import pytest
import torch
from model_helpers import SHAPES, build, make_tokens, visible_attention
from torch import Tensor

from engine.loss.fused import linear_cross_entropy
from engine.loss.options import LossOptions
from engine.loss.plain import cross_entropy_plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = 40


def loss_results(function, dtype: torch.dtype, device: str) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """[loss, dhidden, dweight] in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 256, generator=generator).bfloat16().to(device, dtype).requires_grad_()
    weight = torch.randn(3000, 256, generator=generator).mul(0.1).bfloat16().to(device, dtype).requires_grad_()
    labels = torch.randint(0, 3000, (700,), generator=generator).to(device)
    labels[::9] = -100
    loss = function(hidden, weight, labels, options=LossOptions(chunk_tokens=256, z_loss=0.01))
    return [t.double().cpu() for t in (loss.detach(), *torch.autograd.grad(loss / 600, (hidden, weight)))]


def test_fused_loss_is_exact_in_float64() -> None:
    exact = loss_results(cross_entropy_plain, torch.float64, "cpu")
    for ours, expected in zip(loss_results(linear_cross_entropy, torch.float64, "cuda"), exact, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_fused_loss_in_bfloat16_errs_no_more_than_the_plain_one() -> None:
    exact = loss_results(cross_entropy_plain, torch.float64, "cpu")
    fused, plain = (loss_results(f, torch.bfloat16, "cuda") for f in (linear_cross_entropy, cross_entropy_plain))
    # 1.3: room for the second rounding of gradients (made, then scaled).
    for ours, theirs, reference in zip(fused, plain, exact, strict=True):
        assert (ours - reference).norm() <= 1.3 * (theirs - reference).norm() + 1e-6 * reference.norm()


def test_long_loss_fits_where_the_plain_one_cannot() -> None:
    free, _ = torch.cuda.mem_get_info()
    rows, vocab, size = 65536, 128256, 512
    assert rows * vocab * 12 > free / 2  # plain: bf16 logits, fp32 logits, their softmax and gradient
    hidden = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, options=LossOptions()).backward()
    chunk_bytes, weight_bytes = 2048 * vocab * 2, vocab * size * 4
    extra = torch.cuda.max_memory_allocated() - before - 2 * hidden.nbytes
    assert extra <= chunk_bytes + 2 * weight_bytes + 2**26  # no copy of a block, no product beside its sum


@pytest.mark.parametrize("shape", SHAPES)
def test_model_gives_on_cuda_what_it_gives_on_the_cpu(shape: str) -> None:
    config = SHAPES[shape]
    tokens, positions = make_tokens(config, 2, TOKENS), torch.arange(TOKENS) + 1000
    results = []
    for device in ("cpu", "cuda"):
        model = build(config).to(device)
        visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).tril()
        hidden = model(tokens.to(device), positions.to(device), visible_attention(visible))
        model.head(hidden, tokens.to(device)).backward()
        results.append([hidden.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    for on_cpu, on_cuda in zip(*results, strict=True):
        # fp32 sums in another order; relative to the tensor's size, since single elements may cancel.
        assert (on_cuda - on_cpu).norm() <= 1e-4 * on_cpu.norm()
