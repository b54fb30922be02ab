"""What attention costs that runs again for the queries before a cut, and how a configuration decides the cut.

That recompute plans are right is shown by test_planners.py and test_method_matrix.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from engine.config.settings import (
    AttentionConfig,
    CheckpointKind,
    LayoutName,
    MemoryConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from engine.planning.methods.blocks import Blocks, divide_sequence
from engine.planning.methods.methods import PlanPair, plan_method
from engine.planning.methods.presets import PRESETS, AttentionMethod
from engine.planning.methods.resolve import resolve_attention
from engine.planning.methods.topology import Topology
from engine.planning.schedule.plan import AttentionPlan
from engine.planning.sequence.layers import attention_layers
from engine.planning.sequence.mask import Mask

ROWS = 48


class Case(NamedTuple):
    """A method with a mask on some ranks."""

    method: AttentionMethod
    mask: Mask
    blocks: Blocks

    def plans(self, cut: int) -> PlanPair:
        return plan_method(self.method, self.mask, self.blocks, recompute_before=cut)


def case_of(
    preset: str, shape: tuple[int, int], mask: Mask, *, split_at: int = 0, rows: int = ROWS, **axes: object
) -> Case:
    """A preset on nodes x local ranks; two query heads per rank and one kv head, `rows` rows in all."""
    topology = Topology(*shape)
    if PRESETS[preset].chunked:  # type: ignore[index]
        axes = {"chunk_tokens": 5, **axes}
    config = RunConfig(
        model=ModelConfig(num_heads=2 * topology.size, num_kv_heads=topology.size, head_dim=8),
        attention=AttentionConfig(preset=preset, **axes),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=rows),
    )
    method = replace(resolve_attention(config, topology), split_at=split_at)
    return Case(method, mask, divide_sequence(method, rows, [mask]))


# ---- what it costs ---------------------------------------------------------------------------------------------------


def sent_rows(plan: AttentionPlan) -> int:
    """Rows that all ranks send."""
    sends = [t for ranks in plan.ranks.values() for t in ranks.transfers() if t.op == "send"]
    return sum(transfer.view.stop - transfer.view.start for transfer in sends)


def hops(plan: AttentionPlan) -> int:
    return sum(transfer.op == "send" for ranks in plan.ranks.values() for transfer in ranks.transfers())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "split_zigzag"])
@pytest.mark.parametrize("preset", ["ring", "burst", "megatron_cp", "megatron_allgather"])
def test_only_keys_that_are_attended_again_travel(preset: str, layout: LayoutName) -> None:
    case = case_of(preset, (2, 4), Mask(256), layout=layout, split_at=128 * (layout == "split_zigzag"), rows=256)
    plans = case.plans(128)
    assert plans.recompute is not None
    assert sent_rows(plans.recompute) < sent_rows(plans.forward)
    if layout == "contiguous":
        assert hops(plans.recompute) < hops(plans.forward)


def device_rows(plan: AttentionPlan) -> int:
    """Rows of all buffers on the device of the rank with most."""
    return max(sum(s.rows for s in ranks.slots if s.where == "device") for ranks in plan.ranks.values())


@pytest.mark.parametrize(("preset", "shape"), [("fpdt", (1, 2)), ("usp", (2, 2)), ("burst", (2, 1))])
@pytest.mark.thorough_for("burst-shape2", "usp-shape1")
def test_chunks_that_are_only_exchanged_pass_through_few_buffers(preset: str, shape: tuple[int, int]) -> None:
    for rows in (64, 128):
        case = case_of(preset, shape, Mask(rows), rows=rows, chunk_tokens=4, chunk_store="host")
        for cut in (0, rows // 2, rows - 3):
            plans = case.plans(cut)
            assert plans.recompute is not None
            assert device_rows(plans.recompute) <= 2 * device_rows(plans.forward)


# ---- from a configuration --------------------------------------------------------------------------------------------


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


def test_layers_know_what_is_attended_again() -> None:
    kinds: tuple[CheckpointKind, ...] = ("none", "attn_out", "seq_fraction", "full")
    _, cuts = layers_of(MemoryConfig(checkpoint_layers=kinds, kept_fraction=0.5))
    assert cuts == [None, 0, 48, 104]  # 100 tokens are padded to 104; half of them, in units of 2 * 4 tokens: 48 or 56


def test_masks_and_policies_take_turns_together() -> None:
    kinds: tuple[CheckpointKind, ...] = ("full", "attn_out")
    _, cuts = layers_of(MemoryConfig(checkpoint_layers=kinds), mask_layers=("causal", "full", "causal"))
    assert cuts == [104, 0] * 3


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
