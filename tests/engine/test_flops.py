"""FLOP formulas against figures worked out by hand; test_step_figures has them against torch's counter."""

from __future__ import annotations

import pytest
import torch
from testkit.sections import LLAMA_7B

from engine.config.settings import ModelConfig
from engine.planning.time.flops import attention_pairs, count_parameters, forward_flops, step_flops

SHAPE = ModelConfig(
    vocab_size=50, hidden_size=24, ffn_hidden_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_pairs_are_those_of_the_mask(seq_len: int) -> None:
    visible = torch.ones(seq_len, seq_len)
    assert attention_pairs("full", seq_len) == int(visible.sum())
    assert attention_pairs("causal", seq_len) == int(visible.tril().sum())


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


def test_visible_pairs_count_only_where_they_should() -> None:
    few, many = (step_flops(SHAPE, seq_len=64, visible_pairs=pairs) for pairs in (10, 20))
    assert many.model - few.model == 12 * 4 * 8 * 10
    assert many.model_full_attention == few.model_full_attention
    assert forward_flops(SHAPE, tokens=64, pairs=10) * 3 == few.model
