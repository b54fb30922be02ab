"""Reads token sets (format: engine.data.manifest) through memory maps, checked when opened."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.data.files import reading_error
from engine.data.manifest import MANIFEST_FILE, WRITER, Manifest, TokenFile, numpy_dtype, read_manifest
from engine.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, load_tokenizer_file

_SCAN_TOKENS = 1 << 22  # tokens checked at a time
_TOKEN_FILE_SUFFIXES = (".bin", ".npy")

Tokens = npt.NDArray[np.int64]
Mapped = npt.NDArray[Any]


@dataclass(frozen=True)
class _Part:
    """One mapped token file; `start` counts tokens from the start of the set, `header_bytes` lie before the ids."""

    path: Path
    tokens: Mapped
    start: int
    header_bytes: int


class TokenShards:
    """A read-only sequence of token ids with document boundaries: a whole token set or a window of one.

    `token_count` ids in [0, vocab_size). Positions in all methods count from the start of the window.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        parts: tuple[_Part, ...],
        documents: Mapped | None,
        window: range,
        prompts: Mapped | None = None,
    ) -> None:
        self.manifest = manifest
        self.folder = folder
        self.token_count = len(window)
        self.vocab_size = manifest.vocab_size
        self.eod_id = manifest.eod_id
        self.bos_ids = manifest.bos_ids
        self._parts = parts
        self._documents = documents
        self._prompts = prompts
        self._window = window

    def read(self, start: int, count: int) -> Tokens:
        """Ids of [start, start + count), int64 [count], each checked to be below vocab_size."""
        if start < 0 or count < 0 or start + count > self.token_count:
            raise IndexError(f"tokens [{start}, {start + count}) of a sequence of {self.token_count}")
        out = np.empty(count, dtype=np.int64)
        first = position = self._window.start + start
        index = bisect_right([part.start for part in self._parts], position) - 1
        while position < first + count:
            part = self._parts[index]
            begin = position - part.start
            piece = part.tokens[begin : begin + first + count - position]
            _check_ids(part, piece, begin, self.vocab_size)
            out[position - first : position - first + piece.size] = piece
            position += piece.size
            index += 1
        return out

    def document_offsets(self, start: int, tokens: Tokens) -> Tokens:
        """Where documents start within `tokens` = read(start, n), int64, ascending; always begins with 0.

        Offset 0 may lie inside a document that began earlier: to a model it is a boundary like the others. Without an
        index of documents in the set, they are found by the end-of-document id.
        """
        count = tokens.size
        if self._documents is not None:
            low = self._window.start + start
            begin, end = np.searchsorted(self._documents, (low + 1, low + count))
            inner = self._documents[begin:end].astype(np.int64) - low
        elif self.eod_id is not None:
            inner = np.flatnonzero(tokens[:-1] == self.eod_id) + 1
        else:
            inner = np.empty(0, dtype=np.int64)
        return np.concatenate((np.zeros(1, dtype=np.int64), inner))

    def document_edges(self, start: int, count: int) -> Tokens | None:
        """Starts of the documents with tokens in [start, start + count) and the end of the last, int64 [documents + 1].

        All within the window: of a document that it cuts, only what lies inside counts. Null if the set has no index.
        """
        if self._documents is None:
            return None
        low = self._window.start + start
        begin = int(np.searchsorted(self._documents, low, side="right")) - 1
        end = int(np.searchsorted(self._documents, low + count))
        edges = np.append(self._documents[begin : end + 1], self._window.stop)[: end - begin + 1]
        return np.clip(edges.astype(np.int64), self._window.start, self._window.stop) - self._window.start

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens [start, start + count) are read but not learned, bool [count]."""
        mask = np.zeros(count, dtype=np.bool_)
        if self._prompts is None:
            return mask
        low = self._window.start + start
        begin = int(np.searchsorted(self._prompts[:, 1], low, side="right"))
        end = int(np.searchsorted(self._prompts[:, 0], low + count))
        for first, after in self._prompts[begin:end].tolist():
            mask[max(first - low, 0) : after - low] = True
        return mask

    @property
    def document_count(self) -> int | None:
        """Documents that start in the window; null if the set has no index of documents."""
        if self._documents is None:
            return None
        begin, end = np.searchsorted(self._documents, (self._window.start, self._window.stop))
        return int(end - begin)

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text behind the tokens, as the manifest says; null for a window or if it does not say."""
        return self.manifest.text_bytes if self.token_count == self.manifest.token_count else None

    def split_tail(self, fraction: float) -> tuple[TokenShards, TokenShards]:
        """(head, tail) of this set: the tail is the last `fraction` of the tokens, at least one.

        The cut moves on to the next start of a document if the set has an index and one follows.
        """
        window = self._window
        cut = window.stop - max(1, round(len(window) * fraction))
        if self._documents is not None:
            index = int(np.searchsorted(self._documents, cut))
            if index < self._documents.size and self._documents[index] < window.stop:
                cut = int(self._documents[index])
        if cut <= window.start:
            raise DataError(
                f"{self.folder}: {self.token_count} tokens cannot be split into training and validation. Give more."
            )
        return self._view(range(window.start, cut)), self._view(range(cut, window.stop))

    def _view(self, window: range) -> TokenShards:
        return TokenShards(self.manifest, self.folder, self._parts, self._documents, window, self._prompts)

    def load_token_bytes(self) -> Tokens | None:
        """Bytes of text per token id, int64 [vocab_size]; null if neither the set nor its tokenizer tells."""
        manifest = self.manifest
        if manifest.token_bytes_file is not None:
            path = self.folder / manifest.token_bytes_file
            return _map_array(path, "<u4", manifest.vocab_size).astype(np.int64)
        if manifest.tokenizer == ByteTokenizer.name and manifest.vocab_size == ByteTokenizer.vocab_size:
            return ByteTokenizer().token_bytes()
        path = self.folder / TOKENIZER_FILE
        if not path.exists():
            return None
        counts = load_tokenizer_file(path).token_bytes()[: manifest.vocab_size]
        return np.pad(counts, (0, manifest.vocab_size - counts.size))

    def scan(self) -> None:
        """Read every id and document start of the whole set; a `DataError` names file and offset of a wrong one."""
        for part in self._parts:
            for begin in range(0, part.tokens.size, _SCAN_TOKENS):
                _check_ids(part, part.tokens[begin : begin + _SCAN_TOKENS], begin, self.vocab_size)
        if self._documents is not None:
            falls = np.flatnonzero(np.diff(self._documents) <= 0)
            if falls.size:
                path = self.folder / str(self.manifest.documents_file)
                raise DataError(
                    f"{path}: entry {int(falls[0]) + 1} (byte offset {8 * (int(falls[0]) + 1)}) is not above the one "
                    "before it; document starts must ascend. Write the file again."
                )


class EchoedShards(TokenShards):
    """`shards` in pieces of `piece_tokens`, each twice in a row; a last piece that is not whole is left out.

        tokens  a b c d e f g h ...      piece_tokens = 4:  a b c d a b c d e f g h e f g h ...

    The second time text can be told from memory, however long ago it was. With train.seq_len twice as long the second
    half of every sample repeats the first. Small models learn within minutes to look back over half of their context
    (Olsson et al. 2022, induction heads), which plain text teaches them far later. So a toy shows on real text whether
    a longer context is used.
    """

    def __init__(self, shards: TokenShards, piece_tokens: int) -> None:
        # Without an index of documents: they are in pieces.
        tokens = range(shards.token_count // piece_tokens * piece_tokens * 2)
        super().__init__(shards.manifest, shards.folder, (), None, tokens)
        self._shards = shards
        self._piece = piece_tokens

    def read(self, start: int, count: int) -> Tokens:
        """See `TokenShards.read`."""
        if start < 0 or count < 0 or start + count > self.token_count:
            raise IndexError(f"tokens [{start}, {start + count}) of a sequence of {self.token_count}")
        first, places = self._places(start, count)
        return self._shards.read(first, int(places.max(initial=-1)) + 1)[places]

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """See `TokenShards.is_prompt`."""
        first, places = self._places(start, count)
        return self._shards.is_prompt(first, int(places.max(initial=-1)) + 1)[places]

    def document_offsets(self, start: int, tokens: Tokens) -> Tokens:
        """Always 0 alone: a boundary would hide what is to be remembered."""
        return np.zeros(1, dtype=np.int64)

    def _places(self, start: int, count: int) -> tuple[int, Tokens]:
        """(first token of the text that is needed, where after it each of [start, start + count) is read)."""
        positions = np.arange(start, start + count, dtype=np.int64)
        sources = positions // (2 * self._piece) * self._piece + positions % self._piece
        first = int(sources.min()) if count else 0
        return first, sources - first


def open_token_set(path: Path, *, scan_foreign: bool = True) -> TokenShards:
    """The token set at `path`: a folder with manifest.json, a manifest, or a .bin or .npy file with one beside it.

    Checked: the manifest, and that every file is there and has the right size and dtype. A set of another writer is
    read through once, unless `scan_foreign` is off.
    """
    manifest_path = path / MANIFEST_FILE if path.is_dir() else path
    if path.suffix in _TOKEN_FILE_SUFFIXES and manifest_path == path:
        manifest_path = path.with_suffix(".json")
    if not manifest_path.is_file():
        raise DataError(
            f"{path}: no manifest at {manifest_path}. A token set needs one; engine/data/manifest.py describes it."
        )
    manifest, folder = read_manifest(manifest_path), manifest_path.parent
    parts: list[_Part] = []
    for entry in manifest.files:
        start = parts[-1].start + parts[-1].tokens.size if parts else 0
        parts.append(_open_part(folder / entry.name, entry, manifest.dtype, start))
    documents = _open_documents(manifest, folder)
    prompts = _open_prompts(manifest, folder)
    shards = TokenShards(manifest, folder, tuple(parts), documents, range(manifest.token_count), prompts)
    if scan_foreign and manifest.writer != WRITER:
        shards.scan()
    return shards


def _open_part(path: Path, entry: TokenFile, dtype: str, start: int) -> _Part:
    if path.suffix == ".npy":
        tokens, header = _map_npy(path, dtype)
    else:
        tokens, header = _map_array(path, numpy_dtype(dtype).str, entry.token_count), 0
    if tokens.size != entry.token_count:
        raise DataError(f"{path} holds {tokens.size} tokens but its manifest says {entry.token_count}. Copy it again.")
    return _Part(path, tokens, start, header)


def _map_array(path: Path, dtype: str, count: int | None) -> Mapped:
    """The entries of a file; count: how many the manifest says there are, null: it does not."""
    kind = np.dtype(dtype)
    try:
        size = path.stat().st_size
        count = max(1, size // kind.itemsize) if count is None else count
        if size != count * kind.itemsize:
            raise DataError(
                f"{path} has {size} bytes; its manifest says {count} entries of {kind.name} = {count * kind.itemsize} "
                "bytes. The file is cut short or of another dtype: copy it again or prepare it again."
            )
        return np.memmap(path, dtype=kind, mode="r", shape=(count,))
    except OSError as error:
        raise reading_error(path, error) from None


def _map_npy(path: Path, dtype: str) -> tuple[Mapped, int]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise reading_error(path, error) from None
    except ValueError as error:
        raise DataError(f"{path} cannot be read as .npy: {error}. Write it again with numpy.save.") from None
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype != numpy_dtype(dtype):
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        shape = getattr(tokens, "shape", "?")
        raise DataError(f"{path} holds {kind} of shape {shape}; its manifest says one dimension of {dtype}.")
    return tokens, int(tokens.offset)


def _open_documents(manifest: Manifest, folder: Path) -> Mapped | None:
    if manifest.documents_file is None:
        return None
    path = folder / manifest.documents_file
    documents = _map_array(path, "<i8", manifest.document_count)
    if documents[0] != 0 or not 0 <= documents[-1] < manifest.token_count:
        raise DataError(
            f"{path}: the first document starts at {documents[0]} and the last at {documents[-1]}; expected 0 and less "
            f"than the {manifest.token_count} tokens. Write the file again."
        )
    return documents


def _open_prompts(manifest: Manifest, folder: Path) -> Mapped | None:
    if manifest.prompts_file is None:
        return None
    path = folder / manifest.prompts_file
    edges = _map_array(path, "<i8", None if manifest.prompt_count is None else 2 * manifest.prompt_count)
    rises = np.diff(edges) >= (np.arange(1, edges.size) % 2)  # a range may touch the next and is never empty
    if edges.size % 2 or not rises.all() or edges[0] < 0 or edges[-1] > manifest.token_count:
        raise DataError(
            f"{path}: expected ranges of prompts that ascend within the {manifest.token_count} tokens. "
            "Write the file again, or leave the key out."
        )
    return edges.reshape(-1, 2)


def _check_ids(part: _Part, ids: Mapped, begin: int, vocab_size: int) -> None:
    """`DataError` if an id of `ids`, which starts at token `begin` of `part`, is not in [0, vocab_size)."""
    if ids.size == 0 or (ids.max() < vocab_size and (ids.dtype.kind == "u" or ids.min() >= 0)):
        return
    index = begin + int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
    offset = part.header_bytes + index * ids.dtype.itemsize
    raise DataError(
        f"{part.path}: token {index} (byte offset {offset}) is {int(part.tokens[index])}; expected an id from 0 to "
        f"{vocab_size - 1}. Correct vocab_size in the manifest or write the tokens again."
    )
