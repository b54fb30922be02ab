"""RMSNorm, SwiGLU and RoPE: gradients by finite differences, values against the formulas, bf16 rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.rope import apply_rope, rope_table
from engine.row_blocks import CPU_BLOCK_ELEMENTS, row_blocks

HEAD_DIM = 6


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def naive_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def naive_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def naive_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def tables(tokens: int, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    return rope_table(torch.randperm(tokens) * 7, head_dim, 10000.0)


def test_a_sum_and_its_norm_are_those_of_two_steps() -> None:
    branch, residual, weight = draw(2, 3, 8).bfloat16(), draw(2, 3, 8).bfloat16() * 2, draw(8).bfloat16()
    separate = branch + residual
    total, normed = add_rms_norm(branch, residual, weight, 1e-5)
    assert total.data_ptr() == branch.data_ptr()
    assert torch.equal(total, separate)
    assert torch.equal(normed, rms_norm(separate, weight, 1e-5))


def both(function: Any, naive: Any, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs and gradients of `function`, of `naive`); the incoming gradient is not contiguous."""
    results = []
    for compute in (function, naive):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = compute(*leaves)
        dout = draw(*reversed(out.shape), dtype=out.dtype).permute(*reversed(range(out.dim())))
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    return results[0], results[1]


ROWS = CPU_BLOCK_ELEMENTS // 48 + 11  # two blocks and a bit of rows of 96 elements
CASES = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), naive_rms_norm, [(ROWS, 96), (96,)]),
    "swiglu": (swiglu, naive_swiglu, [(7, 96), (7, 96)]),
    "rope": (lambda x: apply_rope(x, *LONG), lambda x: naive_rope(x, *LONG), [(2, ROWS, 4, 24)]),
}
LONG = tables(ROWS, 24)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_formulas_over_many_blocks(case: str) -> None:
    function, naive, shapes = CASES[case]
    for ours, expected in zip(*both(function, naive, *(draw(*shape) for shape in shapes)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_as_exact_as_the_formulas_in_bfloat16(case: str) -> None:
    function, naive, shapes = CASES[case]
    low = [draw(*shape).bfloat16() for shape in shapes]
    ours, theirs = both(function, naive, *low)
    exact, _ = both(naive, naive, *(x.double() for x in low))
    for mine, other, reference in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - reference).norm() <= (other.double() - reference).norm()


def test_inputs_and_incoming_gradients_are_left_as_they_were() -> None:
    for function, _, shapes in CASES.values():
        inputs = [draw(*shape).float().requires_grad_() for shape in shapes]
        out = function(*inputs)
        dout = torch.ones_like(out)
        before = [x.detach().clone() for x in inputs]
        torch.autograd.grad(out, inputs, dout)
        assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
        assert torch.equal(dout, torch.ones_like(out))


def test_angles_are_exact_at_four_million() -> None:
    position = 4_000_003
    cos, sin = rope_table(torch.tensor([position]), 4, 10000.0)
    angles = torch.tensor([[position, position / 100]], dtype=torch.float64)
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-7)  # rounding of the result to fp32
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("rows", "row_elements"), [(0, 5), (1, 10**9), (10, 0), (4097, 1024)])
def test_row_blocks_cover_all_rows_in_order(rows: int, row_elements: int) -> None:
    blocks = list(row_blocks(rows, row_elements, torch.device("cpu")))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(rows))
    assert all((b.stop - b.start) * row_elements <= CPU_BLOCK_ELEMENTS or b.stop - b.start == 1 for b in blocks)
