"""FLOP formulas against figures worked out by hand; test_step_figures has them against torch's counter."""

from __future__ import annotations

import pytest
from testkit.sections import LLAMA_7B

from engine.predict.flops import attention_pairs, count_parameters, step_flops


def test_published_size_of_llama_7b() -> None:
    count = count_parameters(LLAMA_7B)
    assert count.total == 6_738_415_616  # Touvron et al. 2023: 6.7B
    assert count.total - count.matmul == 32000 * 4096 + 65 * 4096


def test_conventions_at_one_million_tokens() -> None:
    seq_len = 2**20
    flops = step_flops(LLAMA_7B, seq_len=seq_len, visible_pairs=32 * attention_pairs("causal", seq_len))
    attention = 32 * 32 * 128 * seq_len**2  # A of the module's text: L * H * D * N**2
    matmuls = 6 * count_parameters(LLAMA_7B).matmul * seq_len
    assert flops.model == pytest.approx(matmuls + 6 * attention, rel=1e-5)
    assert flops.model_full_attention == matmuls + 12 * attention
    assert flops.hardware == flops.model
