"""The closed form: each term moves as its formula says, and attention's buffers are those of the plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from memory_cases import EIGHT_B, FOURTEEN_B, SEVEN_B, WORLD, seven_b

from engine.config.errors import ConfigError
from engine.config.settings import ModelConfig, PresetName, RunConfig
from engine.memory.attention_buffers import attention_bytes
from engine.memory.estimate import COMPONENTS, MemoryEstimate
from engine.memory.fit import estimate_on, method_on
from engine.memory.shapes import rank_shape
from engine.planning.methods.grid import divide_sequence
from engine.planning.methods.methods import plan_method
from engine.planning.methods.presets import PRESETS
from engine.planning.methods.preview import token_bytes_of
from engine.planning.methods.topology import Topology
from engine.planning.schedule.plan import RankPlan
from engine.planning.sequence.layers import attention_layers
from engine.planning.sequence.lengths import padded_length
from engine.planning.time.flops import count_parameters

NUMBERS = count_parameters(SEVEN_B).total
HIDDEN = 2 * 2**18 * 4096  # one layer input of a rank, bytes


def estimate(world: Topology = WORLD, **changes: dict[str, Any]) -> MemoryEstimate:
    return estimate_on(seven_b(**changes), world)


def device(found: MemoryEstimate) -> dict[str, int]:
    return dict(found.components["device"])


@pytest.mark.parametrize("policy", ["none", "full", "attn_out", "seq_fraction", "attn_out_every"])
@pytest.mark.parametrize("store", ["device", "host"])
def test_components_add_up_to_the_peaks(policy: str, store: str) -> None:
    found = estimate(memory={"activation_checkpoint": policy, "activation_store": store})
    for place, peak in (("device", found.device_peak_bytes), ("host", found.host_peak_bytes)):
        assert tuple(found.components[place]) == COMPONENTS
        assert min(found.components[place].values()) >= 0
        assert sum(found.components[place].values()) == peak


def test_policies_order_by_what_they_keep() -> None:
    def peak(**memory: Any) -> int:
        return estimate(memory=memory).device_peak_bytes

    fractions = [peak(activation_checkpoint="seq_fraction", kept_fraction=rho) for rho in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert fractions == sorted(fractions)
    assert fractions[0] == peak(activation_checkpoint="full")
    assert fractions[-1] == peak(activation_checkpoint="attn_out")
    assert peak(activation_checkpoint="none") > 3 * fractions[-1]


def test_states_are_sixteen_bytes_per_parameter_over_the_shards() -> None:
    found = device(estimate())
    assert found["parameters"] == pytest.approx(4 * NUMBERS / 8, rel=1e-3)
    assert found["optimizer"] == pytest.approx(8 * NUMBERS / 8, rel=1e-3)
    halved = device(estimate(Topology(2, 8)))
    assert halved["parameters"] == pytest.approx(found["parameters"] / 2, rel=1e-6)


def test_int8_moments_take_a_quarter_and_their_scales() -> None:
    wide, narrow = (device(estimate(memory={"moments_dtype": dtype})) for dtype in ("float32", "int8"))
    assert narrow["optimizer"] / wide["optimizer"] == pytest.approx((1 + 4 / 256) / 4, rel=1e-6)


def test_an_optimizer_on_the_host_takes_its_states_along() -> None:
    found = estimate(memory={"optimizer_store": "host"})
    assert device(found)["parameters"] == device(found)["optimizer"] == 0
    assert found.host_peak_bytes == pytest.approx(16 * NUMBERS / 8, rel=1e-3)


def test_accumulated_gradients_are_sharded() -> None:
    gradients = device(estimate(train={"grad_accum_steps": 2}))["gradients"]
    # And those of the layer at work, which are not summed yet.
    assert 4 * NUMBERS / 8 <= gradients < 4 * NUMBERS / 8 + 4 * NUMBERS / 32


def test_an_optimizer_inside_backward_keeps_no_gradients() -> None:
    def gradients(*, inside: bool) -> int:
        changes: dict[str, Any] = {"memory": {"optimizer_in_backward": inside}, "optimizer": {"max_grad_norm": None}}
        # One short sequence: the peak is at the end, when all gradients are there.
        return device(estimate(**changes, train={"seq_len": 4096}))["gradients"]

    assert gradients(inside=True) < gradients(inside=False) / 4


def test_inside_backward_the_hosts_gradients_are_those_of_a_few_layers() -> None:
    memory = {"optimizer_store": "host", "optimizer_in_backward": True}
    found = dict(estimate(memory=memory, optimizer={"max_grad_norm": None}, train={"seq_len": 4096}).components["host"])
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert found["gradients"] == 4 * 4 * layer // 8  # four of them, fp32, over eight ranks


def test_checkpoints_on_the_host_leave_two_layers_on_the_device() -> None:
    found = estimate(memory={"activation_checkpoint": "full", "activation_store": "host"})
    assert device(found)["checkpoints"] == 2 * HIDDEN
    assert found.host_peak_bytes == 32 * HIDDEN


@pytest.mark.parametrize("layers", [1, 2, 13, 32, 99])
def test_layers_beyond_those_of_the_host_keep_on_the_device(layers: int) -> None:
    memory = {"activation_checkpoint": "full", "activation_store": "host", "host_layers": layers}
    found, there = estimate(memory=memory), min(layers, 32)
    assert found.host_peak_bytes == there * HIDDEN
    assert device(found)["checkpoints"] == (32 - there + min(there, 2)) * HIDDEN


def test_layers_on_the_host_are_no_choice_where_attention_leaves_its_results_there() -> None:
    memory = {"activation_checkpoint": "full", "activation_store": "host", "host_layers": 3}
    with pytest.raises(ConfigError, match=r"memory\.host_layers=3: attention leaves its results in host memory"):
        estimate(memory=memory, attention={"preset": "fpdt"})


def test_int8_moments_on_the_host_take_what_they_take_on_the_device() -> None:
    changes: dict[str, Any] = {"optimizer": {"max_grad_norm": None}}
    memory = {"optimizer_store": "host", "moments_dtype": "int8", "optimizer_in_backward": True}
    found = dict(estimate(memory=memory, **changes).components["host"])
    assert found["optimizer"] == pytest.approx(2 * (1 + 4 / 256) * NUMBERS / 8, rel=1e-3)


def test_a_tile_bounds_the_mlp_whatever_the_length() -> None:
    tiled = [
        device(estimate(memory={"tile_tokens": 4096}, train={"seq_len": length}))["mlp"] for length in (2**20, 2**22)
    ]
    assert tiled[0] == tiled[1]
    assert tiled[0] < device(estimate())["mlp"] / 32


def test_logits_of_a_chunk_are_all_there_is_of_the_fused_loss() -> None:
    long, longer = (
        device(estimate(memory={"activation_checkpoint": "none"}, train={"seq_len": length}))["loss"]
        for length in (2**15, 2**16)
    )
    assert long == longer


def slots_bytes(plan: RankPlan, config: RunConfig, pins: set[str | None]) -> int:
    """Device bytes of the slots that are pinned under one of these names; None: of those that are not pinned."""
    widths = token_bytes_of(config, method_on(config, WORLD))
    return sum(
        slot.rows * widths.of(slot.kind, slot.heads)
        for slot in plan.slots
        if slot.pin in pins and slot.where == "device"
    )


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("single", "megatron_tp", "auto")])
@pytest.mark.parametrize("world", [Topology(1, 8), Topology(2, 8), Topology(4, 4)], ids=str)
@pytest.mark.parametrize(
    "model", [pytest.param(SEVEN_B, marks=pytest.mark.thorough), EIGHT_B], ids=lambda model: model.name
)
@pytest.mark.pairwise
def test_attention_takes_what_its_plans_allocate(model: ModelConfig, world: Topology, preset: PresetName) -> None:
    config = replace(seven_b(attention={"preset": preset}), model=model)
    method = method_on(config, world)
    (layer,) = attention_layers(config, method)
    blocks = divide_sequence(method, padded_length(config.train.seq_len, world.size), [layer.mask])
    forward, backward = [], []
    for rank in (0, 3, world.size - 1):  # the largest of them: rows that a rank uses differ by its place
        plans = plan_method(method, layer.mask, blocks, rank=rank)
        forward.append(plans.forward.ranks[rank])
        backward.append(plans.backward.ranks[rank])
    found = attention_bytes(rank_shape(config, method), method)
    working = max(slots_bytes(plan, config, {None}) for plan in (*forward, *backward))
    assert 0.9 * working <= found.working <= 1.15 * working  # a slot less where sums are stored first
    assert found.accumulated == slots_bytes(forward[0], config, {"acc"})
    if not found.on_host:
        whole = slots_bytes(backward[0], config, set(backward[0].pins) - {"saved"})
        assert found.inputs + found.gradients == pytest.approx(whole, rel=0.1)


PUBLISHED = [
    (FOURTEEN_B, 2**20, {"activation_checkpoint": "full"}, 41.45),
    (FOURTEEN_B, 2**20, {"activation_checkpoint": "seq_fraction"}, 45.91),
    (FOURTEEN_B, 2**20, {"activation_checkpoint": "attn_out"}, 53.96),
    (SEVEN_B, 2**21, {"activation_checkpoint": "seq_fraction"}, 49.62),
    (SEVEN_B, 2**21, {"activation_checkpoint": "attn_out"}, 55.4),
]


@pytest.mark.parametrize(("model", "seq_len", "memory", "published_gb"), PUBLISHED)
def test_published_peaks_of_32_gpus_are_met_within_a_quarter(
    model: Any, seq_len: int, memory: dict[str, Any], published_gb: float
) -> None:
    """BurstEngine on 32 A800; docs/memory.md explains the differences."""
    config = replace(seven_b(memory=memory, train={"seq_len": seq_len}), model=model)
    assert estimate_on(config, Topology(4, 8)).device_peak_bytes / 1e9 == pytest.approx(published_gb, rel=0.25)
