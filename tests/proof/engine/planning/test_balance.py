"""A balanced layout gives equal tokens and nearly equal visible pairs under the masks it was solved from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.attention_oracle import num_pairs, pairs_between

from engine.config.settings import AttentionConfig
from engine.planning.visibility.layout import Layout, build_layout
from engine.planning.visibility.mask import BlockList, Mask
from engine.planning.visibility.patterns import build_mask
from engine.planning.visibility.visible import Visibility

ROWS = 1 << 16


def random_documents(seed: int, count: int, rows: int = ROWS) -> tuple[int, ...]:
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(0, 1.2, count)  # a few long ones, many short ones
    starts = np.unique((np.cumsum(lengths) / lengths.sum() * (rows - 1)).astype(np.int64))[:-1] + 1
    return (0, *starts.tolist())


BLOCKS = np.argwhere(np.random.default_rng(3).random((64, 64)) < np.linspace(0.1, 0.6, 64)[:, None])
STRIDED = build_mask("strided", ROWS, AttentionConfig(block_tokens=256, block_stride=8, local_blocks=4))
MASKS: dict[str, tuple[Mask, ...]] = {
    "causal": (Mask(ROWS),),
    "full": (Mask(ROWS, causal=False),),
    "short window": (Mask(ROWS, window=ROWS // 64),),
    "long window": (Mask(ROWS, window=ROWS // 8),),
    "two-sided window": (Mask(ROWS, causal=False, window=ROWS // 16),),
    "sink window": (Mask(ROWS, window=ROWS // 32, sink=64),),
    "many documents": (Mask(ROWS, documents=random_documents(1, 600)),),
    "windowed documents": (Mask(ROWS, window=700, documents=random_documents(2, 40)),),
    "strided": (STRIDED,),
    "listed blocks": (Mask(ROWS, blocks=BlockList.from_pairs(ROWS // 64, BLOCKS)),),
    "every 4th layer full, documents": (
        *(Mask(ROWS, window=512, documents=random_documents(4, 50)),) * 3,
        Mask(ROWS, documents=random_documents(4, 50)),
    ),
    "layers that load opposite ends": (
        *(Mask(ROWS, documents=(0, *range(ROWS // 2, ROWS, 64))),) * 9,
        Mask(ROWS, documents=tuple(range(0, ROWS // 2 + 64, 64))),
    ),
    "padded": (Mask(ROWS - 5000),),
}


FRAGMENTS = {"causal": 2, "full": 1, "short window": 1, "many documents": 5}  # of a rank, in the mean, at most


def loads(layout: Layout, masks: tuple[Mask, ...]) -> list[int]:
    """Visible pairs per rank by the areas of bands, which do not use the sums that the layout was solved from."""
    total = [0] * layout.size
    for mask in set(masks):
        visibility = Visibility(mask, layout)
        for q in range(layout.size):
            total[q] += masks.count(mask) * sum(pairs_between(visibility, q, k) for k in range(layout.size))
    return total


@pytest.mark.parametrize("size", [2, 7, 16])
@pytest.mark.parametrize("name", MASKS)
def test_no_rank_has_more_than_five_percent_above_an_equal_share(name: str, size: int) -> None:
    masks = MASKS[name]
    layout = build_layout("balanced", ROWS, size, masks=masks)
    per_rank = loads(layout, masks)
    assert sum(per_rank) == sum(num_pairs(mask) for mask in masks)
    assert max(per_rank) <= 1.05 * sum(per_rank) / size
    assert sum(map(len, layout.segments)) <= FRAGMENTS.get(name, 1000) * size
    longest_chunk = max(len(segment) for segments in layout.segments for segment in segments)
    assert max(layout.row_counts) - min(layout.row_counts) <= min(64, longest_chunk)


def test_the_solution_does_not_depend_on_the_order_of_layers() -> None:
    masks = MASKS["every 4th layer full, documents"]
    forwards, backwards = (build_layout("balanced", ROWS, 8, masks=m) for m in (masks, masks[::-1]))
    assert forwards == backwards


@given(st.integers(1, 600), st.integers(1, 7), st.integers(0, 9))
def test_token_counts_differ_by_at_most_one_chunk(rows: int, size: int, seed: int) -> None:
    mask = Mask(rows, documents=random_documents(seed, min(rows, 9), rows) if rows > 1 else ())
    layout = build_layout("balanced", rows, size, masks=(mask,))
    assert sum(layout.row_counts) == rows
    # 2 * k chunks of at least 2 * k tokens each per rank
    assert max(layout.row_counts) - min(layout.row_counts) <= max(2, math.isqrt(rows // size))


@pytest.mark.parametrize("name", ["documents", "strided"])
def test_a_million_tokens_on_256_ranks_are_divided_evenly(name: str) -> None:
    rows = 1 << 20
    options = AttentionConfig(block_tokens=1024, block_stride=8, local_blocks=4)
    masks = {
        "documents": Mask(rows, documents=random_documents(0, 600, rows)),
        "strided": build_mask("strided", rows, options),
    }
    layout = build_layout("balanced", rows, 256, masks=(masks[name],))
    assert max(layout.row_counts) == min(layout.row_counts) == 4096
