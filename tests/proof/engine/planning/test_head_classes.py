"""Heads of one layer with different masks: every class has tiles of its own, proven by counting and in float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.attention_oracle import Group, Inputs, dense_visibility, errors, oracle, random_inputs, ring_method
from testkit.counting import prove_classes
from testkit.hub import PlanError
from testkit.plan_rules import check_rules
from torch import Tensor

from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import Blocks, divide_sequence
from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import ALL_HEADS, AttentionPlan, Direction, HeadPart, Kind
from engine.planning.program.program import Program, plan_ranks
from engine.planning.schedules import ring
from engine.planning.schedules.plan import PlanPair
from engine.planning.schedules.rank_pass import RankPass
from engine.planning.schedules.ring_grid import RingGrid, RowsNeeded
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import RowRanges, Visibility

SIZE, ROWS, HEADS = 3, 18, 4
MASKS = [Mask(ROWS), Mask(ROWS, window=4)]
EXACT = 1e-10


def plan_classes(masks: list[Mask], blocks: Blocks, direction: Direction) -> AttentionPlan:
    """A ring whose keys move; equal classes of heads, each with its mask."""
    classes = [(HeadPart(n, len(masks)), Visibility(mask, blocks.ring)) for n, mask in enumerate(masks)]
    grid, everything = RingGrid(SIZE, 1), range(SIZE)
    needed = [visible.needed("kv", blocks=everything, readers=everything) for _, visible in classes]
    # A row travels as far as any class needs it.
    rows = RowRanges(np.min([x.start for x in needed], axis=0), np.max([x.stop for x in needed], axis=0))

    def write(program: Program) -> None:
        me, own = program.rank, Rows(0, blocks.ring.row_counts[program.rank])
        value = partial(program.value, rows=own, owner=me)
        is_forward = direction == "forward"
        q = value(Kind.Q if is_forward else Kind.Q_DOUT_OUT, argument="q" if is_forward else "q_dout")
        kv = value(Kind.KV, argument="kv")
        sums = value(Kind.PARTIAL, argument="partial") if is_forward else value(Kind.DQ, argument="dq")
        dkv = None if is_forward else value(Kind.DKV, argument="dkv")

        def tile(step: int, owner: int, block: Value, gradient: Value | None) -> None:
            for heads, visible in classes:
                for band in visible.bands(me, owner):
                    program.tile(step, band, q, block, sums, gradient, heads)

        rank = RankPass(
            program, grid, RowsNeeded(grid, rows), me, tuple(everything), ALL_HEADS, tile, kv, local_gradient=dkv
        )
        getattr(ring, direction)(rank)
        if is_forward:
            program.after(SIZE - 1, "finish", value(Kind.OUT_LSE, argument="out_lse"), sums)

    return plan_ranks(direction, SIZE, None, write)


def plans_of(masks: list[Mask]) -> tuple[PlanPair, Blocks]:
    blocks = divide_sequence(ring_method(SIZE), ROWS, masks)
    return PlanPair(*(plan_classes(masks, blocks, way) for way in ("forward", "backward"))), blocks


def oracle_of_classes(inputs: Inputs, masks: list[Mask]) -> dict[str, Tensor]:
    """Dense attention of every class by itself; what classes give for kv heads that they share is added."""
    kv_heads = inputs.k.shape[1]
    group, found = HEADS // kv_heads, []
    for part in torch.arange(HEADS).chunk(len(masks)):
        keys = (part // group).tolist()  # of every query head its own copy
        each = Inputs(inputs.q[:, part], inputs.k[:, keys], inputs.v[:, keys], inputs.dout[:, part])
        found.append(oracle(each, dense_visibility(masks[len(found)], ROWS)))
    whole = {name: torch.cat([one[name] for one in found], 1) for name in found[0]}
    for name in ("dk", "dv"):
        whole[name] = whole[name].unflatten(1, (kv_heads, group)).sum(2)
    return whole


@pytest.mark.parametrize("late", [True, False])
def test_every_class_of_heads_counts_the_pairs_of_its_own_mask(late: bool) -> None:
    plans, blocks = plans_of(MASKS)
    for plan in (plans.forward, plans.backward):
        check_rules(plan)
    prove_classes(plans, MASKS, blocks, late=late)


def test_counting_finds_classes_with_each_others_masks() -> None:
    plans, blocks = plans_of(MASKS)
    with pytest.raises(PlanError, match="wrong counts"):
        prove_classes(plans, MASKS[::-1], blocks, late=True)


@pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuFlashKernel()], ids=["reference", "cpu_flash"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_classes_of_heads_equal_dense_attention_also_where_they_share_kv_heads(kv_heads: int, kernel) -> None:
    plans, blocks = plans_of(MASKS)
    inputs = random_inputs(ROWS, HEADS, kv_heads)
    found = errors(
        Group(plans, blocks, kernel, wire=torch.float64).run(inputs).values, oracle_of_classes(inputs, MASKS)
    )
    assert all(error < EXACT for error in found.values()), found


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, ROWS), min_size=4, max_size=4), st.sampled_from([2, 4]), st.booleans())
def test_any_windows_of_up_to_four_classes(windows: list[int], classes: int, late: bool) -> None:
    masks = [Mask(ROWS, window=window) for window in windows[:classes]]
    plans, blocks = plans_of(masks)
    prove_classes(plans, masks, blocks, late=late)
    inputs = random_inputs(ROWS, HEADS, 2)
    group = Group(plans, blocks, ReferenceKernel(), late=not late, wire=torch.float64)
    found = errors(group.run(inputs).values, oracle_of_classes(inputs, masks))
    assert all(error < EXACT for error in found.values()), found
