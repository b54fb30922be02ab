"""Tokenises a corpus into a fresh folder and commits it by renaming; streaming, so memory stays bounded."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import DataConfig
from engine.data.chat import learned_tokens
from engine.data.files import sync_folders, write_json
from engine.data.identity import make_identity
from engine.data.progress import Progress, ProgressCallback, Stage
from engine.data.sources import Source, open_source
from engine.data.special_tokens import find_bos_ids
from engine.data.split import Piece, SplitName, SplitRule, Survey, Surveyor, iter_pieces, make_rule
from engine.data.tokenizers import ByteTokenizer, Ids, Tokenizer, load_tokenizer_file, train_bpe
from engine.data.writer import TokenSetWriter
from engine.errors import DataError

PREPARED_FORMAT = "burst-prepared"
PREPARED_FILE = "prepared.json"
TRAIN: SplitName = "train"
VALIDATION: SplitName = "validation"

_REPORT_INTERVAL_S = 0.1
_GROUP_BYTES = 4 << 20  # pieces handed to the tokenizer at once, so that it can use all cores
_GROUP_PIECES = 4096


def build_folder(
    folder: Path, config: DataConfig, source: Source, identity: dict[str, Any], progress: ProgressCallback
) -> None:
    """Make the prepared data at `folder`; whatever happens, a folder of that name is complete."""
    work = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        tokenizer = _build(work, config, source, progress)
        if make_identity(config, open_source(config)) != identity:
            raise DataError("the source files changed while they were read. Run again when nothing writes to them.")
        facts = {"format": PREPARED_FORMAT, "identity": identity, "tokenizer": tokenizer.name}
        write_json(work / PREPARED_FILE, facts | {"source": source.description})
        sync_folders((work / TRAIN, work / VALIDATION, work))
        try:
            work.rename(folder)
        except OSError as error:
            # Another process was faster (on a file system without locks): its data is as good as ours.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync_folders((folder.parent,))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of unfinished builds; only the holder of the lock may do this."""
    for path in folder.parent.iterdir():
        if path.name.startswith(f"{folder.name}.tmp-"):
            shutil.rmtree(path, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove prepared data such that no other process ever sees a part of it."""
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    folder.rename(aside)
    shutil.rmtree(aside)


def _build(work: Path, config: DataConfig, source: Source, progress: ProgressCallback) -> Tokenizer:
    tokenizer: Tokenizer | None = None
    if config.tokenizer != "bpe":
        tokenizer = _load_tokenizer(config.tokenizer)
    survey = _survey(config, source, progress)
    rule = make_rule(survey, config.validation_fraction)
    if tokenizer is None:
        tokenizer = _train_tokenizer(config, source, rule, _Reporter("tokenizer", progress, survey.text_bytes))
    tokenizer.save(work)
    report = _Reporter("encode", progress, survey.text_bytes)
    bos_ids = find_bos_ids(config, tokenizer)
    writers = {name: _open_writer(work / name, tokenizer, bos_ids) for name in (TRAIN, VALIDATION)}
    _write_splits(writers, rule.assign(iter_pieces(source, config.max_bytes)), tokenizer, report)
    for name, writer in writers.items():
        if writer.text_bytes == 0:
            raise DataError(
                f"the corpus ({survey.documents} documents, {survey.text_bytes} bytes) leaves no text for {name}. "
                "Give more text (data.paths, data.max_bytes)."
            )
        writer.close(source.description)
    return tokenizer


def _load_tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == ByteTokenizer.name else load_tokenizer_file(Path(name).expanduser())


def _survey(config: DataConfig, source: Source, progress: ProgressCallback) -> Survey:
    surveyor, report = Surveyor(), _Reporter("survey", progress, None)
    for piece in iter_pieces(source, config.max_bytes):
        surveyor.add(piece)
        report.add(piece)
    report.finish()
    survey = surveyor.survey()
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


def _open_writer(folder: Path, tokenizer: Tokenizer, bos_ids: Sequence[int]) -> TokenSetWriter:
    folder.mkdir()
    return TokenSetWriter(folder, tokenizer, bos_ids=bos_ids)


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
            writer.finish_files()
    report.finish()


def _encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[tuple[Ids, bool | npt.NDArray[np.bool_]]]:
    """(ids, which of them are read but not learned) of each piece; either all are of conversations, or none is."""
    texts = [piece.text for piece in pieces]
    if all(piece.learned is None for piece in pieces):
        return [(ids, piece.is_prompt) for piece, ids in zip(pieces, tokenizer.encode_many(texts), strict=True)]
    return [
        (ids, ~learned_tokens(offsets, piece.learned or (), len(piece.text)))
        for piece, (ids, offsets) in zip(pieces, tokenizer.encode_chats(texts), strict=True)
    ]


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
