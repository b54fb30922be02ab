"""Points, cells and what is legal where."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.bench.spec import AttentionCell, HeadShape, MachineCell, RankSetup, Rounds, check_points
from engine.config.errors import ConfigError
from engine.planning.methods.presets import PRESETS


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 1), (4, 2), (8, 2)])
def test_every_preset_is_legal_or_says_why_not(ranks: int, nodes: int) -> None:
    variants, setup = (*PRESETS, "burst:ring_inner_size=5"), RankSetup(ranks, nodes)
    cell = AttentionCell(variants, "causal", 4096, setup, HeadShape(8, 8, 64), Rounds(1))
    legal, skipped = cell.legal_variants()
    assert sorted([*legal, *skipped]) == sorted(cell.variants)
    assert all(skipped.values())
    assert "5" in skipped["burst:ring_inner_size=5"]
    assert ranks == 1 or "one rank" in skipped["single"]
    assert ("single" in legal, "ring" in legal) == (ranks == 1, True)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: RankSetup(6, 4), "got 4 nodes for 6 ranks; legal numbers of nodes: 1, 2, 3, 6"),
        *(
            (lambda part=part: check_points([f"ring:{part}"], ["causal"]), f"got {part!r} after the name")
            for part in ("", "layout", "=striped")
        ),
        (lambda: MachineCell(RankSetup(1), HeadShape(1, 1, 7), 1.0).run_config(1), "head_dim"),
    ],
)
def test_what_cannot_be_measured_is_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert problem in str(caught.value)
