"""Whole models with learnable sinks, latent attention or heads that differ by layer equal themselves on one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from testkit.tiny_models import DOCUMENTS, build, differences, train_alone_thrice, train_divided

SINKS = ["gpt_oss", "flint", "granite_swa", "mimo_v2_flash"]
PLAIN, PACKED = (0,), DOCUMENTS
QUICK = [(2, "burst", PLAIN), (4, "ulysses", PACKED)]  # ranks, preset, documents
MORE = [(2, "burst", PACKED), (4, "ulysses", PLAIN)]
MORE += [
    (4, preset, documents) for preset in ("ring", "megatron_allgather", "loongtrain") for documents in (PLAIN, PACKED)
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)]


alone = cache(train_alone_thrice)


@pytest.mark.parametrize(("size", "preset", "documents"), CASES)
@pytest.mark.parametrize("family", SINKS)
def test_families_with_learnable_sinks_equal_one_process(
    ranks: Any, family: str, size: int, preset: str, documents: tuple[int, ...]
) -> None:
    got = ranks(size).run(train_divided, family, preset, documents)
    assert any(name.endswith("sinks") for name in got[0].gradients)
    assert differences(got, alone(family, documents)) == []


@pytest.mark.parametrize(
    ("family", "preset", "documents"), [("deepseek_v3", "burst", PACKED), ("gemma4_text", "ulysses", PLAIN)]
)
def test_families_with_other_heads_equal_one_process(
    ranks: Any, family: str, preset: str, documents: tuple[int, ...]
) -> None:
    """Heads of v of another width; heads that differ by layer."""
    got = ranks(2).run(train_divided, family, preset, documents)
    assert differences(got, alone(family, documents)) == []


def test_sinks_are_drawn_away_from_zero() -> None:
    """Where they are 0 a missing gradient of some other factor could not show."""
    sinks = [parameter for name, parameter in build("granite_swa").named_parameters() if name.endswith("sinks")]
    assert all(parameter.abs().min() > 0 for parameter in sinks)
