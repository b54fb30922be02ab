"""Learned sinks, added where partial results are finished, give attention with one more logit per head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from testkit.attention_oracle import (
    NAMES,
    Inputs,
    build_group,
    dense_visibility,
    errors,
    random_inputs,
    ring_method,
)
from torch import Tensor

from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.presets import AttentionMethod
from engine.planning.visibility.mask import Mask

ROWS, HEADS, KV_HEADS = 24, 4, 2
SINKS = torch.tensor([0.7, -1.3, 2.5, 0.1], dtype=torch.float64)
METHODS = {
    "one rank": ring_method(1),
    "ring": ring_method(3),
    "q moves": ring_method(2, 2, backward_circulates="q"),
    "heads": ring_method(2, heads=2),
    "chunks": ring_method(2, layout="chunk_cyclic", chunk_tokens=4, chunk_store="host", prefetch_chunks=1),
}


def oracle_with_sinks(inputs: Inputs, visible: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """out, lse, dq, dk, dv and dsinks: softmax over the keys and a sink that has no value."""
    q, k, v, sinks = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, SINKS))
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) / q.shape[-1] ** 0.5
    logits = torch.cat([scores.masked_fill(~visible, -torch.inf), sinks[:, None, None].expand(-1, len(q), 1)], -1)
    out = torch.einsum("hij,jhd->ihd", torch.softmax(logits, -1)[..., :-1], values)
    *gradients, dsinks = torch.autograd.grad(out, (q, k, v, sinks), inputs.dout)
    results = (out.detach(), torch.logsumexp(logits.detach(), -1).T, *gradients)
    return dict(zip(NAMES, results, strict=True)), dsinks


@pytest.mark.parametrize("mask", [Mask(ROWS), Mask(ROWS - 3, window=5)], ids=["causal", "window with padded rows"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_sink_is_one_more_logit_of_every_head(method: AttentionMethod, mask: Mask) -> None:
    inputs = random_inputs(ROWS, HEADS, KV_HEADS)
    group = build_group(method, mask, ReferenceKernel(), rows=ROWS)
    found = replace(group, wire=torch.float64, sinks=SINKS).run(inputs).values
    want, dsinks = oracle_with_sinks(inputs, dense_visibility(mask, ROWS))
    differences = errors(found, want)
    assert all(error < 1e-10 for error in differences.values()), differences
    # The formula of `merge.finish`, from what a rank has of its own rows.
    delta = (inputs.dout * found["out"]).sum(-1)
    torch.testing.assert_close(-(torch.exp(SINKS - found["lse"]) * delta).sum(0), dsinks, rtol=0, atol=1e-10)
