"""Linear attention over ranks equals the recurrence row by row, in float64, with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.linear_oracle import (
    convolution_by_documents,
    delta_rule_by_rows,
    flash_linear_by_rows,
    make_inputs,
    over_ranks,
)
from torch import Tensor

from engine.attention.linear import DeltaInputs, LinearSequence, causal_conv1d, gated_delta_rule
from engine.attention.linear.chunked import ChunkedDeltaRule
from engine.attention.linear.flash_linear import FlashLinearDeltaRule
from engine.attention.linear.rule import DeltaRule
from engine.config.settings import LayoutName
from engine.planning.visibility.layout import Layout, build_layout
from engine.planning.visibility.mask import Mask

LAYOUTS = [name for name in get_args(LayoutName) if name not in ("auto", "striped")]
FLASH_LINEAR = FlashLinearDeltaRule(flash_linear_by_rows, flash_linear_by_rows)  # computes in float64


@st.composite
def shared_sequences(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], int]:
    """(layout, documents, length without padding): documents begin anywhere, also next to the border of a span."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    seq_len = draw(st.integers(2 * size, 40))
    documents = (0, *sorted(draw(st.sets(st.integers(1, seq_len - 1), max_size=6))))
    padded = -(-seq_len // size) * size
    layout = build_layout(
        draw(st.sampled_from(LAYOUTS)),
        padded,
        size,
        masks=(Mask(seq_len, documents=documents),),
        chunks=draw(st.integers(1, 2)),
        split_at=draw(st.integers(0, seq_len)),
    )
    return layout, documents, seq_len


def assert_equal_to_one_process(
    function: Callable[[list[Tensor], LinearSequence], Tensor],
    oracle: Callable[[Sequence[Tensor], Sequence[int]], Tensor],
    inputs: Sequence[Tensor],
    shared: tuple[Layout, tuple[int, ...], int],
    dim: int = 1,
) -> None:
    layout, documents, _ = shared
    whole = [x.clone().requires_grad_() for x in inputs]
    want = oracle(whole, documents)
    dout = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(want, whole, dout)
    got, got_gradients, _ = over_ranks(function, inputs, dout, layout, documents, dim)
    for tensor, expected in zip((got, *got_gradients), (want.detach(), *gradients), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


def delta_rule(rule: DeltaRule) -> Callable[[list[Tensor], LinearSequence], Tensor]:
    return lambda shard, sequence: gated_delta_rule(DeltaInputs(*shard, normalizes_qk=True), sequence, rule)


@pytest.mark.parametrize("has_channel_gate", [False, True], ids=["gated delta rule", "KDA"])
@settings(max_examples=25)
@given(shared=shared_sequences())
def test_state_passes_through_every_layout_and_ends_with_a_document(
    has_channel_gate: bool, shared: tuple[Layout, tuple[int, ...], int]
) -> None:
    inputs = make_inputs(shared[2], channel_gate=has_channel_gate)
    assert_equal_to_one_process(delta_rule(ChunkedDeltaRule(4)), delta_rule_by_rows, inputs, shared)


@settings(max_examples=15)
@given(shared=shared_sequences())
def test_calls_of_flash_linear_attention_pass_the_state_on(shared: tuple[Layout, tuple[int, ...], int]) -> None:
    assert_equal_to_one_process(delta_rule(FLASH_LINEAR), delta_rule_by_rows, make_inputs(shared[2]), shared)


@settings(max_examples=60)
@given(shared=shared_sequences(), kernel=st.integers(1, 6))
def test_a_convolution_sees_the_rows_before_on_whatever_ranks_they_are(
    shared: tuple[Layout, tuple[int, ...], int], kernel: int
) -> None:
    random = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, dtype=torch.float64, generator=random) for shape in ((3, kernel), (3,)))
    x = torch.randn(2, 3, shared[2], dtype=torch.float64, generator=random)
    assert_equal_to_one_process(
        lambda shard, sequence: causal_conv1d(shard[0], weight, bias, sequence),
        lambda whole, documents: convolution_by_documents(whole[0], weight, bias, documents),
        [x],
        shared,
        dim=2,
    )


def sent_bytes(seq_len: int, layout_name: LayoutName) -> list[int]:
    inputs, layout = make_inputs(seq_len), build_layout(layout_name, seq_len, 4)

    return over_ranks(
        delta_rule(ChunkedDeltaRule()), inputs, torch.ones(2, seq_len, 4, 3, dtype=torch.float64), layout, (0,)
    )[2]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bytes_do_not_depend_on_the_length(layout: LayoutName) -> None:
    assert sent_bytes(16, layout) == sent_bytes(160, layout)


def test_each_rank_sends_its_map_to_every_rank_once_in_forward_or_backward() -> None:
    """2 sequences x 4 heads x dk (dk + dv) numbers of 8 bytes, to the ranks after it and, in backward, before it."""
    assert sent_bytes(16, "contiguous") == [3 * 2 * 4 * 5 * (5 + 3) * 8] * 4


def error_in_float32(size: int) -> float:
    """Largest relative error of the output and of the gradients."""
    documents, inputs, layout = (0, 100), make_inputs(512), build_layout("zigzag", 512, size)
    whole = [x.clone().requires_grad_() for x in inputs]
    want = delta_rule_by_rows(whole, documents)
    dout = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    expected = (want.detach(), *torch.autograd.grad(want, whole, dout))
    function = delta_rule(ChunkedDeltaRule())
    got, gradients, _ = over_ranks(function, [x.float() for x in inputs], dout.float(), layout, documents)
    pairs = zip((got, *gradients), expected, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def test_passing_the_state_in_float32_costs_no_precision() -> None:
    assert error_in_float32(4) < 2 * error_in_float32(1)
