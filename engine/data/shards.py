"""Reads token sets (format: engine.data.manifest) through memory maps, checked when opened."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.data.manifest import MANIFEST_FILE, WRITER, Manifest, read_manifest
from engine.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, load_tokenizer_file

_SCAN_TOKENS = 1 << 22  # tokens checked at a time

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenShards:
    """A read-only sequence of token ids with document boundaries: a whole token set or a window of one.

    `token_count` ids in [0, vocab_size). Positions in all methods count from the start of the window.
    """

    manifest: Manifest
    folder: Path
    parts: tuple[np.memmap[Any, Any], ...]
    documents: npt.NDArray[np.int64] | None  # [documents]: where each starts in the whole set
    prompts: npt.NDArray[np.int64] | None  # [ranges, 2]
    window: range

    @property
    def token_count(self) -> int:
        """Of the window."""
        return len(self.window)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((part.size for part in self.parts), initial=0))

    def read(self, start: int, count: int) -> Tokens:
        """Ids of [start, start + count), int64 [count], each checked to be below vocab_size."""
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
        """Ids [begin, end) of a part; `DataError` if one is not in [0, vocab_size)."""
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

    def document_offsets(self, start: int, tokens: Tokens) -> Tokens:
        """Where documents start within `tokens` = read(start, n), int64, ascending; always begins with 0.

        Offset 0 may lie inside a document that began earlier: to a model it is a boundary like the others. Without an
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

    def document_edges(self, start: int, count: int) -> Tokens | None:
        """Starts of the documents with tokens in [start, start + count) and the end of the last, int64 [documents + 1].

        All within the window: of a document that it cuts, only what lies inside counts. Null if the set has no index.
        """
        if self.documents is None:
            return None
        low = self.window.start + start
        begin = int(np.searchsorted(self.documents, low, side="right")) - 1
        end = int(np.searchsorted(self.documents, low + count))
        edges = np.append(self.documents[begin : end + 1], self.window.stop)[: end - begin + 1]
        return np.asarray(np.clip(edges, self.window.start, self.window.stop) - self.window.start)

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens [start, start + count) are read but not learned, bool [count]."""
        mask = np.zeros(count, dtype=np.bool_)
        if self.prompts is not None:
            low = self.window.start + start
            begin = int(np.searchsorted(self.prompts[:, 1], low, side="right"))
            end = int(np.searchsorted(self.prompts[:, 0], low + count))
            for first, after in self.prompts[begin:end].tolist():
                mask[max(first - low, 0) : after - low] = True
        return mask

    @property
    def document_count(self) -> int | None:
        """Documents that start in the window; null if the set has no index of documents."""
        if self.documents is None:
            return None
        begin, end = np.searchsorted(self.documents, (self.window.start, self.window.stop))
        return int(end - begin)

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text behind the tokens, as the manifest says; null for a window or if it does not say."""
        return self.manifest.text_bytes if self.token_count == self.manifest.token_count else None

    def split_tail(self, fraction: float) -> tuple[TokenShards, TokenShards]:
        """(head, tail) of this set: the tail is the last `fraction` of the tokens, at least one.

        The cut moves on to the next start of a document if the set has an index and one follows.
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

    def load_token_bytes(self) -> Tokens | None:
        """Bytes of text per token id, int64 [vocab_size]; null if neither the set nor its tokenizer tells."""
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
        """Read every id and document start of the whole set; a `DataError` names file and offset of a wrong one."""
        for index, part in enumerate(self.parts):
            for begin in range(0, part.size, _SCAN_TOKENS):
                self._ids(index, begin, begin + _SCAN_TOKENS)
        falls = [] if self.documents is None else np.flatnonzero(np.diff(self.documents) <= 0).tolist()
        if falls:
            raise DataError(
                f"{self.folder / str(self.manifest.documents_file)}: entry {falls[0] + 1} is not above the one before "
                "it; document starts must ascend. Write the file again."
            )


@dataclass(frozen=True, eq=False)
class EchoedShards(TokenShards):
    """A token set in pieces of `piece_tokens`, each twice in a row; a last piece that is not whole is left out.

        tokens  a b c d e f g h ...      piece_tokens = 4:  a b c d a b c d e f g h e f g h ...

    The second time text can be told from memory, however long ago it was. With train.seq_len twice as long the second
    half of every sample repeats the first. Small models learn within minutes to look back over half of their context
    (Olsson et al. 2022, induction heads), which plain text teaches them far later. So a toy shows on real text whether
    a longer context is used.
    """

    piece_tokens: int

    @property
    def token_count(self) -> int:
        """See `TokenShards.token_count`."""
        return len(self.window) // self.piece_tokens * self.piece_tokens * 2

    def read(self, start: int, count: int) -> Tokens:
        """See `TokenShards.read`."""
        self._check_range(start, count)
        first, places = self._places(start, count)
        return super().read(first, int(places.max(initial=-1)) + 1)[places]

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """See `TokenShards.is_prompt`."""
        first, places = self._places(start, count)
        return super().is_prompt(first, int(places.max(initial=-1)) + 1)[places]

    def document_offsets(self, start: int, tokens: Tokens) -> Tokens:
        """Always 0 alone: a boundary would hide what is to be remembered."""
        return np.zeros(1, dtype=np.int64)

    def _places(self, start: int, count: int) -> tuple[int, Tokens]:
        """(first token of the text that is needed, where after it each of [start, start + count) is read)."""
        positions = np.arange(start, start + count, dtype=np.int64)
        sources = positions // (2 * self.piece_tokens) * self.piece_tokens + positions % self.piece_tokens
        first = int(sources.min(initial=start))
        return first, sources - first


def echoed(shards: TokenShards, piece_tokens: int) -> TokenShards:
    """`shards` with every piece of `piece_tokens` tokens twice in a row; no index of documents: they are in pieces."""
    return EchoedShards(shards.manifest, shards.folder, shards.parts, None, shards.prompts, shards.window, piece_tokens)


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
    documents, prompts = _documents(manifest, folder), _prompts(manifest, folder)
    shards = TokenShards(manifest, folder, parts, documents, prompts, range(manifest.token_count))
    if scan_foreign and manifest.writer != WRITER:
        shards.scan()
    return shards


def _map(path: Path, dtype: str, count: int | None) -> np.memmap[Any, Any]:
    """The entries of a little-endian file; count: how many the manifest says there are, null: it does not."""
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
            f"{path} holds {found.dtype} of shape {found.shape}; its manifest says {count} entries of {dtype}. The "
            "file is cut short or of another dtype: copy it again or prepare it again."
        )
    return found


def _documents(manifest: Manifest, folder: Path) -> npt.NDArray[np.int64] | None:
    if manifest.documents_file is None:
        return None
    path = folder / manifest.documents_file
    documents = _map(path, "int64", manifest.document_count)
    if documents[0] != 0 or not 0 <= documents[-1] < manifest.token_count:
        raise DataError(
            f"{path}: the first document starts at {documents[0]} and the last at {documents[-1]}; expected 0 and less "
            f"than the {manifest.token_count} tokens. Write the file again."
        )
    return documents


def _prompts(manifest: Manifest, folder: Path) -> npt.NDArray[np.int64] | None:
    if manifest.prompts_file is None:
        return None
    path = folder / manifest.prompts_file
    edges = _map(path, "int64", None if manifest.prompt_count is None else 2 * manifest.prompt_count)
    rises = np.diff(edges) >= (np.arange(1, edges.size) % 2)  # a range may touch the next and is never empty
    if edges.size % 2 or not rises.all() or edges[0] < 0 or edges[-1] > manifest.token_count:
        raise DataError(
            f"{path}: expected ranges of prompts that ascend within the {manifest.token_count} tokens. "
            "Write the file again, or leave the key out."
        )
    return edges.reshape(-1, 2)
