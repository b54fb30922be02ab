"""Decisions in words: the rule, the figures, and the bytes that were compared."""

from __future__ import annotations

from burst_cli.plan.decisions import memory_words, moving_operand_words
from engine.config.settings import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.topology import Topology
from engine.predict.machine import find_machine
from engine.resolve.attention import select_moving_operand
from engine.resolve.decisions import Decision, Rule

POLICY = "memory.activation_checkpoint"
SLOW_RAILS = find_machine("cpu", {"inter_bytes_per_s": 25e6})


def words_of(num_kv_heads: int) -> str:
    """What circulates among 2 x 4 ranks, in words."""
    config = RunConfig(
        model=ModelConfig(num_heads=32, num_kv_heads=num_kv_heads, head_dim=128, hidden_size=4096),
        attention=AttentionConfig(preset="burst"),
        train=TrainConfig(seq_len=1 << 14),
    )
    method, decision = select_moving_operand(config, Topology(2, 4), SLOW_RAILS)
    return moving_operand_words(decision, config, method)


def test_operand_chosen_by_time_is_told_with_what_was_compared() -> None:
    text = words_of(32)
    assert text.startswith("auto: q circulates, 2 local tiles deferred; multi-head attention, per token and hop: "), (
        text
    )
    assert all(f"{name} " in text for name in ("(kv", "kv, 1 deferred", "q, 2 deferred")), text


def test_bytes_per_hop_include_the_gradient() -> None:
    """bfloat16 operands and fp32 gradients; two numbers per row and head go with q and dout."""
    sizes = f"kv {2 * 8 * 128 * (2 + 4)} B, q {32 * (2 * 128 * 2 + 2 * 4 + 128 * 4)} B"
    assert f"grouped-query attention with 4 query heads per kv head, per token and hop: {sizes}" in words_of(8)


def test_configured_policy_says_so() -> None:
    assert memory_words(Decision(POLICY, "full", Rule.CONFIGURED), None) == "as configured"


def test_policy_that_fits_nowhere_says_what_it_lacks() -> None:
    text = memory_words(Decision(POLICY, "full", Rule.NEAREST_TO_FIT, {"headroom_bytes": -(2**31)}), None)
    assert text == "no policy fits on this device; the nearest, full, lacks 2 GiB"
