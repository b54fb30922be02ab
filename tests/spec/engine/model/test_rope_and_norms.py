"""RoPE: angles that are exact far away, the stretched ones of transformers; what norms and SwiGLU leave as it was.

That their values and gradients are right is shown in kernels/test_kernels_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config.settings import RopeScalingConfig
from engine.device.row_blocks import CPU_BLOCK_ELEMENTS, row_blocks
from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.rope import apply_rope, attention_factor, rope_frequencies, rope_table

LENGTH = 4096


def theirs(head_dim: int, theta: float, parameters: dict[str, object], seq_len: int | None = None) -> tuple:  # type: ignore[type-arg]
    kind = str(parameters["rope_type"])
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return frequencies, factor


def ours(head_dim: int, theta: float, **settings: object) -> tuple[torch.Tensor, float]:
    scaling = RopeScalingConfig(original_seq_len=LENGTH, **settings)  # type: ignore[arg-type]
    return rope_frequencies(head_dim, theta, scaling), attention_factor(scaling)


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("factor", [1.0, 8.0, 32.5])
@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_rope_scaling_equals_transformers(head_dim: int, theta: float, factor: float, kind: str) -> None:
    peers: dict[str, tuple[dict[str, object], int | None]] = {
        "linear": ({"rope_type": "linear", "factor": factor}, None),
        # Theirs changes with the length; at factor x the original one it is the fixed rule for that length.
        "ntk": ({"rope_type": "dynamic", "factor": 1.0}, int(factor * LENGTH)),
        "yarn": ({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": LENGTH}, None),
        "llama3": (
            {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": LENGTH,
            },
            None,
        ),
    }
    expected, expected_factor = theirs(head_dim, theta, *peers[kind])
    found, found_factor = ours(head_dim, theta, kind=kind, factor=factor)
    assert found_factor == pytest.approx(expected_factor)
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0.0)


def test_the_table_carries_the_factor() -> None:
    scaling = RopeScalingConfig(kind="yarn", factor=4.0, original_seq_len=LENGTH)
    cos, sin = rope_table(torch.arange(100), 32, 1e4, scaling)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((100, 16), attention_factor(scaling) ** 2))


FUNCTIONS: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
    (lambda x, weight: rms_norm(x, weight, 1e-5), [(7, 96), (96,)]),
    # The product with 1 stands for the branch, which is written over.
    (lambda branch, *others: add_rms_norm(branch * 1, *others, 1e-5)[1], [(7, 96), (7, 96), (96,)]),
    (swiglu, [(7, 96), (7, 96)]),
    (lambda x: apply_rope(x, *rope_table(torch.arange(7), 24, 1e4)), [(2, 7, 4, 24)]),
]


def test_add_rms_norm_equals_two_steps() -> None:
    branch, residual, weight = (torch.randn(shape).bfloat16() for shape in ((2, 3, 8), (2, 3, 8), (8,)))
    separate = branch + residual
    total, normed = add_rms_norm(branch, residual, weight, 1e-5)
    assert total.data_ptr() == branch.data_ptr()
    assert torch.equal(total, separate)
    assert torch.equal(normed, rms_norm(separate, weight, 1e-5))


def test_functions_do_not_modify_their_arguments() -> None:
    for function, shapes in FUNCTIONS:
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        before = [x.detach().clone() for x in inputs]
        out = function(*inputs)
        dout = torch.ones_like(out)
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
