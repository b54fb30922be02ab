"""Points, cells and what is legal where."""

from __future__ import annotations

import pytest

from engine.bench.spec import AttentionCell, HeadShape, RankSetup, Rounds
from engine.planning.methods.presets import PRESETS


def cell_of(variants: tuple[str, ...], setup: RankSetup) -> AttentionCell:
    return AttentionCell(variants, "causal", 4096, setup, HeadShape(8, 8, 64), Rounds(1))


def test_illegal_variants_are_skipped_with_the_reason() -> None:
    cell = cell_of(("single", "ring", "burst:ring_inner_size=3"), RankSetup(4))
    legal, skipped = cell.legal_variants()
    assert legal == ("ring",)
    assert "one rank" in skipped["single"]
    assert "3" in skipped["burst:ring_inner_size=3"]


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 1), (4, 2), (8, 2)])
def test_every_preset_is_legal_or_says_why_not(ranks: int, nodes: int) -> None:
    cell = cell_of(tuple(PRESETS), RankSetup(ranks, nodes))
    legal, skipped = cell.legal_variants()
    assert sorted([*legal, *skipped]) == sorted(PRESETS)
    assert all(skipped.values())
    assert "single" in (legal if ranks == 1 else skipped)
