"""Stretched RoPE: the same wavelengths and factors as transformers, and what each rule promises."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config.settings import RopeScalingConfig
from engine.model.rope import attention_factor, rope_frequencies, rope_table

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
def test_frequencies_and_factor_are_those_of_transformers(
    head_dim: int, theta: float, factor: float, kind: str
) -> None:
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
