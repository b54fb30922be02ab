"""Tokenises a corpus: survey, tokenizer, token sets of both splits; streaming, so memory stays bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.sources import Source
from engine.data.special_tokens import find_bos_ids
from engine.data.split import Piece, SplitName, SplitRule, Survey, iter_pieces, make_rule
from engine.data.texts import Spans
from engine.data.tokenizers import ByteTokenizer, Ids, Tokenizer, load_tokenizer_file, train_bpe
from engine.data.writer import TokenSetWriter

TRAIN: SplitName = "train"
VALIDATION: SplitName = "validation"
Stage = Literal["waiting", "survey", "tokenizer", "encode"]

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


def build(work: Path, config: DataConfig, source: Source, progress: ProgressCallback) -> Tokenizer:
    """Fill the empty folder `work` with the token sets of both splits and their tokenizer, which is returned."""
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
    return tokenizer


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
