"""What a rank asks of torch's allocator before torch is there."""

from __future__ import annotations

import pytest

from engine.runs.process import prefer_expandable_segments


def test_segments_grow_in_place_where_nobody_has_said_otherwise() -> None:
    environment = {"PATH": "/bin"}
    prefer_expandable_segments(environment)
    assert environment == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_a_user_set_by_either_name_stays_alone(name: str) -> None:
    environment = {name: "max_split_size_mb:512"}
    prefer_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:512"}
