"""The fused loss against the plain one: values, gradients, edge cases."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from testkit.loss_cases import assert_exact, in_dtype, make_inputs, relative_error, value_and_gradients
from testkit.operations import Operations
from torch import Tensor

from benchmarks.plain_loss import cross_entropy_plain
from engine.config.settings import LossConfig
from engine.data.sampler import IGNORE_INDEX
from engine.loss.fused import linear_cross_entropy
from engine.loss.head import LMHead

SIZES = product([(37, 101, 5), (16, 3, 8), (1, 11, 4)], [0.0, 0.03], [1, 7, 16, 1000], [{}])
CASES: list[tuple[tuple[int, int, int], float, int, dict[str, float]]] = [
    *SIZES,
    ((300, 4099, 3), 0.0, 290, {}),  # more than two blocks of 2**19 elements per chunk
    ((20, 30, 6), 0.0, 8, {"ignored": 0.0, "spread": 300.0}),  # probabilities of most labels underflow
    ((0, 6, 4), 0.1, 2048, {}),
    ((5, 6, 4), 0.1, 2048, {"ignored": 1.1}),
]


@pytest.mark.parametrize(("sizes", "z_loss", "chunk_tokens", "kind"), CASES)
def test_fused_equals_plain_in_float64(
    sizes: tuple[int, int, int], z_loss: float, chunk_tokens: int, kind: dict[str, float]
) -> None:
    inputs = make_inputs(*sizes, **kind)
    fused = value_and_gradients(linear_cross_entropy, inputs, -0.37, z_loss=z_loss, chunk_tokens=chunk_tokens)
    assert_exact(fused, value_and_gradients(cross_entropy_plain, inputs, -0.37, z_loss=z_loss))
    if kind.get("ignored") == 1.1:
        assert not any(tensor.any() for tensor in fused)


def test_plain_is_the_textbook_formula() -> None:
    hidden, weight, labels = make_inputs(9, 13, 4)
    lse = (hidden @ weight.T).exp().sum(-1).log()
    picked = (hidden * weight[labels.clamp(min=0)]).sum(-1)
    expected = ((lse - picked + 0.5 * lse**2) * (labels != IGNORE_INDEX)).sum()
    assert_exact([cross_entropy_plain(hidden, weight, labels, options=LossConfig(z_loss=0.5))], [expected])


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_second_backward_is_refused(retain_graph: bool) -> None:
    loss = linear_cross_entropy(*make_inputs(8, 9, 4), options=LossConfig())
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="a second backward pass through the same loss"):
        loss.backward()


def matmuls(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[int, Tensor]:
    """(products of forward and, if there is one, backward, over three chunks; the loss)."""
    done: list[Any] = []
    with Operations(lambda func, *_: done.append(func.overloadpacket)):
        loss = linear_cross_entropy(hidden, weight, labels, options=LossConfig(chunk_tokens=4, z_loss=0.2))
        if loss.requires_grad:
            loss.backward()
    return sum(map(done.count, (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_))), loss.detach()


def test_a_chunk_costs_a_matmul_plus_one_per_gradient() -> None:
    hidden, weight, labels = make_inputs(12, 9, 4)
    count, expected = matmuls(hidden, weight, labels)
    assert count == 3 * 3
    assert matmuls(hidden.detach(), weight.detach(), labels) == (3, expected)
    with torch.no_grad():
        assert matmuls(hidden, weight, labels) == (3, expected)


def test_gradients_of_frozen_inputs_are_not_computed() -> None:
    hidden, weight, labels = make_inputs(12, 9, 4)
    matmuls(hidden, weight, labels)
    both = {"hidden": hidden.grad, "weight": weight.grad}
    for frozen in both:
        tensors = {"hidden": hidden.detach().requires_grad_(), "weight": weight.detach().requires_grad_()}
        tensors[frozen].requires_grad_(False)
        assert matmuls(**tensors, labels=labels)[0] == 3 * 2
        assert tensors.pop(frozen).grad is None
        ((name, other),) = tensors.items()
        assert torch.equal(other.grad, both[name])  # type: ignore[arg-type]


def test_bfloat16_errors_do_not_exceed_those_of_the_plain_loss() -> None:
    hidden, weight, labels = make_inputs(600, 500, 64)
    low = in_dtype((hidden, weight * 0.1, labels), torch.bfloat16, torch.bfloat16)
    scale = 1.0 / 480  # not a power of two: the scalar must not be rounded to bfloat16
    exact = value_and_gradients(cross_entropy_plain, in_dtype(low, torch.float64, torch.float64), scale)
    fused = value_and_gradients(linear_cross_entropy, low, scale, chunk_tokens=128)
    plain = value_and_gradients(cross_entropy_plain, low, scale)
    assert [x.dtype for x in fused] == [torch.float32, torch.bfloat16, torch.bfloat16]
    # Logits are rounded to bf16 by both; 1.3: room for the second rounding of gradients (made, then scaled).
    for ours, theirs, reference in zip(fused, plain, exact, strict=True):
        assert relative_error(ours, reference) <= 1.3 * relative_error(theirs, reference) + 1e-6


@pytest.mark.parametrize("wider", [torch.float32, torch.float64])
def test_weight_of_a_wider_dtype_gets_its_gradient_in_that_dtype(wider: torch.dtype) -> None:
    inputs = make_inputs(40, 30, 8)
    _, low, master = value_and_gradients(linear_cross_entropy, in_dtype(inputs, torch.bfloat16, wider))
    assert master.dtype == wider
    assert low.dtype == torch.bfloat16
    exact = value_and_gradients(cross_entropy_plain, inputs)
    assert relative_error(master, exact[2]) < 2e-2  # bf16 logits: 2**-8 of values up to 4


@pytest.mark.parametrize("vocab", [3, 3001])  # one slice; two of several blocks each
def test_gradient_of_a_narrow_weight_is_that_of_a_wide_one_rounded_once(vocab: int) -> None:
    low = in_dtype(make_inputs(12, vocab, 1024), torch.bfloat16, torch.bfloat16)
    narrow, wide = (
        value_and_gradients(linear_cross_entropy, in_dtype(low, torch.bfloat16, dtype), 1 / 3)[2]
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(narrow, wide.bfloat16())


def test_the_head_has_no_z_loss_in_evaluation() -> None:
    hidden, weight, labels = make_inputs(12, 9, 4)
    head = LMHead(4, 9, LossConfig(chunk_tokens=5, z_loss=0.1)).double()
    with torch.no_grad():
        head.weight.copy_(weight)
    for z_loss, mode in ((0.1, head.train), (0.0, head.eval)):
        mode()
        expected = cross_entropy_plain(hidden, weight, labels, options=LossConfig(z_loss=z_loss))
        assert_exact([head(hidden.view(3, 4, 4), labels.view(3, 4))], [expected])


def test_the_head_refuses_labels_of_another_shape() -> None:
    head = LMHead(4, 9, LossConfig(chunk_tokens=5))
    with pytest.raises(ValueError, match=r"hidden \(2, 4, 4\) and labels \(2, 3\)"):
        head(torch.zeros(2, 4, 4), torch.zeros(2, 3, dtype=torch.int64))
