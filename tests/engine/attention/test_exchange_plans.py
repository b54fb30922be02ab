"""Head exchange: as many bytes as the published formulas, and every rank in one place."""

from __future__ import annotations

import pytest

from engine.attention.mask import Mask
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.plan import TokenBytes
from engine.attention.presets import AttentionMethod
from engine.attention.topology import Topology


def method(grid: tuple[int, int, int], circulates: str = "kv", **changes: object) -> AttentionMethod:
    heads, inner, outer = grid
    layout = changes.pop("layout", "zigzag")
    return AttentionMethod(
        "loongtrain", layout, inner, outer, circulates, "float32", "", head_parallel_size=heads, **changes
    )


@pytest.mark.parametrize(
    ("grid", "kv_heads"), [((2, 2, 2), 8), ((4, 2, 1), 4), ((2, 1, 4), 2), ((8, 1, 1), 8), ((4, 1, 1), 2)]
)
def test_two_dimensions_move_the_exchange_and_the_hops_of_the_double_ring(
    grid: tuple[int, int, int], kv_heads: int
) -> None:
    """Without a mask nothing can be left out: (h-1)/h of rows, then W (w-1) inner and W-1 outer hops of K,V."""
    heads, inner, outer = grid
    num_heads, head_dim, rows = 8, 16, 128
    size = heads * inner * outer
    mask = Mask(rows, causal=False)
    chosen = method(grid, kv_replicated=heads > kv_heads)
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
    partial_sums = (heads - 1) * share * 2 * head_dim * 2 if heads > kv_heads else 0  # of copied heads, in fp32
    for link in plans.backward.bytes_by_link(tokens, Topology(1, size)).values():
        assert link.total == exchange + partial_sums + sum(hops.values()) * block + gradient_hops * 2 * block
