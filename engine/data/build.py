"""Tokenises a corpus: survey, tokenizer, token sets of both splits; streaming, so memory stays bounded.

Which text trains and which validates is decided by document, by a hash of its content, the same everywhere: documents
are ordered by the hash of their text (of its first piece, if it is long) and go to validation until that holds the
wanted fraction of all bytes; the rest trains. So equal documents land on the same side. Two exceptions keep both sides
alive: hash values that carry more than half of all text always train, and if that leaves nothing for validation, it
gets the first document. A corpus of a single document is cut by position: its last bytes validate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.manifest import TokenSetWriter
from engine.data.sources import Source
from engine.data.texts import Spans
from engine.data.tokenizers import ByteTokenizer, Ids, Tokenizer, find_bos_ids, load_tokenizer_file, train_bpe

SplitName = Literal["train", "validation"]
TRAIN: SplitName = "train"
VALIDATION: SplitName = "validation"
Stage = Literal["waiting", "survey", "tokenizer", "encode"]

BUCKETS = 1 << 16  # hash values told apart; a survey needs one number for each
_REPORT_INTERVAL_S = 0.1
_GROUP_BYTES = 4 << 20  # pieces handed to the tokenizer at once, so that it can use all cores
_GROUP_PIECES = 4096


@dataclass(frozen=True)
class Progress:
    """How far one stage has come. Stages: waiting (another process prepares), survey, tokenizer, encode."""

    stage: Stage
    documents: int = 0
    text_bytes: int = 0  # UTF-8 bytes of text handled in this stage
    tokens: int = 0  # tokens written; 0 before the stage "encode"
    total_text_bytes: int | None = None  # known once the survey is over


ProgressCallback = Callable[[Progress], None]


def build(work: Path, config: DataConfig, source: Source, progress: ProgressCallback) -> None:
    """Fill the empty folder `work` with the token sets of both splits and their tokenizer."""
    tokenizer: Tokenizer | None = None
    if config.tokenizer != "bpe":
        is_bytes = config.tokenizer == ByteTokenizer.name
        tokenizer = ByteTokenizer() if is_bytes else load_tokenizer_file(Path(config.tokenizer).expanduser())
    survey = _survey(config, source, progress)
    rule = make_rule(survey, config.validation_fraction)
    if tokenizer is None:
        tokenizer = _train_tokenizer(config, source, rule, _Reporter("tokenizer", progress, survey.text_bytes))
    tokenizer.save(work)
    report = _Reporter("encode", progress, survey.text_bytes)
    bos_ids = find_bos_ids(config, tokenizer)
    writers = {name: TokenSetWriter(work / name, tokenizer, bos_ids=bos_ids) for name in (TRAIN, VALIDATION)}
    _write_splits(writers, rule.assign(iter_pieces(source, config.max_bytes)), tokenizer, report)
    for name, writer in writers.items():
        if writer.text_bytes == 0:
            raise DataError(
                f"the corpus ({survey.documents} documents, {survey.text_bytes} bytes) leaves no text for {name}. "
                "Give more text (data.paths, data.max_bytes)."
            )
        writer.close(source.description)


def _survey(config: DataConfig, source: Source, progress: ProgressCallback) -> Survey:
    survey, report = Survey(), _Reporter("survey", progress, None)
    for piece in iter_pieces(source, config.max_bytes):
        survey.add(piece)
        report.add(piece)
    report.finish()
    if survey.documents == 0:
        first = f", the first is {source.files[0]}" if source.files else ""
        raise DataError(f"the corpus is empty: {len(source.files)} files without text{first}. Give files with text.")
    return survey


def _train_tokenizer(config: DataConfig, source: Source, rule: SplitRule, report: _Reporter) -> Tokenizer:
    def training_texts() -> Iterator[str]:
        for name, piece in rule.assign(iter_pieces(source, config.max_bytes)):
            report.add(piece)
            if name == TRAIN:
                yield piece.text

    tokenizer = train_bpe(training_texts(), config.bpe_vocab_size)
    report.finish()
    return tokenizer


def _write_splits(
    writers: dict[SplitName, TokenSetWriter],
    pieces: Iterable[tuple[SplitName, Piece]],
    tokenizer: Tokenizer,
    report: _Reporter,
) -> None:
    try:
        for group in _groups(pieces):
            encoded = _encode(tokenizer, [piece for _, piece in group])
            for (name, piece), (ids, is_prompt) in zip(group, encoded, strict=True):
                writers[name].append(ids, len(piece.data), ends_document=piece.ends_document, is_prompt=is_prompt)
                report.add(piece, tokens=ids.size + piece.ends_document)
    finally:
        for writer in writers.values():
            writer.close_files()
    report.finish()


def _encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[tuple[Ids, bool | npt.NDArray[np.bool_]]]:
    """(ids, which of them are read but not learned) of each piece; either all are of conversations, or none is."""
    texts = [piece.text for piece in pieces]
    if not pieces[0].is_chat:
        return [
            (ids, piece.learned is not None) for piece, ids in zip(pieces, tokenizer.encode_many(texts), strict=True)
        ]
    return [
        (ids, ~learned_tokens(offsets, piece.learned or (), len(piece.text)))
        for piece, (ids, offsets) in zip(pieces, tokenizer.encode_chats(texts), strict=True)
    ]


def learned_tokens(offsets: Ids, learned: Spans, length: int) -> npt.NDArray[np.bool_]:
    """Which tokens stand for a learned character, bool [tokens].

    offsets: int64 [tokens, 2], the characters [first, after) of each in a text of `length` characters.
    """
    is_learned = np.zeros(length + 1, dtype=np.int64)
    for first, after in learned:
        is_learned[first + 1 : after + 1] = 1
    count = np.cumsum(is_learned)
    return np.asarray(count[offsets[:, 1]] > count[offsets[:, 0]])


def _groups(pieces: Iterable[tuple[SplitName, Piece]]) -> Iterator[list[tuple[SplitName, Piece]]]:
    group: list[tuple[SplitName, Piece]] = []
    held_bytes = 0
    for name, piece in pieces:
        group.append((name, piece))
        held_bytes += len(piece.data)
        if held_bytes >= _GROUP_BYTES or len(group) >= _GROUP_PIECES:
            yield group
            group, held_bytes = [], 0
    if group:
        yield group


class _Reporter:
    """Adds up one stage's figures and reports them a few times per second, and once at its end."""

    def __init__(self, stage: Stage, progress: ProgressCallback, total_text_bytes: int | None) -> None:
        self._stage = stage
        self._progress = progress
        self._total = total_text_bytes
        self._documents = self._text_bytes = self._tokens = 0
        self._next_s = 0.0

    def add(self, piece: Piece, tokens: int = 0) -> None:
        """Count one more piece."""
        self._documents += piece.ends_document
        self._text_bytes += len(piece.data)
        self._tokens += tokens
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _REPORT_INTERVAL_S
            self.finish()

    def finish(self) -> None:
        """Report the figures as they are."""
        self._progress(Progress(self._stage, self._documents, self._text_bytes, self._tokens, self._total))


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
            text, data = part.text, _utf8(part.text, origin)
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


def _utf8(text: str, origin: str) -> bytes:
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
