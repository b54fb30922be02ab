"""flash-linear-attention, where it is installed, computes what the chunked rule of torch does."""

from __future__ import annotations

import pytest
import torch

from engine.attention.linear import DeltaInputs, LinearSequence
from engine.attention.linear.chunked import ChunkedDeltaRule
from engine.attention.linear.delta_rule import select_delta_rule
from engine.attention.linear.rule import DeltaRule
from engine.attention.linear.spans import build_spans
from engine.attention.transport import SilentTransport
from engine.planning.visibility.layout import build_layout

ROWS, HEADS, DIM, DOCUMENTS = 512, 4, 64, (0, 100, 103, 400)


@pytest.mark.gpu
@pytest.mark.parametrize("has_channel_gate", [False, True], ids=["gated delta rule", "KDA"])
def test_flash_linear_attention_equals_torch(has_channel_gate: bool) -> None:
    pytest.importorskip("fla")
    device = torch.device("cuda")
    spans = build_spans(build_layout("contiguous", ROWS, 1), DOCUMENTS, ROWS)
    sequence = LinearSequence(spans, 0, SilentTransport(), None, device)
    torch.manual_seed(0)
    gate = (2, ROWS, HEADS, DIM) if has_channel_gate else (2, ROWS, HEADS)
    q, k, v, dout = torch.randn(4, 2, ROWS, HEADS, DIM, device=device).to(torch.bfloat16)
    g = -0.1 * torch.nn.functional.softplus(torch.randn(gate, device=device))
    beta = torch.rand(2, ROWS, HEADS, device=device)

    def run(rule: DeltaRule) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        out = rule(DeltaInputs(*leaves, normalizes_qk=True), sequence)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    flash = select_delta_rule(device, torch.bfloat16)
    assert flash.name == "flash-linear-attention"
    for found, wanted in zip(run(flash), run(ChunkedDeltaRule()), strict=True):
        assert (found - wanted).float().norm() < 0.02 * wanted.float().norm()  # 8 bits of mantissa
