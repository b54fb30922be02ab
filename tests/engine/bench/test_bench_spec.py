"""Points, cells and what is legal where."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.spec import (
    AttentionCell,
    HeadShape,
    RankSetup,
    Rounds,
    check_points,
    read_cell,
    split_point,
    write_cell,
)
from engine.config.errors import ConfigError
from engine.planning.methods.presets import PRESETS


@pytest.mark.parametrize("text", ["burst:q", "burst:", "burst:=q"])
def test_a_point_without_field_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME"):
        split_point(text)


@pytest.mark.parametrize(
    ("variant", "mask", "words"),
    [
        ("brust", "causal", "is no preset"),
        ("burst:circulates=q", "causal", "no such setting"),
        ("burst:ring_inner_size=two", "causal", "ring_inner_size"),
        ("burst", "casual", "did you mean causal"),
    ],
)
def test_misspelt_points_are_named(variant: str, mask: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_points([variant], [mask])


def test_cells_survive_the_way_to_the_ranks(tmp_path: Path) -> None:
    shape = HeadShape(4, 2, 16, "float32")
    cell = AttentionCell(("ring", "burst"), "full", 64, RankSetup(8, 2, 3, "auto"), shape, Rounds(2, 0))
    write_cell(cell, tmp_path)
    assert read_cell(AttentionCell, tmp_path) == cell


def test_illegal_variants_are_skipped_with_the_reason() -> None:
    cell = AttentionCell(variants=("single", "ring", "burst:ring_inner_size=3"), setup=RankSetup(ranks=4))
    legal, skipped = cell.legal_variants()
    assert legal == ("ring",)
    assert "one rank" in skipped["single"]
    assert "3" in skipped["burst:ring_inner_size=3"]


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 1), (4, 2), (8, 2)])
def test_every_preset_is_legal_or_says_why_not(ranks: int, nodes: int) -> None:
    cell = AttentionCell(variants=tuple(PRESETS), setup=RankSetup(ranks, nodes))
    legal, skipped = cell.legal_variants()
    assert sorted([*legal, *skipped]) == sorted(PRESETS)
    assert all(skipped.values())
    assert "single" in (legal if ranks == 1 else skipped)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RankSetup(ranks=0),
        lambda: RankSetup(ranks=4, nodes=3),
        lambda: RankSetup(threads=0),
        lambda: Rounds(repeats=0),
        lambda: Rounds(warmup=-1),
    ],
)
def test_impossible_numbers_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match="bench: got"):
        make()
