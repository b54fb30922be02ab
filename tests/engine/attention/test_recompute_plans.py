"""How a configuration decides before which queries attention runs again."""

from __future__ import annotations

import pytest

from engine.config.settings import AttentionConfig, CheckpointKind, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.resolve import resolve_attention
from engine.planning.methods.topology import Topology
from engine.planning.sequence.layers import attention_layers


def layers_of(
    memory: MemoryConfig, seq_len: int = 100, **attention: object
) -> tuple[AttentionMethod, list[int | None]]:
    """The method on four ranks, and where recomputation of the layers in turn ends."""
    config = RunConfig(
        model=ModelConfig(num_heads=8, num_kv_heads=4, head_dim=8),
        attention=AttentionConfig(**{"preset": "ring", **attention}),  # type: ignore[arg-type]
        memory=memory,
        train=TrainConfig(seq_len=seq_len),
    )
    method = resolve_attention(config, Topology(1, 4))
    return method, [layer.recompute_before for layer in attention_layers(config, method)]


def test_masks_and_policies_take_turns_together() -> None:
    kinds: tuple[CheckpointKind, ...] = ("full", "seq_fraction", "attn_out", "none")
    _, cuts = layers_of(MemoryConfig(checkpoint_layers=kinds), mask_layers=("causal", "full", "causal"))
    assert cuts == [104, 48, 0, None] * 3  # 100 tokens are padded to 104; half, in units of 2 * 4 tokens: 48 or 56


@pytest.mark.parametrize(
    ("kept_fraction", "attention", "layout"),
    [
        (0.5, {}, "split_zigzag"),
        (0.0, {}, "zigzag"),
        (1.0, {}, "zigzag"),
        (0.5, {"layout": "zigzag"}, "zigzag"),
        (0.5, {"preset": "striped"}, "striped"),
        (0.5, {"mask": "window", "window_tokens": 9}, "contiguous"),
    ],
)
def test_a_zigzag_is_split_where_recomputation_ends(
    kept_fraction: float, attention: dict[str, object], layout: str
) -> None:
    memory = MemoryConfig(activation_checkpoint="seq_fraction", kept_fraction=kept_fraction)
    method, (cut,) = layers_of(memory, 96, **attention)
    assert method.layout == layout
    assert method.split_at == (cut if layout == "split_zigzag" else 0)
