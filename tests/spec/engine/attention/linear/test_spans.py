"""Spans of a layout, and what ranks exchange about them, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from engine.attention.linear.delta_rule import select_delta_rule
from engine.attention.linear.spans import Messages, Spans, build_spans, halo_messages, state_messages
from engine.config.errors import ConfigError
from engine.planning.visibility.layout import build_layout


def zigzag(documents: tuple[int, ...] = (0,)) -> Spans:
    """16 positions on 4 ranks: spans 01 23 45 67 89 AB CD EF of ranks 0 1 2 3 3 2 1 0, of which 67 and 89 are one."""
    return build_spans(build_layout("zigzag", 16, 4), documents, 16)


def test_neighbouring_chunks_of_one_rank_are_one_span() -> None:
    assert [(span.rank, span.start, span.stop) for span in zigzag().spans] == [
        *((0, 0, 2), (1, 2, 4), (2, 4, 6)),
        (3, 6, 10),
        *((2, 10, 12), (1, 12, 14), (0, 14, 16)),
    ]


def test_a_span_needs_the_maps_back_to_the_span_in_which_its_document_begins() -> None:
    spans = zigzag(documents=(0, 5, 12))
    assert spans.sources == ((), (0,), (0, 1), (2,), (2, 3), (), (5,))


def test_a_gradient_needs_the_maps_of_the_spans_that_the_state_reaches() -> None:
    spans = zigzag(documents=(0, 5, 12))
    assert spans.targets == ((2, 1), (2,), (4, 3), (4,), (), (6,), ())


def test_a_map_goes_once_to_each_rank_that_needs_it() -> None:
    spans = zigzag()
    assert state_messages(spans, 3, spans.sources, spans.targets) == Messages(
        {0: (3,), 1: (3,), 2: (3,)}, {0: (0,), 1: (1,), 2: (2,)}
    )


def test_a_halo_comes_from_several_short_spans_and_stops_at_its_document() -> None:
    spans = zigzag(documents=(0, 3))
    assert halo_messages(spans, 3, 3).receives == {1: (3,), 2: (4, 5)}


def test_padding_is_a_document() -> None:
    spans = build_spans(build_layout("contiguous", 16, 2), (), 13)
    assert [part.document for part in spans.parts(1)] == [0, 13]


def test_a_layout_of_single_positions_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"striped deals out single positions.* choose contiguous, zigzag"):
        build_spans(build_layout("striped", 16, 4), (), 16)


@pytest.mark.parametrize(
    ("device", "dtype", "is_installed", "name"),
    [
        ("cpu", torch.bfloat16, True, "torch"),  # its Triton kernels would fail without a GPU
        ("cuda", torch.float32, True, "torch"),
        ("cuda", torch.bfloat16, False, "torch"),
    ],
)
def test_the_rule_of_torch_computes_what_flash_linear_attention_cannot(
    device: str, dtype: torch.dtype, is_installed: bool, name: str
) -> None:
    assert select_delta_rule(torch.device(device), dtype, has_flash_linear=is_installed).name == name
