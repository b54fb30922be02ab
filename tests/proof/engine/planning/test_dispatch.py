"""Tiles computed by ranks that own neither operand: proven by counting, and equal to dense attention."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.attention_oracle import ring_method
from testkit.plan_checks import check_plans, same_but_for_step_numbers

from engine.config.settings import LayoutName
from engine.planning.methods.blocks import Blocks, divide_sequence
from engine.planning.program.ops import TokenBytes
from engine.planning.schedules.dispatch import Assignment, plan_dispatch
from engine.planning.schedules.plan import PlanPair
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import Visibility

SIZE, ROWS, HEADS = 4, 24, (4, 2)
ASSIGNMENTS: dict[str, Assignment] = {
    "owner of the queries": lambda i, j: i,
    "owner of the keys": lambda i, j: j,
    "another rank": lambda i, j: (i + 1) % SIZE if (i + 1) % SIZE != j else (i + 2) % SIZE,
    "one rank": lambda i, j: 0,
    "every rank": lambda i, j: (i + j) % SIZE,
}


def dispatched(mask: Mask, assign: Assignment, layout: LayoutName = "contiguous") -> tuple[PlanPair, Blocks]:
    """Plans of all ranks, and whose rows are where."""
    blocks = divide_sequence(ring_method(SIZE, layout=layout), mask.seq_len, [mask])
    visible = Visibility(mask, blocks.ring)
    return PlanPair(*(plan_dispatch(visible, assign, direction) for direction in ("forward", "backward"))), blocks


@pytest.mark.parametrize("mask", [Mask(ROWS), Mask(ROWS, documents=(0, 5, 17)), Mask(ROWS, window=7)], ids=str)
@pytest.mark.parametrize("assign", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_tiles_may_be_computed_by_any_rank(assign: Assignment, mask: Mask) -> None:
    plans, blocks = dispatched(mask, assign)
    check_plans(plans, mask, blocks, HEADS)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(["contiguous", "zigzag", "striped"]), st.booleans(), st.integers(1, ROWS))
def test_any_assignment_of_tiles_is_right(data: st.DataObject, layout: LayoutName, late: bool, window: int) -> None:
    pairs = st.tuples(*[st.integers(0, SIZE - 1)] * SIZE**2)
    ranks = data.draw(pairs, label="rank that computes, by query rank and key rank")
    mask = Mask(ROWS, window=window)
    plans, blocks = dispatched(mask, lambda i, j: ranks[i * SIZE + j], layout)
    check_plans(plans, mask, blocks, HEADS, late=late)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_plans_alone_writes_its_part_of_the_whole(direction: str, rank: int) -> None:
    mask, assign = Mask(ROWS, window=9), ASSIGNMENTS["every rank"]
    whole, blocks = dispatched(mask, assign)
    alone = plan_dispatch(Visibility(mask, blocks.ring), assign, direction, [rank])  # type: ignore[arg-type]
    assert same_but_for_step_numbers(alone.ranks[rank], getattr(whole, direction).ranks[rank])


def test_blocks_travel_once_for_all_tiles_that_a_rank_computes() -> None:
    """Rank 0 computes everything: each other rank sends q, k and v of its 6 rows, and gets out and lse of them back."""
    plans, _ = dispatched(Mask(ROWS), ASSIGNMENTS["one rank"])
    row = TokenBytes(*HEADS, 8, 8)
    sent = {rank: bytes_.intra_bytes for rank, bytes_ in plans.forward.bytes_by_link(row, Topology(1, SIZE)).items()}
    query, keys, result = 4 * 8 * 2, 2 * 2 * 8 * 2, 4 * (8 + 1) * 4
    assert sent == {0: 3 * 6 * result, 1: 6 * (query + keys), 2: 6 * (query + keys), 3: 6 * (query + keys)}


def test_owners_merge_one_partial_result_per_rank_that_computes() -> None:
    plans, _ = dispatched(Mask(ROWS, causal=False), ASSIGNMENTS["owner of the keys"])
    for rank, plan in plans.forward.ranks.items():
        merged = [op for step in plan.steps for op in step.after if op.op == "merge"]
        assert len(merged) == SIZE - 1, f"rank {rank} merges {len(merged)} partial results"


def test_a_first_partial_result_is_copied_into_rows_that_hold_nothing() -> None:
    """Rank 0 computes everything: the others have no tile of their own to merge with."""
    plans, _ = dispatched(Mask(ROWS), ASSIGNMENTS["one rank"])
    ops = [[op.op for step in plans.forward.ranks[rank].steps for op in step.after] for rank in range(SIZE)]
    assert ops == [["finish"], *[["copy", "finish"]] * (SIZE - 1)]
