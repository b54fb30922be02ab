"""The token set format: a folder of token files with a JSON manifest, which any tool can write.

    FOLDER/manifest.json
    FOLDER/tokens-00000.bin ...   token ids one after the other, no header, little-endian (or one-dimensional .npy)
    FOLDER/documents.bin          optional: int64 little-endian, where each document starts, counted in tokens over
                                  all files; ascending, the first is 0
    FOLDER/prompts.bin            optional: int64 little-endian pairs [first, after): ranges of prompt tokens, which are
                                  no labels; ascending, none overlaps the next
    FOLDER/token_bytes.bin        optional: uint32 little-endian, vocab_size entries: bytes of text per token id;
                                  without it (and without a known tokenizer) there is no loss in bits per byte
    FOLDER/tokenizer.json         optional: to decode ids

manifest.json with the required keys:

    {"format": "burst-tokens", "version": 1, "dtype": "uint16", "vocab_size": 50257, "token_count": 123456,
     "files": [{"name": "tokens-00000.bin", "token_count": 123456}]}

dtype is uint8, uint16, uint32, int32 or int64. Optional keys: eod_id (the id that ends every document), bos_ids (those
that begin every text), tokenizer (a name; "bytes" is known), documents_file and document_count, prompts_file and
prompt_count, token_bytes_file, text_bytes, counted_bytes (the sum of token_bytes over all tokens, where it may differ
from text_bytes), source, writer, and in each entry of files its sha256. Names are plain: the files are in the
manifest's folder. A manifest may also be next to a single file with the same name: corpus.bin (or corpus.npy) and
corpus.json. Unknown keys are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.config.schema import range_problems, read_dataclass, setting
from engine.data.tokenizers import Ids, Tokenizer
from engine.runs.files import json_text, require_json_object

FORMAT = "burst-tokens"
VERSION = 1
WRITER = "burst"
MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens-00000.bin"
DOCUMENTS_FILE = "documents.bin"
PROMPTS_FILE = "prompts.bin"
TOKEN_BYTES_FILE = "token_bytes.bin"
Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
_REQUIRED = ("dtype", "vocab_size", "token_count", "files")


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    name: str = ""
    token_count: int = setting(0, "tokens in it", at_least=1)
    sha256: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The manifest of a token set, checked for form but not against the files."""

    dtype: Dtype = "uint16"
    vocab_size: int = setting(0, "ids are below it", at_least=1)
    token_count: int = setting(0, "tokens in all files", at_least=1)
    files: tuple[TokenFile, ...] = ()
    eod_id: int | None = setting(None, "ends every document", at_least=0)
    bos_ids: tuple[int, ...] = ()
    tokenizer: str | None = None
    documents_file: str | None = None
    document_count: int | None = setting(None, "entries of documents_file", at_least=1)
    prompts_file: str | None = None
    prompt_count: int | None = setting(None, "ranges in prompts_file", at_least=1)
    token_bytes_file: str | None = None
    text_bytes: int | None = setting(None, "bytes of text behind the tokens", at_least=0)
    counted_bytes: int | None = setting(None, "sum of token_bytes over the tokens", at_least=0)
    source: str | None = None
    writer: str | None = None


def storage_dtype(vocab_size: int) -> Dtype:
    """Return the dtype that burst writes for ids below `vocab_size`: uint16 or uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest at `path`. Raises DataError with all mistakes of form."""
    raw = require_json_object(path, "a token set's manifest", DataError)
    if raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise DataError(
            f"{path}: format {raw.get('format')!r} version {raw.get('version')!r}; expected {FORMAT!r} version "
            f"{VERSION}. The format is described in engine/data/manifest.py."
        )
    missing = [f"{key} is missing" for key in _REQUIRED if raw.get(key) is None]
    known = _known(Manifest, raw)
    if isinstance(known.get("files"), list):
        known["files"] = [_known(TokenFile, file) if isinstance(file, dict) else file for file in known["files"]]
    manifest, mistakes = read_dataclass(Manifest, known)
    problems = [*missing, *(mistake.text for mistake in mistakes)] or [*_problems(manifest)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"{path} is not a usable manifest:\n{listed}\nThe format is described in engine/data/manifest.py."
        )
    return manifest


def _known(cls: type[Any], raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key in cls.__dataclass_fields__}


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from (problem.text for problem in range_problems(manifest))
    for index, file in enumerate(manifest.files):
        yield from (problem.text for problem in range_problems(file, f"files[{index}]."))
    total = sum(file.token_count for file in manifest.files)
    if total != manifest.token_count:
        yield f"token_count is {manifest.token_count} but the files add up to {total}"
    names = {f"files[{index}].name": file.name for index, file in enumerate(manifest.files)}
    for key in ("documents_file", "prompts_file", "token_bytes_file"):
        names[key] = getattr(manifest, key) or "unused"
    for key, name in names.items():
        if name in ("", ".", "..") or set(name) & {"/", "\\"} or not name.isprintable():
            yield f"{key} is {name!r}; expected the plain name of a file in the manifest's folder"
    ids = {f"bos_ids[{index}]": token for index, token in enumerate(manifest.bos_ids)}
    for key, token in {**ids, "eod_id": manifest.eod_id or 0}.items():
        if not 0 <= token < manifest.vocab_size:
            yield f"{key} {token} is not an id below vocab_size {manifest.vocab_size}"


class TokenSetWriter(contextlib.ExitStack):
    """Writes documents to a new token set in `folder`, which is incomplete until `finish` returns.

    learns_ends: whether the id that ends a document is learned.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, bos_ids: Sequence[int] = (), *, learns_ends: bool = True
    ) -> None:
        super().__init__()
        folder.mkdir()
        self._folder, self._tokenizer, self._bos_ids = folder, tokenizer, tuple(bos_ids)
        self._end = np.array([tokenizer.eod_id]), np.array([not learns_ends])
        self._token_bytes = tokenizer.token_bytes()
        # The text of a conversation contains special tokens, which count no bytes, so the sums differ there.
        self._counts_text = learns_ends
        self._dtype, self._hash = storage_dtype(tokenizer.vocab_size), hashlib.sha256()
        names = (TOKENS_FILE, DOCUMENTS_FILE, PROMPTS_FILE)
        self._tokens, self._documents, self._prompts = (
            self.enter_context((folder / name).open("wb")) for name in names
        )
        self.token_count = self.document_count = self.prompt_count = self.text_bytes = self.counted_bytes = 0

    def append(self, ids: Ids, is_prompt: npt.NDArray[np.bool_], text_bytes: int, *, begins_document: bool) -> None:
        """Append a part of the current document, or of a new one; is_prompt: which ids are no labels, [tokens] bool."""
        if begins_document:
            self._end_document()
            self._documents.write(self.token_count.to_bytes(8, "little"))
            self.document_count += 1
        self._write(ids, is_prompt)
        self.text_bytes += text_bytes
        self.counted_bytes += int(self._token_bytes[ids].sum())

    def _end_document(self) -> None:
        if self.document_count:
            self._write(*self._end)

    def _write(self, ids: Ids, is_prompt: npt.NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(is_prompt, prepend=False, append=False)) + self.token_count
        self._prompts.write(edges.astype("<i8").tobytes())
        data = ids.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes()
        self._tokens.write(data)
        self._hash.update(data)
        self.token_count += ids.size
        self.prompt_count += edges.size // 2

    def finish(self, source: str) -> None:
        """End the last document, close the files and write the manifest last."""
        self._end_document()
        self.close()
        self._token_bytes.astype("<u4").tofile(self._folder / TOKEN_BYTES_FILE)
        if not self.prompt_count:
            (self._folder / PROMPTS_FILE).unlink()
        manifest = Manifest(
            dtype=self._dtype,
            vocab_size=self._tokenizer.vocab_size,
            token_count=self.token_count,
            files=(TokenFile(TOKENS_FILE, self.token_count, self._hash.hexdigest()),),
            eod_id=self._tokenizer.eod_id,
            bos_ids=self._bos_ids,
            tokenizer=self._tokenizer.name,
            documents_file=DOCUMENTS_FILE,
            document_count=self.document_count,
            prompts_file=PROMPTS_FILE if self.prompt_count else None,
            prompt_count=self.prompt_count or None,
            token_bytes_file=TOKEN_BYTES_FILE,
            text_bytes=self.text_bytes,
            counted_bytes=self.counted_bytes if self._counts_text else None,
            source=source,
            writer=WRITER,
        )
        described = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
        (self._folder / MANIFEST_FILE).write_text(json_text(described))
