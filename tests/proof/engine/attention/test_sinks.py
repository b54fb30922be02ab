"""Learnable sinks give attention with one more logit per head; every method has them in test_method_matrix.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from testkit.attention_oracle import build_group, dense_visibility, errors, oracle, random_inputs, ring_method
from torch import Tensor

from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import LinkBytes
from engine.planning.visibility.mask import Mask

ROWS, HEADS, KV_HEADS = 24, 4, 2
SINKS = torch.tensor([0.7, -1.3, 2.5, 0.1], dtype=torch.float64)
METHODS = {
    "one rank": ring_method(1),
    "ring": ring_method(3),
    "q moves": ring_method(2, 2, backward_circulates="q"),
    "heads": ring_method(2, heads=2),
    "chunks": ring_method(2, layout="chunk_cyclic", chunk_tokens=4, chunk_store="host", prefetch_chunks=1),
    "chunks, heads": ring_method(2, heads=2, layout="chunk_cyclic", chunk_tokens=4, chunk_store="host"),
}


def run(
    method: AttentionMethod, mask: Mask, sinks: Tensor | None
) -> tuple[dict[str, Tensor], list[dict[int, LinkBytes]]]:
    """Results of all ranks, and the bytes that each sent forward and backward."""
    group = build_group(method, mask, ReferenceKernel(), rows=ROWS)
    result = replace(group, wire=torch.float64, sinks=sinks).run(random_inputs(ROWS, HEADS, KV_HEADS))
    return result.values, [result.forward_bytes, result.backward_bytes]


@pytest.mark.parametrize("mask", [Mask(ROWS), Mask(ROWS - 3, window=5)], ids=["causal", "window with padded rows"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_sink_is_one_more_logit_of_every_head(method: AttentionMethod, mask: Mask) -> None:
    want = oracle(random_inputs(ROWS, HEADS, KV_HEADS), dense_visibility(mask, ROWS), SINKS)
    differences = errors(run(method, mask, SINKS)[0], want)
    assert all(error < 1e-10 for error in differences.values()), differences


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sinks_send_nothing(method: AttentionMethod) -> None:
    assert run(method, Mask(ROWS), SINKS)[1] == run(method, Mask(ROWS), None)[1]


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also in padded rows, whose own lse is -inf."""
    mask, no_sinks = Mask(ROWS - 3), torch.full_like(SINKS, -torch.inf)
    got, want = (run(METHODS["ring"], mask, sinks)[0] for sinks in (no_sinks, None))
    assert all(error < 1e-10 for error in errors(got, want).values())
    assert got["dsinks"].tolist() == [0.0] * HEADS
