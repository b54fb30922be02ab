"""Splitting: the rule keeps both sides alive and does not depend on anything but the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from data_helpers import make_pieces, quick
from hypothesis import given
from hypothesis import strategies as st

from engine.data.build import TRAIN, VALIDATION, split, survey
from engine.data.sources import Piece

parts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=3)
fractions = st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.9, 0.999])


def sides_of(pieces: Sequence[Piece], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """(what trains, what validates)."""
    sides = list(split(pieces, *survey(pieces), fraction))
    train, validation = ([piece for side, piece in sides if side == name] for name in (TRAIN, VALIDATION))
    return train, validation


def documents(pieces: Sequence[Piece]) -> list[list[str]]:
    """The pieces of each, which must be whole."""
    assert [piece.begins for piece in pieces] == [True, *(piece.ends for piece in pieces[:-1])]
    found: list[list[str]] = []
    for piece in pieces:
        found += [[]] if piece.begins else []
        found[-1].append(piece.text)
    return found


def size(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.data) for piece in pieces)


@given(st.lists(parts, min_size=2, max_size=30), fractions)
@quick
def test_neither_side_is_empty_and_every_document_is_whole_on_one(texts: list[list[str]], fraction: float) -> None:
    train, validation = sides_of(make_pieces(*texts), fraction)
    assert train
    assert validation
    assert sorted(documents(train) + documents(validation)) == sorted(texts)


def test_validation_reaches_the_fraction_by_at_most_one_hash_value_more() -> None:
    pieces = make_pieces(*(f"document {index} " * 5 for index in range(2000)))
    share = size(sides_of(pieces, 0.05)[1]) / size(pieces)
    assert 0.05 <= share <= 0.05 + 3 / 2000  # a hash value of 16 bits rarely has more than a few documents


def test_equal_documents_are_on_the_same_side_in_any_order() -> None:
    texts = [f"text {index % 50}" for index in range(100)]
    train, validation = ({piece.text for piece in side} for side in sides_of(make_pieces(*texts), 0.2))
    assert not train & validation
    assert {piece.text for piece in sides_of(make_pieces(*reversed(texts)), 0.2)[1]} == validation
    assert [len(side) for side in sides_of(make_pieces(*["same"] * 10), 0.1)] == [9, 1]  # of one alone a copy


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_a_document_with_most_of_the_text_always_trains(fraction: float) -> None:
    for index in range(50):
        huge = f"huge {index} " * 1000
        assert huge in [piece.text for piece in sides_of(make_pieces("one", huge, f"small {index}"), fraction)[0]]


@given(st.lists(st.text("aé€😀", min_size=1, max_size=9), min_size=1, max_size=6), fractions)
@quick
def test_a_single_document_is_cut_by_position(texts: list[str], fraction: float) -> None:
    pieces = make_pieces(texts)
    train, validation = sides_of(pieces, fraction)
    assert "".join(piece.text for piece in [*train, *validation]) == "".join(texts)
    wanted = max(1, round(size(pieces) * fraction))
    assert wanted <= size(validation) <= wanted + 3  # the cut moves back to the start of a character
    assert [len(documents(side)) for side in (train, validation) if side] == [1] * (1 + bool(train))


@given(parts, st.integers(1, 100))
@quick
def test_max_bytes_is_exact_up_to_a_whole_character(texts: list[str], limit: int) -> None:
    pieces = make_pieces(*texts, max_bytes=limit)
    assert (
        "".join(piece.text for piece in pieces).encode()
        == "".join(texts).encode()[:limit].decode(errors="ignore").encode()
    )
    assert all(piece.begins and piece.ends and piece.text for piece in pieces)


def test_nothing_is_read_past_max_bytes_and_empty_documents_are_none() -> None:
    def texts_with_a_trap() -> object:
        yield "12345"
        raise AssertionError("read past the limit")

    assert [piece.text for piece in make_pieces("abc", texts_with_a_trap(), max_bytes=8)] == ["abc", "12345"]
    assert documents(make_pieces("", "a", ["", ""], ["", "b", "", "c"])) == [["a"], ["b", "c"]]
