"""Splitting: the rule keeps both sides alive and does not depend on anything but the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from data_helpers import make_pieces, make_source, quick
from hypothesis import given
from hypothesis import strategies as st

from engine.config.errors import DataError
from engine.data.build import Piece, Survey, iter_pieces, make_rule

parts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=3)
texts = st.lists(parts, min_size=2, max_size=30)
fractions = st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.9, 0.999])


def split(pieces: Sequence[Piece], fraction: float) -> dict[str, list[Piece]]:
    survey, sides = Survey(), dict[str, list[Piece]](train=[], validation=[])
    for piece in pieces:
        survey.add(piece)
    for name, piece in make_rule(survey, fraction).assign(pieces):
        sides[name].append(piece)
    return sides


def size(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.data) for piece in pieces)


@given(texts, fractions)
@quick
def test_neither_side_is_empty_and_every_document_is_whole_on_one(documents: list[list[str]], fraction: float) -> None:
    sides = split(make_pieces(*documents), fraction)
    numbers = {name: {piece.document for piece in side} for name, side in sides.items()}
    assert numbers["train"]
    assert numbers["validation"]
    assert not numbers["train"] & numbers["validation"]
    found = sorted((piece.document, piece.text) for side in sides.values() for piece in side)
    assert found == sorted((index, part) for index, parts in enumerate(documents) for part in parts)


def test_validation_reaches_the_fraction_by_at_most_one_hash_value_more() -> None:
    pieces = make_pieces(*(f"document {index} " * 5 for index in range(2000)))
    share = size(split(pieces, 0.05)["validation"]) / size(pieces)
    assert 0.05 <= share <= 0.05 + 3 / 2000  # a hash value of 16 bits rarely has more than a few documents


def test_equal_documents_are_on_the_same_side_in_any_order() -> None:
    documents = [f"text {index % 50}" for index in range(100)]
    sides = split(make_pieces(*documents), 0.2)
    chosen = {piece.text for piece in sides["validation"]}
    assert not {piece.text for piece in sides["train"]} & chosen
    assert {piece.text for piece in split(make_pieces(*reversed(documents)), 0.2)["validation"]} == chosen
    sides = split(make_pieces(*["same"] * 10), 0.1)  # of one document alone validation gets a copy
    assert (len(sides["train"]), len(sides["validation"])) == (9, 1)


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_a_document_with_most_of_the_text_always_trains(fraction: float) -> None:
    for index in range(50):
        huge = f"huge {index} " * 1000
        sides = split(make_pieces("small one", huge, f"small {index}"), fraction)
        assert huge in [piece.text for piece in sides["train"]]


@given(st.lists(st.text("aé€😀", min_size=1, max_size=9), min_size=1, max_size=6), fractions)
@quick
def test_a_single_document_is_cut_by_position(parts: list[str], fraction: float) -> None:
    pieces = make_pieces(parts)
    sides = split(pieces, fraction)
    assert "".join(piece.text for name in ("train", "validation") for piece in sides[name]) == "".join(parts)
    wanted = max(1, round(size(pieces) * fraction))
    assert wanted <= size(sides["validation"]) <= wanted + 3  # the cut moves back to the start of a character
    for side in sides.values():
        assert [piece.ends_document for piece in side] == [False] * (len(side) - 1) + [True] * bool(side)


@given(parts, st.integers(1, 100))
@quick
def test_max_bytes_is_exact_up_to_a_whole_character(documents: list[str], limit: int) -> None:
    whole = "".join(documents).encode()
    pieces = make_pieces(*documents, max_bytes=limit)
    data = b"".join(piece.data for piece in pieces)
    assert data == whole[:limit].decode(errors="ignore").encode()
    assert [piece.text.encode() for piece in pieces] == [piece.data for piece in pieces]
    assert all(piece.ends_document for piece in pieces)


def test_max_bytes_cuts_ascii_exactly_and_reads_no_further() -> None:
    def texts_with_a_trap() -> object:
        yield "12345"
        raise AssertionError("read past the limit")

    pieces = make_pieces("abc", texts_with_a_trap(), max_bytes=8)
    assert [piece.data for piece in pieces] == [b"abc", b"12345"]
    assert [piece.data for piece in make_pieces("abc", "12345", max_bytes=7)] == [b"abc", b"1234"]
    assert [(piece.document, piece.text) for piece in make_pieces("", "a", ["", ""], "b")] == [(0, "a"), (1, "b")]


def test_lone_surrogates_are_named_with_their_document() -> None:
    with pytest.raises(DataError, match=r"document 1: .*U\+D800\) at character 2"):
        list(iter_pieces(make_source("fine", "ab\ud800c"), None))
