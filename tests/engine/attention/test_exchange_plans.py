"""Head exchange: proven by counting, equal to dense float64 attention, and as many bytes as the published formulas."""

from __future__ import annotations

import pytest
from attention_oracle import Group, causal, dense_visibility, errors, oracle, random_inputs

from engine.attention.counting import prove_pair
from engine.attention.grid import Grid
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.mask import Mask
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.plan import TokenBytes
from engine.attention.presets import AttentionMethod
from engine.attention.topology import Topology

GRIDS = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (2, 2, 2), (2, 1, 3), (4, 2, 1), (3, 2, 1)]


def method(grid: tuple[int, int, int], circulates: str = "kv", **changes: object) -> AttentionMethod:
    heads, inner, outer = grid
    layout = changes.pop("layout", "zigzag")
    return AttentionMethod(
        "loongtrain", layout, inner, outer, circulates, "float32", "", head_parallel_size=heads, **changes
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("circulates", ["kv", "q"])
@pytest.mark.parametrize(("mask", "rows"), [(Mask(48), 48), (Mask(29, window=7, documents=(0, 3, 4, 20)), 31)])
@pytest.mark.pairwise
def test_every_pair_is_counted_once_and_numbers_equal_dense_attention(grid, circulates, mask, rows):
    for placement in ("head_first", "context_first", "interleaved"):
        for layout in ("zigzag", "striped", "contiguous"):
            chosen = method(grid, circulates, layout=layout, placement=placement)
            blocks = divide_sequence(chosen, rows, [mask])
            plans = plan_method(chosen, mask, blocks)
            for plan in (plans.forward, plans.backward):
                plan.validate()
            for late in (True, False):
                prove_pair(plans, mask, blocks, late=late)
    inputs = random_inputs(rows, 24, 24)
    got = Group(plans, blocks, ReferenceKernel()).run(inputs).values
    found = errors(got, oracle(inputs, dense_visibility(mask, rows)))
    assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize(("heads", "kv_heads", "parallel"), [(8, 2, 4), (8, 1, 8), (6, 2, 6), (4, 1, 2)])
def test_kv_heads_are_replicated_when_more_ranks_divide_the_heads(heads, kv_heads, parallel):
    for rings in ((1, 1), (2, 1)):
        chosen = method((parallel, *rings), kv_replicated=parallel > kv_heads)
        blocks = divide_sequence(chosen, 40)
        inputs = random_inputs(40, heads, kv_heads)
        got = Group(plan_method(chosen, Mask(40), blocks), blocks, ReferenceKernel()).run(inputs).values
        found = errors(got, oracle(inputs, causal(40)))
        assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 4), (8, 4, 8)])
def test_an_exchange_moves_the_bytes_of_the_published_formula(heads, kv_heads, size):
    head_dim, rows = 16, 64
    chosen = method((size, 1, 1), layout="contiguous", kv_replicated=size > kv_heads)
    plans = plan_method(chosen, Mask(rows), divide_sequence(chosen, rows))
    tokens = TokenBytes(heads, kv_heads, head_dim)
    width, share = heads * head_dim, rows // size
    expected = (size - 1) * share * (2 * width + 2 * max(kv_heads, size) * head_dim) * 2 // size
    sent = plans.forward.bytes_by_link(tokens, Topology(1, size))
    assert {link.total for link in sent.values()} == {expected}
    sent = plans.backward.bytes_by_link(tokens, Topology(1, size))
    partial_sums = (size - 1) * share * 2 * head_dim * 2 if size > kv_heads else 0  # replicated dK, dV travel in fp32
    assert {link.total for link in sent.values()} == {expected + partial_sums}


@pytest.mark.parametrize(("grid", "kv_heads"), [((2, 2, 2), 8), ((4, 2, 1), 4), ((2, 1, 4), 2), ((8, 1, 1), 8)])
def test_two_dimensions_move_the_exchange_and_the_hops_of_the_double_ring(
    grid: tuple[int, int, int], kv_heads: int
) -> None:
    """Without a mask nothing can be left out: (h-1)/h of rows, then W (w-1) inner and W-1 outer hops of K,V."""
    heads, inner, outer = grid
    num_heads, head_dim, rows = 8, 16, 128
    size = heads * inner * outer
    mask = Mask(rows, causal=False)
    chosen = method(grid)
    plans = plan_method(chosen, mask, divide_sequence(chosen, rows))
    share, width = rows // size, num_heads * head_dim
    exchange = (heads - 1) * share * (2 * width + 2 * max(kv_heads, heads) * head_dim) * 2 // heads
    block = (
        2 * share * heads * max(kv_heads // heads, 1) * head_dim * 2
    )  # C of the formula: K and V of part of the heads
    hops = {"inner": outer * (inner - 1), "outer": outer - 1}
    tokens = TokenBytes(num_heads, kv_heads, head_dim)
    for link in plans.forward.bytes_by_link(tokens, Topology(1, size)).values():
        assert link.total == exchange + sum(hops.values()) * block
    # dK, dV in fp32: one hop home inside the ring, or the last hop of a single level; sums of far cycles go straight.
    gradient_hops = sum(hops.values()) + (inner > 1 and outer > 1)
    for link in plans.backward.bytes_by_link(tokens, Topology(1, size)).values():
        assert link.total == exchange + sum(hops.values()) * block + gradient_hops * 2 * block


@pytest.mark.parametrize("placement", ["head_first", "context_first", "interleaved"])
def test_every_rank_has_one_place(placement):
    for shape in GRIDS:
        grid = Grid(*shape, placement)
        assert [grid.rank(*grid.place(rank)) for rank in range(grid.size)] == list(range(grid.size))
        assert sorted(rank for head in range(grid.heads) for rank in grid.ring(head)) == list(range(grid.size))


def test_a_rank_plans_alone_what_the_whole_plan_has_for_it():
    chosen = method((2, 2, 2), "q")
    blocks = divide_sequence(chosen, 64)
    whole = plan_method(chosen, Mask(64), blocks)
    for rank in range(8):
        alone = plan_method(chosen, Mask(64), blocks, rank)
        assert alone.forward.ranks[rank] == whole.forward.ranks[rank]
        assert alone.backward.ranks[rank] == whole.backward.ranks[rank]
