"""Tokenises a corpus into token sets of both splits, as a stream with bounded memory: survey, tokenizer, encode.

The split is by document and by a hash of its content, equal on all machines: documents are ordered by the hash of their
text (of its first chunk, if it is long) and go to validation until it has the configured fraction of all bytes; the
rest is for training. So equal documents are in the same split. Two exceptions keep both splits non-empty: hash values
with more than half of all text always go to training, and if validation is empty it gets the first document. A corpus
of a single document is split by position: its last bytes are for validation.
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

_BUCKETS = 1 << 16  # number of hash values
_REPORT_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Progress:
    """Progress of one stage: waiting (for another process that prepares), survey, tokenizer or encode."""

    stage: Stage
    text_bytes: int = 0  # UTF-8 bytes of text read in this stage
    total_text_bytes: int | None = None  # known after the survey


ProgressCallback = Callable[[Progress], None]


def build(work: Path, config: DataConfig, source: Source, progress: ProgressCallback) -> Problems:
    """Write the token sets of both splits and their tokenizer to the empty folder `work`; return the skipped rows."""
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
        splits: deque[SplitName] = deque()  # splits of the documents read so far that were not encoded yet

        def noted(chunks: Iterable[tuple[SplitName, TextChunk]]) -> Iterator[TextChunk]:
            for name, chunk in chunks:
                if chunk.begins:
                    splits.append(name)
                yield chunk

        chunks = noted(split(read("encode", total), documents, sizes, fraction))
        for part in encode_documents(chunks, tokenizer, bos_ids, is_chat=is_chat):
            if part.begins:
                name = splits.popleft()
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
    """Yield `chunks`, reporting progress a few times per second and at the end."""
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
    """Return the number of documents and the bytes of text per hash value, [_BUCKETS] int64."""
    documents, sizes = 0, np.zeros(_BUCKETS, dtype=np.int64)
    for bucket, chunk in _hashed(chunks):
        documents += chunk.begins
        sizes[bucket] += len(chunk.data)
    return documents, sizes


def _hashed(chunks: Iterable[TextChunk]) -> Iterator[tuple[int, TextChunk]]:
    """Yield each chunk with its document's hash value in [0, _BUCKETS), which depends on the text alone."""
    bucket = 0
    for chunk in chunks:
        if chunk.begins:
            bucket = int.from_bytes(blake2b(chunk.data, digest_size=2).digest(), "big")
        yield bucket, chunk


def split(
    chunks: Iterable[TextChunk], documents: int, sizes: npt.NDArray[np.int64], fraction: float
) -> Iterator[tuple[SplitName, TextChunk]]:
    """Yield each chunk of the corpus with its split, by the rule above.

    A document that is split by position becomes a document of each split.

    Args:
        chunks: The corpus.
        documents, sizes: Results of `survey` for the corpus.
        fraction: Share of the text for validation, between 0 and 1.
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
    """Split the single document of `chunks` after `train_bytes`, or before the character that spans the boundary."""
    left, begins = train_bytes, True
    for chunk in chunks:
        head, tail = chunk.cut(max(0, left))
        left -= len(chunk.data)
        if head.text:
            yield TRAIN, head
        if tail.text:
            yield VALIDATION, replace(tail, begins=begins)
            begins = False
