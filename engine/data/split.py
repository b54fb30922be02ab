"""Which text trains and which validates: decided by document, by a hash of its content, the same everywhere.

The rule: documents are ordered by the hash of their text (of its first piece, if it is long) and go to validation until
that holds the wanted fraction of all bytes; the rest trains. So equal documents land on the same side. Two exceptions
keep both sides alive: hash values that carry more than half of all text always train, and if that leaves nothing for
validation, it gets the first document. A corpus of a single document is cut by position: its last bytes validate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

import numpy as np

from engine.config.errors import DataError
from engine.data.sources import Source
from engine.data.texts import Spans

SplitName = Literal["train", "validation"]
BUCKETS = 1 << 16  # hash values told apart; a survey needs one number for each


@dataclass(frozen=True)
class Piece:
    """Consecutive text of one document; `data` is its UTF-8, never empty.

    learned, is_chat: see `Text`; some of what is learned may lie past the end of `text`.
    """

    document: int  # counts documents from 0
    text: str
    data: bytes
    ends_document: bool
    learned: Spans | None = None
    is_chat: bool = False


def iter_pieces(source: Source, max_bytes: int | None) -> Iterator[Piece]:
    """All text of `source`, empty documents left out, cut after exactly `max_bytes` bytes of UTF-8.

    Only if the limit falls inside a character, that character is left out too.
    """
    document, left = 0, max_bytes
    for origin, texts in source.documents():
        held: Piece | None = None
        for part in texts:
            text, data = part.text, _encode(part.text, origin)
            if left is not None and len(data) >= left:
                text = data[:left].decode("utf-8", errors="ignore")
                data = text.encode("utf-8")
                left = 0
            elif left is not None:
                left -= len(data)
            if data:
                if held is not None:
                    yield held
                held = Piece(document, text, data, False, part.learned, part.is_chat)
            if left == 0:
                break
        if held is not None:
            yield replace(held, ends_document=True)
            document += 1
        if left == 0:
            return


def _encode(text: str, origin: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which is no character. Mend or leave out this document."
        ) from None


class Survey:
    """What one pass over the corpus finds, piece by piece: how much there is and how it spreads over hash values."""

    def __init__(self) -> None:
        self.documents = 0
        self.text_bytes = 0
        self.bytes_per_bucket = np.zeros(BUCKETS, dtype=np.int64)
        self._bucket: int | None = None

    def add(self, piece: Piece) -> None:
        """Count the next piece; pieces come in order."""
        if self._bucket is None:
            self._bucket = hash_bucket(piece.data)
            self.documents += 1
        self.bytes_per_bucket[self._bucket] += len(piece.data)
        self.text_bytes += len(piece.data)
        if piece.ends_document:
            self._bucket = None


@dataclass(frozen=True)
class SplitRule:
    """The decision for one corpus: exactly one of the three ways applies."""

    validation_buckets: frozenset[int] = frozenset()
    first_document_validates: bool = False
    train_bytes: int | None = None  # a single document: so many bytes train, the rest validates

    def assign(self, pieces: Iterable[Piece]) -> Iterator[tuple[SplitName, Piece]]:
        """Each piece with its side; a document cut by position becomes a document on either side."""
        if self.train_bytes is not None:
            yield from _cut(pieces, self.train_bytes)
            return
        validates: bool | None = None
        for piece in pieces:
            if validates is None:
                validates = self._validates(piece)
            yield "validation" if validates else "train", piece
            if piece.ends_document:
                validates = None

    def _validates(self, first_piece: Piece) -> bool:
        if self.first_document_validates:
            return first_piece.document == 0
        return hash_bucket(first_piece.data) in self.validation_buckets


def make_rule(survey: Survey, fraction: float) -> SplitRule:
    """The rule (see the module's text) for a corpus that was surveyed; 0 < fraction < 1."""
    if survey.documents == 1:
        return SplitRule(train_bytes=survey.text_bytes - max(1, round(survey.text_bytes * fraction)))
    counts = survey.bytes_per_bucket.tolist()
    filled = [bucket for bucket, count in enumerate(counts) if count]
    heavy = [bucket for bucket in filled if 2 * counts[bucket] > survey.text_bytes]
    always_train = heavy[0] if heavy else filled[-1]
    chosen: set[int] = set()
    held = 0
    for bucket in filled:
        if held >= fraction * survey.text_bytes:
            break
        if bucket != always_train:
            chosen.add(bucket)
            held += counts[bucket]
    return SplitRule(validation_buckets=frozenset(chosen), first_document_validates=not chosen)


def hash_bucket(data: bytes) -> int:
    """A number in [0, BUCKETS) that depends on nothing but `data`."""
    return int.from_bytes(blake2b(data, digest_size=2).digest(), "big")


def _cut(pieces: Iterable[Piece], train_bytes: int) -> Iterator[tuple[SplitName, Piece]]:
    """The single document of `pieces` cut after `train_bytes`, or before the character that lies across the cut."""
    position = 0
    for piece in pieces:
        start, position = position, position + len(piece.data)
        if position < train_bytes:
            yield "train", piece
            continue
        head = piece.data[: max(0, train_bytes - start)].decode("utf-8", errors="ignore")
        tail = piece.text[len(head) :]
        if start < train_bytes:
            # An empty head still has to end the document on the training side.
            yield "train", replace(piece, text=head, data=head.encode("utf-8"), ends_document=True)
        if tail:
            learned = None if piece.learned is None else _after(piece.learned, len(head))
            yield "validation", replace(piece, document=1, text=tail, data=tail.encode("utf-8"), learned=learned)


def _after(spans: Spans, cut: int) -> Spans:
    """What of `spans` lies from the character `cut` on, counted from there."""
    return tuple((max(first - cut, 0), after - cut) for first, after in spans if after > cut)
