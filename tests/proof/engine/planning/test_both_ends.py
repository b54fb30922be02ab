"""Each rank writes its end of every message by itself; for all presets the two ends agree."""

from __future__ import annotations

import pytest
from testkit.plan_checks import same_but_for_step_numbers
from testkit.plan_rules import check_rules
from testkit.resolved import method_of

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.methods.blocks import divide_run
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import PRESETS
from engine.planning.schedules.plan import PlanPair, plan_method
from engine.planning.topology import Topology

TOPOLOGIES = {"2x2": Topology(2, 2), "3x2": Topology(3, 2), "2x3": Topology(2, 3)}
DISTRIBUTED = [name for name in PRESETS if name not in ("single", "megatron_tp")]
MASKS: dict[str, dict[str, object]] = {"causal": {}, "window": {"mask": "window", "window_tokens": 9}}


def plans_of(preset: str, circulates: str, mask: str, topology: Topology, rank: int | None = None) -> PlanPair:
    chunks = {"chunk_tokens": 5} if PRESETS[preset].chunked else {}  # type: ignore[index]
    attention = AttentionConfig(
        preset=preset,  # type: ignore[arg-type]
        backward_circulates=circulates,  # type: ignore[arg-type]
        **MASKS[mask],  # type: ignore[arg-type]
        **chunks,  # type: ignore[arg-type]
    )
    model = ModelConfig(num_heads=12, num_kv_heads=12, head_dim=8)
    config = RunConfig(model=model, attention=attention, train=TrainConfig(seq_len=72))
    method = method_of(config, topology)
    layers = attention_layers(config, method)
    layer = layers[0]
    return plan_method(layer.method, layer.mask, divide_run(config, method, layers), rank)


def is_legal(preset: str, circulates: str) -> bool:
    try:
        plans_of(preset, circulates, "causal", TOPOLOGIES["2x2"], 0)
    except ConfigError:  # a preset that always moves kv
        return False
    return True


METHODS = [(preset, moves) for preset in DISTRIBUTED for moves in ("kv", "q") if is_legal(preset, moves)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("preset", "circulates"), METHODS)
def test_both_ends_of_every_message_agree(preset: str, circulates: str, topology: str, mask: str) -> None:
    where = TOPOLOGIES[topology]
    together = plans_of(preset, circulates, mask, where)
    for plan in (together.forward, together.backward):
        check_rules(plan)  # raises PlanError for ends that disagree
    for rank in range(where.size):
        alone = plans_of(preset, circulates, mask, where, rank)
        assert same_but_for_step_numbers(alone.forward.ranks[rank], together.forward.ranks[rank])
        assert same_but_for_step_numbers(alone.backward.ranks[rank], together.backward.ranks[rank])
