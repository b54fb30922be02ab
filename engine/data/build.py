"""Tokenises a corpus: survey, tokenizer, token sets of both splits; streaming, so memory stays bounded.

Which text trains and which validates is decided by document, by a hash of its content, the same everywhere: documents
are ordered by the hash of their text (of its first chunk, if it is long) and go to validation until that holds the
wanted fraction of all bytes; the rest trains. So equal documents land on the same side. Two exceptions keep both sides
alive: hash values that carry more than half of all text always train, and if that leaves nothing for validation, it
gets the first document. A corpus of a single document is cut by position: its last bytes validate.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.encoding import encode_documents
from engine.data.manifest import TokenSetWriter
from engine.data.sources import Problems, Source, TextChunk
from engine.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer_file, train_bpe

SplitName = Literal["train", "validation"]
TRAIN: SplitName = "train"
VALIDATION: SplitName = "validation"
Stage = Literal["waiting", "survey", "tokenizer", "encode"]

_BUCKETS = 1 << 16  # hash values told apart; a survey needs one number for each
_REPORT_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Progress:
    """How far one stage has come. Stages: waiting (another process prepares), survey, tokenizer, encode."""

    stage: Stage
    text_bytes: int = 0  # UTF-8 bytes of text that this stage has read
    total_text_bytes: int | None = None  # known once the survey is over


ProgressCallback = Callable[[Progress], None]


def build(work: Path, config: DataConfig, source: Source, progress: ProgressCallback) -> Problems:
    """Fill the empty folder `work` with the token sets of both splits and their tokenizer. Returns what was skipped."""
    tokenizer: Tokenizer | None = ByteTokenizer() if config.tokenizer == ByteTokenizer.name else None
    if config.tokenizer_path is not None:
        tokenizer = load_tokenizer_file(config.tokenizer_path, verify=True)

    def read(stage: Stage, total: int | None = None, skipped: Problems | None = None) -> Iterator[TextChunk]:
        return _reported(source.chunks(config.max_bytes, skipped), stage, total, progress)

    skipped = Problems()
    documents, sizes = survey(read("survey", skipped=skipped))
    if documents == 0:
        first = f", the first is {source.files[0]}" if source.files else ""
        raise DataError(f"the corpus is empty: {len(source.files)} files without text{first}. Give files with text.")
    total, fraction = int(sizes.sum()), config.validation_fraction
    if tokenizer is None:
        sides = split(read("tokenizer", total), documents, sizes, fraction)
        tokenizer = train_bpe((chunk.text for name, chunk in sides if name == TRAIN), config.bpe_vocab_size)
    tokenizer.save(work)
    bos_ids = () if config.bos == "off" else tokenizer.template_start()
    is_chat = config.messages_field is not None
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(TokenSetWriter(work / name, tokenizer, bos_ids, learns_ends=not is_chat))
            for name in (TRAIN, VALIDATION)
        }
        begun: deque[SplitName] = deque()  # of chunks that are read, in the order in which documents begin

        def noted(chunks: Iterable[tuple[SplitName, TextChunk]]) -> Iterator[TextChunk]:
            for name, chunk in chunks:
                if chunk.begins:
                    begun.append(name)
                yield chunk

        chunks = noted(split(read("encode", total), documents, sizes, fraction))
        for part in encode_documents(chunks, tokenizer, bos_ids, is_chat=is_chat):
            if part.begins:
                name = begun.popleft()
            writers[name].append(part.ids, part.is_prompt, part.text_bytes, begins_document=part.begins)
        for name, writer in writers.items():
            if writer.text_bytes == 0:
                raise DataError(
                    f"the corpus ({documents} documents, {total} bytes) leaves no text for {name}. "
                    "Give more text (data.paths, data.max_bytes)."
                )
            writer.finish(source.description)
    return skipped


def _reported(
    chunks: Iterable[TextChunk], stage: Stage, total: int | None, progress: ProgressCallback
) -> Iterator[TextChunk]:
    """`chunks`, told a few times per second and at their end."""
    done, next_s = 0, 0.0
    for chunk in chunks:
        yield chunk
        done += len(chunk.data)
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _REPORT_INTERVAL_S
            progress(Progress(stage, done, total))
    progress(Progress(stage, done, total))


# --- splits -----------------------------------------------------------------------------------------------------------


def survey(chunks: Iterable[TextChunk]) -> tuple[int, npt.NDArray[np.int64]]:
    """(how many documents there are, how their bytes spread over hash values, [_BUCKETS])."""
    documents, sizes = 0, np.zeros(_BUCKETS, dtype=np.int64)
    for bucket, chunk in _hashed(chunks):
        documents += chunk.begins
        sizes[bucket] += len(chunk.data)
    return documents, sizes


def _hashed(chunks: Iterable[TextChunk]) -> Iterator[tuple[int, TextChunk]]:
    """Each with its document's number in [0, _BUCKETS), which depends on nothing but the text."""
    bucket = 0
    for chunk in chunks:
        if chunk.begins:
            bucket = int.from_bytes(blake2b(chunk.data, digest_size=2).digest(), "big")
        yield bucket, chunk


def split(
    chunks: Iterable[TextChunk], documents: int, sizes: npt.NDArray[np.int64], fraction: float
) -> Iterator[tuple[SplitName, TextChunk]]:
    """Each chunk of the corpus of which `survey` found this with its side, by the rule above; 0 < fraction < 1.

    A document cut by position becomes a document on either side.
    """
    total = int(sizes.sum())
    if documents == 1:
        yield from _cut(chunks, total - max(1, round(total * fraction)))
        return
    filled = np.flatnonzero(sizes).tolist()
    always_train = next((bucket for bucket in filled if 2 * sizes[bucket] > total), filled[-1])
    chosen: set[int] = set()
    held, document = 0, 0
    for bucket in filled:
        if held < fraction * total and bucket != always_train:
            chosen.add(bucket)
            held += int(sizes[bucket])
    for bucket, chunk in _hashed(chunks):
        document += chunk.begins
        validates = bucket in chosen if chosen else document == 1
        yield VALIDATION if validates else TRAIN, chunk


def _cut(chunks: Iterable[TextChunk], train_bytes: int) -> Iterator[tuple[SplitName, TextChunk]]:
    """The single document of `chunks` cut after `train_bytes`, or before the character that lies across the cut."""
    left, begins = train_bytes, True
    for chunk in chunks:
        head, tail = chunk.cut(max(0, left))
        left -= len(chunk.data)
        if head.text:
            yield TRAIN, head
        if tail.text:
            yield VALIDATION, replace(tail, begins=begins)
            begins = False
