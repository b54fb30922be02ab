"""FLOP formulas against figures worked out by hand; test_step_figures has them against torch's counter."""

from __future__ import annotations

import pytest
from testkit.sections import LLAMA_7B

from engine.config.settings import LinearLayersConfig, ModelConfig
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


# Two of three layers are Gated DeltaNet: 2 heads of k, 4 of v, of 8 and 6 channels, a convolution of 4 rows.
HYBRID = ModelConfig(
    implementation="hf",
    num_layers=3,
    linear_layers=LinearLayersConfig(
        num_layers=2, num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6, conv_kernel=4
    ),
)


def test_products_of_the_delta_rule_are_counted_by_hand() -> None:
    flops = step_flops(HYBRID, seq_len=128, visible_pairs=0)
    states, within = 3 * 2 * 8 * 6, 64 * (3 * 8 + 2 * 6)  # with the state [8, 6]; between 64 rows, half of them seen
    by_token = 2 * count_parameters(HYBRID).matmul + 2 * 4 * (states + within)
    assert flops.model == 3 * 128 * by_token


def test_linear_layers_that_run_again_count_as_hardware_flops() -> None:
    flops = step_flops(HYBRID, seq_len=128, visible_pairs=0, recomputed_linear_layers=2)
    assert flops.hardware - flops.model == 128 * 2 * 4 * (3 * 2 * 8 * 6 + 64 * (3 * 8 + 2 * 6))


def test_full_attention_counts_pairs_of_layers_that_attend() -> None:
    flops = step_flops(HYBRID, seq_len=128, visible_pairs=128 * 128)
    assert flops.model_full_attention == flops.model
