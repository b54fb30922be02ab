"""The fused loss against the plain one: values, gradients, edge cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.operations import Operations
from torch import Tensor

from benchmarks.plain_loss import cross_entropy_plain
from engine.config.settings import LossConfig
from engine.data.sampler import IGNORE_INDEX
from engine.loss.fused import linear_cross_entropy
from engine.loss.head import LMHead

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64 sums of a few hundred terms in another order


def make_inputs(rows: int, vocab: int, size: int, *, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [rows, size], weight [vocab, size], both float64 with gradient, and labels [rows]."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, size, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, size, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def value_and_gradients(function: Any, inputs: tuple[Tensor, Tensor, Tensor], scale: float, **options: Any) -> Any:
    """(loss, dhidden, dweight) of `scale * function(...)`."""
    hidden, weight, labels = inputs
    loss = function(hidden, weight, labels, options=LossConfig(**options))
    return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.parametrize(("rows", "vocab", "size"), [(37, 101, 5), (16, 3, 8), (1, 11, 4)])
def test_fused_equals_plain_in_float64(rows: int, vocab: int, size: int, z_loss: float, chunk_tokens: int) -> None:
    inputs = make_inputs(rows, vocab, size)
    fused = value_and_gradients(linear_cross_entropy, inputs, -0.37, z_loss=z_loss, chunk_tokens=chunk_tokens)
    plain = value_and_gradients(cross_entropy_plain, inputs, -0.37, z_loss=z_loss)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_plain_is_the_textbook_formula() -> None:
    hidden, weight, labels = make_inputs(9, 13, 4)
    lse = (hidden @ weight.T).exp().sum(-1).log()
    picked = (hidden * weight[labels.clamp(min=0)]).sum(-1)
    expected = ((lse - picked + 0.5 * lse**2) * (labels != IGNORE_INDEX)).sum()
    torch.testing.assert_close(
        cross_entropy_plain(hidden, weight, labels, options=LossConfig(z_loss=0.5)), expected, **EXACT
    )


def test_many_softmax_blocks_equal_plain() -> None:
    inputs = make_inputs(300, 4099, 3)  # more than two blocks of 2**19 elements per chunk
    fused = value_and_gradients(linear_cross_entropy, inputs, 1.0, chunk_tokens=290)
    plain = value_and_gradients(cross_entropy_plain, inputs, 1.0)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_large_logits_stay_finite_and_exact() -> None:
    hidden, weight, labels = make_inputs(20, 30, 6, ignored=0.0)
    inputs = ((hidden.detach() * 300).requires_grad_(), weight, labels)
    fused = value_and_gradients(linear_cross_entropy, inputs, 1.0, chunk_tokens=8)
    plain = value_and_gradients(cross_entropy_plain, inputs, 1.0)
    assert plain[0] > 1e3  # probabilities of most labels underflow
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_second_backward_is_refused(retain_graph: bool) -> None:
    loss = linear_cross_entropy(*make_inputs(8, 9, 4), options=LossConfig())
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="gave its gradients away in its first backward pass"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient_and_the_other_its_own(frozen: str) -> None:
    hidden, weight, labels = make_inputs(10, 12, 4)
    gradients = value_and_gradients(cross_entropy_plain, (hidden, weight, labels), 1.0)[1:]
    expected = dict(zip(("hidden", "weight"), gradients, strict=True))
    tensors = {"hidden": hidden.detach().requires_grad_(), "weight": weight.detach().requires_grad_()}
    tensors[frozen].requires_grad_(False)
    linear_cross_entropy(**tensors, labels=labels, options=LossConfig(chunk_tokens=4)).backward()
    (other,) = {"hidden", "weight"} - {frozen}
    assert tensors[frozen].grad is None
    torch.testing.assert_close(tensors[other].grad, expected[other], **EXACT)


@pytest.mark.parametrize("rows", [0, 5])
def test_no_counted_row_gives_zero_loss_and_zero_gradients(rows: int) -> None:
    hidden, weight, labels = make_inputs(rows, 6, 4, ignored=1.1)
    loss, dhidden, dweight = value_and_gradients(linear_cross_entropy, (hidden, weight, labels), 1.0, z_loss=0.1)
    assert loss == 0
    assert dhidden.shape == (rows, 4)
    assert not dhidden.any()
    assert dweight.shape == (6, 4)
    assert not dweight.any()


def count_matmuls(hidden: Tensor, weight: Tensor, labels: Tensor) -> int:
    """Matmuls of forward and, if there is one, backward, over three chunks."""
    done: list[Any] = []
    with Operations(lambda func, *_: done.append(func.overloadpacket)):
        loss = linear_cross_entropy(hidden, weight, labels, options=LossConfig(chunk_tokens=4))
        if loss.requires_grad:
            loss.backward()
    return sum(map(done.count, (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)))


def test_three_matmuls_per_chunk_in_training_and_one_in_evaluation() -> None:
    hidden, weight, labels = make_inputs(12, 9, 4)
    assert count_matmuls(hidden, weight, labels) == 3 * 3
    assert count_matmuls(hidden.detach(), weight.detach(), labels) == 3
    with torch.no_grad():
        assert count_matmuls(hidden, weight, labels) == 3
    assert count_matmuls(hidden, weight.detach(), labels) == 3 * 2


def test_evaluation_has_the_value_of_training() -> None:
    hidden, weight, labels = make_inputs(12, 9, 4)
    options = LossConfig(chunk_tokens=5, z_loss=0.2)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, weight, labels, options=options)
    assert torch.equal(evaluated, linear_cross_entropy(hidden, weight, labels, options=options).detach())


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`."""
    return float((value.double() - exact).norm() / exact.norm())


def test_bfloat16_errors_do_not_exceed_those_of_the_plain_loss() -> None:
    hidden, weight, labels = make_inputs(600, 500, 64)
    low = tuple((t.detach() * s).bfloat16().requires_grad_() for t, s in ((hidden, 1.0), (weight, 0.1)))
    exact_inputs = tuple(t.detach().double().requires_grad_() for t in low)
    scale = 1.0 / 480  # not a power of two: the scalar must not be rounded to bfloat16
    exact = value_and_gradients(cross_entropy_plain, (*exact_inputs, labels), scale)
    fused = value_and_gradients(linear_cross_entropy, (*low, labels), scale, chunk_tokens=128)
    plain = value_and_gradients(cross_entropy_plain, (*low, labels), scale)
    assert fused[0].dtype == torch.float32
    assert [g.dtype for g in fused[1:]] == [torch.bfloat16, torch.bfloat16]
    # Logits are rounded to bf16 by both; 1.3: room for the second rounding of gradients (made, then scaled).
    for ours, theirs, reference in zip(fused, plain, exact, strict=True):
        assert relative_error(ours, reference) <= 1.3 * relative_error(theirs, reference) + 1e-6


@pytest.mark.parametrize("wider", [torch.float32, torch.float64])
def test_weight_of_a_wider_dtype_gets_its_gradient_in_that_dtype(wider: torch.dtype) -> None:
    hidden, weight, labels = make_inputs(40, 30, 8)
    low, master = hidden.detach().bfloat16().requires_grad_(), weight.detach().to(wider).requires_grad_()
    linear_cross_entropy(low, master, labels, options=LossConfig()).backward()
    exact = value_and_gradients(cross_entropy_plain, (hidden, weight, labels), 1.0)
    assert master.grad is not None
    assert low.grad is not None
    assert (master.grad.dtype, low.grad.dtype) == (wider, torch.bfloat16)
    assert relative_error(master.grad, exact[2]) < 2e-2  # bf16 logits: 2**-8 of values up to 4


@pytest.mark.parametrize("vocab", [3, 3001])  # one slice; two of several blocks each
def test_gradient_of_a_narrow_weight_is_that_of_a_wide_one_rounded_once(vocab: int) -> None:
    hidden, weight, labels = make_inputs(12, vocab, 1024)
    low = weight.detach().bfloat16()
    narrow, wide = (
        value_and_gradients(linear_cross_entropy, (hidden.bfloat16(), of_dtype, labels), 1 / 3)[2]
        for of_dtype in (low.requires_grad_(), low.detach().float().requires_grad_())
    )
    assert torch.equal(narrow, wide.bfloat16())


def test_labels_of_another_shape_are_refused() -> None:
    head = LMHead(3, 5, LossConfig())
    with pytest.raises(ValueError, match=r"hidden \(2, 4, 3\) and labels \(2, 3\)"):
        head(torch.zeros(2, 4, 3), torch.zeros(2, 3, dtype=torch.int64))


def test_head_sums_over_the_batch() -> None:
    hidden, weight, labels = make_inputs(12, 9, 4)
    head = LMHead(4, 9, LossConfig(chunk_tokens=5, z_loss=0.1)).double()
    with torch.no_grad():
        head.weight.copy_(weight)
    loss = head(hidden.view(3, 4, 4), labels.view(3, 4))
    expected = cross_entropy_plain(hidden, weight, labels, options=LossConfig(z_loss=0.1))
    torch.testing.assert_close(loss, expected, **EXACT)
