"""Reads token sets (format: engine.data.manifest) through memory maps, checked when opened."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.data.manifest import MANIFEST_FILE, WRITER, Manifest, read_manifest
from engine.data.tokenizers import ByteTokenizer, Ids, load_tokenizer_file
from engine.pretrained.folder import TOKENIZER_FILE

_SCAN_TOKENS = 1 << 22  # tokens checked at a time

_Entry = TypeVar("_Entry", np.int64, np.bool_)


@dataclass(frozen=True, eq=False)
class TokenShards:
    """A read-only sequence of token ids with document boundaries: a whole token set or a window of one.

    `token_count` ids in [0, vocab_size). Positions in all methods count from the start of the window.
    """

    manifest: Manifest
    folder: Path
    parts: tuple[np.memmap[Any, Any], ...]
    documents: Ids | None  # [documents]: first token of each, in the whole set
    prompts: Ids | None  # [2 * ranges]: first token of each and the one after it
    window: range

    @property
    def token_count(self) -> int:
        """Tokens of the window."""
        return len(self.window)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((part.size for part in self.parts), initial=0))

    def read(self, start: int, count: int) -> Ids:
        """Return ids [start, start + count), [count] int64, each checked to be below vocab_size."""
        self._check_range(start, count)
        out = np.empty(count, dtype=np.int64)
        first, done = self.window.start + start, 0
        index = bisect_right(self._starts, first) - 1
        while done < count:
            begin = first + done - self._starts[index]
            ids = self._ids(index, begin, begin + count - done)
            out[done : done + ids.size] = ids
            done, index = done + ids.size, index + 1
        return out

    def _check_range(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or start + count > self.token_count:
            raise IndexError(f"tokens [{start}, {start + count}) of a sequence of {self.token_count}")

    def _ids(self, index: int, begin: int, end: int) -> npt.NDArray[Any]:
        """Return ids [begin, end) of a part. Raises DataError if one is not in [0, vocab_size)."""
        part, limit = self.parts[index], self.manifest.vocab_size
        ids = part[begin:end]
        if ids.size and (ids.max() >= limit or ids.min() < 0):
            wrong = begin + int(np.flatnonzero((ids >= limit) | (ids < 0))[0])
            raise DataError(
                f"{part.filename}: token {wrong} (byte offset {part.offset + wrong * part.itemsize}) is "
                f"{int(part[wrong])}; expected an id from 0 to {limit - 1}. Correct vocab_size in the manifest or "
                "write the tokens again."
            )
        return ids

    def document_offsets(self, start: int, tokens: Ids) -> Ids:
        """Return the offsets at which documents start in `tokens` = read(start, n), ascending int64, the first is 0.

        Offset 0 may be within a document that started earlier; to a model it is a boundary like the others. Without an
        index of documents in the set, they are found by the end-of-document id.
        """
        if self.documents is not None:
            low = self.window.start + start
            begin, end = np.searchsorted(self.documents, (low + 1, low + tokens.size))
            inner = self.documents[begin:end] - low
        else:
            eod_id = -1 if self.manifest.eod_id is None else self.manifest.eod_id
            inner = np.flatnonzero(tokens[:-1] == eod_id) + 1
        return np.concatenate((np.zeros(1, dtype=np.int64), inner))

    def document_edges(self, start: int, count: int) -> Ids | None:
        """Return the starts of the documents in [start, start + count) and the end of the last, [documents + 1] int64.

        All are within the window, so documents are clipped at its ends. None if the set has no index.
        """
        if self.documents is None:
            return None
        low = self.window.start + start
        begin = int(np.searchsorted(self.documents, low, side="right")) - 1
        end = int(np.searchsorted(self.documents, low + count))
        edges = np.append(self.documents[begin : end + 1], self.window.stop)[: end - begin + 1]
        return np.asarray(np.clip(edges, self.window.start, self.window.stop) - self.window.start)

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """Return which of the tokens [start, start + count) are prompts, which get no label, [count] bool."""
        if self.prompts is None:
            return np.zeros(count, dtype=np.bool_)
        low = self.window.start + start
        return np.asarray(np.searchsorted(self.prompts, np.arange(low, low + count), side="right") % 2 == 1)

    def learned_count(self, start: int, count: int) -> int:
        """Return how many of the tokens [start, start + count) are labels, not prompts."""
        if self.prompts is None:
            return count
        low = self.window.start + start
        edges = np.clip(self.prompts, low, low + count)
        return count - int((edges[1::2] - edges[::2]).sum())

    @property
    def document_count(self) -> int | None:
        """Documents that start in the window; None if the set has no index."""
        if self.documents is None:
            return None
        begin, end = np.searchsorted(self.documents, (self.window.start, self.window.stop))
        return int(end - begin)

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text of the tokens, from the manifest; None for a window or if it is not recorded."""
        return self.manifest.text_bytes if self.token_count == self.manifest.token_count else None

    @property
    def byte_ratio(self) -> float:
        """Bytes of text per byte counted by `load_token_bytes`, over the whole set; 1 if it is not recorded.

        Added tokens that swallow blanks and tokenizers that normalise text make the counts per token inexact.
        """
        text, counted = self.manifest.text_bytes, self.manifest.counted_bytes
        return text / counted if text and counted else 1.0

    def split_tail(self, fraction: float) -> tuple[TokenShards, TokenShards]:
        """Split off the last `fraction` of the tokens, at least one; return (head, tail).

        The split is moved to the next start of a document, if the set has an index and one follows.
        """
        start, stop = self.window.start, self.window.stop
        cut = stop - max(1, round(self.token_count * fraction))
        if self.documents is not None:
            index = int(np.searchsorted(self.documents, cut))
            if index < self.documents.size and self.documents[index] < stop:
                cut = int(self.documents[index])
        if cut <= start:
            raise DataError(
                f"{self.folder}: {self.token_count} tokens cannot be split into training and validation. Give more."
            )
        return replace(self, window=range(start, cut)), replace(self, window=range(cut, stop))

    def load_token_bytes(self) -> Ids | None:
        """Return bytes of text per token id, [vocab_size] int64; None if neither set nor tokenizer has them."""
        manifest, path = self.manifest, self.folder / TOKENIZER_FILE
        if manifest.token_bytes_file is not None:
            return _map(self.folder / manifest.token_bytes_file, "uint32", manifest.vocab_size).astype(np.int64)
        if manifest.tokenizer == ByteTokenizer.name and manifest.vocab_size == ByteTokenizer.vocab_size:
            return ByteTokenizer().token_bytes()
        if not path.exists():
            return None
        counts = load_tokenizer_file(path).token_bytes()[: manifest.vocab_size]
        return np.pad(counts, (0, manifest.vocab_size - counts.size))

    def scan(self) -> None:
        """Read the whole set; raises DataError with file and position of an invalid id or index entry."""
        for index, part in enumerate(self.parts):
            for begin in range(0, part.size, _SCAN_TOKENS):
                self._ids(index, begin, begin + _SCAN_TOKENS)
        made, starts, edges = self.manifest, self.documents, self.prompts
        if starts is not None:
            self._check_index(made.documents_file, starts, 1, starts[0] == 0, "starts of documents, the first 0,")
        if edges is not None:
            least = np.arange(edges.size) % 2 == 0  # a range may touch the next and is never empty
            self._check_index(
                made.prompts_file, edges, least, edges[0] >= 0 and not edges.size % 2, "ranges of prompts"
            )

    def _check_index(self, name: str | None, entries: Ids, least: Any, begins: bool, what: str) -> None:
        count = self.manifest.token_count
        falls = np.flatnonzero(np.diff(entries, append=count) < least)
        if not begins or falls.size:
            place = int(falls[0]) if falls.size else 0
            raise DataError(
                f"{self.folder / str(name)}: expected {what} that ascend within the {count} tokens, but entries from "
                f"{place} on are {entries[place : place + 2].tolist()}. Write the file again."
            )


@dataclass(frozen=True, eq=False)
class EchoedShards(TokenShards):
    """A token set in chunks of `chunk_tokens`, each repeated once; an incomplete last chunk is left out.

        tokens  a b c d e f g h ...      chunk_tokens = 4:  a b c d a b c d e f g h e f g h ...

    The second copy can be predicted from the first, at any distance. With train.seq_len twice as long the second half
    of every sample repeats the first. Small models learn within minutes to copy over half of their context (Olsson et
    al. 2022, induction heads), which they learn much later from plain text. So a toy model shows on real text whether a
    longer context is used.
    """

    chunk_tokens: int

    @property
    def token_count(self) -> int:
        """See `TokenShards.token_count`."""
        return len(self.window) // self.chunk_tokens * self.chunk_tokens * 2

    def read(self, start: int, count: int) -> Ids:
        """See `TokenShards.read`."""
        return self._twice(super().read, start, count)

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """See `TokenShards.is_prompt`."""
        return self._twice(super().is_prompt, start, count)

    def learned_count(self, start: int, count: int) -> int:
        """See `TokenShards.learned_count`."""
        return sum(
            int((~self.is_prompt(first, min(_SCAN_TOKENS, start + count - first))).sum())
            for first in range(start, start + count, _SCAN_TOKENS)
        )

    def document_offsets(self, start: int, tokens: Ids) -> Ids:
        """Return 0 alone: a document boundary would mask the repeated tokens."""
        return np.zeros(1, dtype=np.int64)

    def _twice(self, get: Callable[[int, int], npt.NDArray[_Entry]], start: int, count: int) -> npt.NDArray[_Entry]:
        self._check_range(start, count)
        positions = np.arange(start, start + count, dtype=np.int64)
        sources = positions // (2 * self.chunk_tokens) * self.chunk_tokens + positions % self.chunk_tokens
        first = int(sources.min(initial=start))
        found: npt.NDArray[_Entry] = get(first, int(sources.max(initial=first - 1)) + 1 - first)[sources - first]
        return found


def echoed(shards: TokenShards, chunk_tokens: int) -> TokenShards:
    """Return `shards` with every chunk of `chunk_tokens` tokens repeated once, without an index of documents."""
    return EchoedShards(shards.manifest, shards.folder, shards.parts, None, shards.prompts, shards.window, chunk_tokens)


def open_token_set(path: Path, *, scan_foreign: bool = True) -> TokenShards:
    """The token set at `path`: a folder with manifest.json, a manifest, or a .bin or .npy file with one beside it.

    Checked: the manifest, and that every file is there and has the right size and dtype. A set of another writer is
    read through once, unless `scan_foreign` is off.
    """
    manifest_path = path / MANIFEST_FILE if path.is_dir() else path.with_suffix(".json")
    if not manifest_path.is_file():
        raise DataError(
            f"{path}: no manifest at {manifest_path}. A token set needs one; engine/data/manifest.py describes it."
        )
    manifest, folder = read_manifest(manifest_path), manifest_path.parent
    parts = tuple(_map(folder / file.name, manifest.dtype, file.token_count) for file in manifest.files)
    documents, prompts = (
        None if name is None else _map(folder / name, "int64", count)
        for name, count in (
            (manifest.documents_file, manifest.document_count),
            (manifest.prompts_file, manifest.prompt_count and 2 * manifest.prompt_count),
        )
    )
    shards = TokenShards(manifest, folder, parts, documents, prompts, range(manifest.token_count))
    if scan_foreign and manifest.writer != WRITER:
        shards.scan()
    return shards


def _map(path: Path, dtype: str, count: int | None) -> np.memmap[Any, Any]:
    """Map the entries of a little-endian file; count: number of entries by the manifest, None if not stated."""
    wanted = np.dtype(dtype).newbyteorder("<")
    try:
        is_npy = path.suffix == ".npy"
        found = np.lib.format.open_memmap(path, mode="r") if is_npy else np.memmap(path, dtype=wanted, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; expected {count or 'some'} entries of {dtype}. Copy or write it again."
        ) from None
    if found.dtype != wanted or found.shape != (count or found.size,):
        raise DataError(
            f"{path} holds {found.dtype} of shape {found.shape}; its manifest states {count} entries of {dtype}. The "
            "file is cut short or of another dtype: copy it again or prepare it again."
        )
    return found
