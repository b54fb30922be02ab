"""The very kernels that GPUs run, through Triton's interpreter on a CPU, and torch in their place: the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from testkit.kernel_checks import CASES, ON_CPU, name_of
from testkit.kernel_interpreter import Interpreter
from testkit.kernel_model import loss_and_gradients

from engine.kernels.dispatch import uses_triton


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """A process in which the kernels run on CPU tensors, started by the first test that asks for it; needs Triton."""
    pytest.importorskip("triton")
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.mark.parametrize(("check", "sizes"), CASES, ids=name_of)
def test_kernels_give_what_the_formulas_give(
    interpreter: Interpreter, check: Callable[..., None], sizes: tuple[Any, ...]
) -> None:
    interpreter.run(check, "cpu", *sizes)


@pytest.mark.parametrize(("check", "sizes"), ON_CPU, ids=name_of)
def test_torch_gives_what_the_formulas_give(check: Callable[..., None], sizes: tuple[Any, ...]) -> None:
    check("cpu", *sizes)


@pytest.mark.parametrize(("tile_tokens", "dropout"), [(None, 0.0), (None, 0.3), (5, 0.3)])
def test_a_model_has_the_gradients_that_torch_alone_gives_it(
    interpreter: Interpreter, tile_tokens: int | None, dropout: float
) -> None:
    """Norms of rows and heads, RoPE, SwiGLU, merged tiles of attention, the loss: forward, again, and backward."""
    ours = interpreter.run(loss_and_gradients, "cpu", tile_tokens, dropout)
    want = loss_and_gradients("cpu", tile_tokens, dropout)
    assert len(want) == 2 * 11 + 4
    assert ours.keys() == want.keys()
    for name, reference in want.items():
        torch.testing.assert_close(ours[name], reference, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_triton_kernels_run_only_for_floating_point_tensors_if_enabled(
    interpreter: Interpreter, dtype: torch.dtype
) -> None:
    assert interpreter.run(uses_triton, torch.zeros(3, dtype=dtype)) == dtype.is_floating_point
    assert not uses_triton(torch.zeros(3, dtype=dtype))
