"""The token set format: one folder of token files, described by a JSON manifest. Any tool can write it.

    FOLDER/manifest.json
    FOLDER/tokens-00000.bin ...   token ids one after the other, no header, little-endian (or one-dimensional .npy)
    FOLDER/documents.bin          optional: int64 little-endian, where each document starts, counted in tokens over
                                  all files; ascending, the first is 0
    FOLDER/prompts.bin            optional: int64 little-endian pairs [first, after): ranges of tokens that are read but
                                  not learned; ascending, none overlaps the next
    FOLDER/token_bytes.bin        optional: uint32 little-endian, vocab_size entries: bytes of text per token id;
                                  without it (and without a known tokenizer) no loss in bits per byte can be told
    FOLDER/tokenizer.json         optional: to turn ids into text

manifest.json, all that must be there:

    {"format": "burst-tokens", "version": 1, "dtype": "uint16", "vocab_size": 50257, "token_count": 123456,
     "files": [{"name": "tokens-00000.bin", "token_count": 123456}]}

dtype is uint8, uint16, uint32, int32 or int64. May be added: eod_id (the id that ends every document), bos_ids (those
that begin every text), tokenizer (a name; "bytes" is known), documents_file and document_count, prompts_file and
prompt_count, token_bytes_file, text_bytes, source, writer, and in each entry of files its sha256. Names are plain: the
files lie in the manifest's own folder. A manifest may also lie beside a single file under its name: corpus.bin (or
corpus.npy) and corpus.json. Unknown keys are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.config.schema import range_problems, read_dataclass, setting
from engine.data.tokenizers import Tokenizer
from engine.runs.records import json_text, require_json_object

FORMAT = "burst-tokens"
VERSION = 1
WRITER = "burst"
MANIFEST_FILE = "manifest.json"
Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
_REQUIRED = ("dtype", "vocab_size", "token_count", "files")


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    name: str = ""
    token_count: int = setting(0, "tokens in it", at_least=1)
    sha256: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a token set's manifest says, checked for form but not yet against the files."""

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
    source: str | None = None
    writer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `read_manifest` reads back to an equal value."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def storage_dtype(vocab_size: int) -> Dtype:
    """The narrowest dtype that burst writes for ids below `vocab_size`: uint16 or uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of a manifest's dtype name."""
    return np.dtype(name).newbyteorder("<")


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; every mistake of form is listed in one `DataError`."""
    raw = require_json_object(path, "a token set's manifest", DataError)
    if raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise DataError(
            f"{path}: format {raw.get('format')!r} version {raw.get('version')!r}; expected {FORMAT!r} version "
            f"{VERSION}. The format is described in engine/data/manifest.py."
        )
    missing = [f"{key} is missing" for key in _REQUIRED if raw.get(key) is None]
    manifest, problems = _read(raw)
    problems = [*missing, *problems] or [*_problems(manifest)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"{path} is not a usable manifest:\n{listed}\nThe format is described in engine/data/manifest.py."
        )
    return manifest


def _read(raw: dict[str, Any]) -> tuple[Manifest, list[str]]:
    known = _known(Manifest, raw)
    if isinstance(known.get("files"), list):
        known["files"] = [_known(TokenFile, file) if isinstance(file, dict) else file for file in known["files"]]
    manifest, problems = read_dataclass(Manifest, known)
    assert isinstance(manifest, Manifest)
    return manifest, [problem.text for problem in problems]


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


DOCUMENTS_FILE = "documents.bin"
PROMPTS_FILE = "prompts.bin"
TOKEN_BYTES_FILE = "token_bytes.bin"
DEFAULT_FILE_TOKENS = 1 << 30  # a file holds at most so many tokens (2 or 4 GiB)


class TokenSetWriter:
    """Appends documents to a token set in `folder`, a new one, which is incomplete until `close` has returned."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        bos_ids: Sequence[int] = (),
        file_tokens: int = DEFAULT_FILE_TOKENS,
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self._tokenizer = tokenizer
        self._bos_ids = np.asarray(bos_ids, dtype=np.int64)
        self._file_tokens = file_tokens
        self._dtype = numpy_dtype(storage_dtype(tokenizer.vocab_size))
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._in_file = 0
        self._files: list[TokenFile] = []
        self._documents = (folder / DOCUMENTS_FILE).open("wb")
        self._prompts = (folder / PROMPTS_FILE).open("wb")
        self._prompt_count = 0
        self._inside_document = False
        self.token_count = 0
        self.document_count = 0
        self.text_bytes = 0

    def append(
        self,
        ids: npt.NDArray[np.int64],
        text_bytes: int,
        *,
        ends_document: bool,
        is_prompt: bool | npt.NDArray[np.bool_] = False,
    ) -> None:
        """Add the next part of the current document (or of a new one); the last part is followed by `eod_id`.

        is_prompt: whether the ids are read but not learned, or which of them; with bool [ids], `eod_id` is not, either.
        A new document begins with `bos_ids`, but one of bool [ids], a conversation, as its chat template has it.
        """
        if isinstance(is_prompt, bool):
            ids = ids if self._inside_document else np.concatenate((self._bos_ids, ids))
            edges = [0, ids.size] if is_prompt and ids.size else []
        else:
            padded = np.concatenate(([False], is_prompt, [True] * ends_document, [False]))
            edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
        self._prompts.write((np.asarray(edges, dtype="<i8") + self.token_count).tobytes())
        self._prompt_count += len(edges) // 2
        if not self._inside_document:
            self._documents.write(self.token_count.to_bytes(8, "little"))
            self.document_count += 1
        self._inside_document = not ends_document
        self.text_bytes += text_bytes
        self._write(np.append(ids, self._tokenizer.eod_id) if ends_document else ids)

    def close(self, source: str) -> Manifest:
        """The manifest, written last."""
        self.close_files()
        self._tokenizer.token_bytes().astype("<u4").tofile(self._folder / TOKEN_BYTES_FILE)
        manifest = Manifest(
            dtype=storage_dtype(self._tokenizer.vocab_size),
            vocab_size=self._tokenizer.vocab_size,
            token_count=self.token_count,
            files=tuple(self._files),
            eod_id=self._tokenizer.eod_id,
            bos_ids=tuple(self._bos_ids.tolist()),
            tokenizer=self._tokenizer.name,
            documents_file=DOCUMENTS_FILE,
            document_count=self.document_count,
            prompts_file=PROMPTS_FILE if self._prompt_count else None,
            prompt_count=self._prompt_count or None,
            token_bytes_file=TOKEN_BYTES_FILE,
            text_bytes=self.text_bytes,
            source=source,
            writer=WRITER,
        )
        if not self._prompt_count:
            (self._folder / PROMPTS_FILE).unlink()
        (self._folder / MANIFEST_FILE).write_text(json_text(manifest.to_json()))
        return manifest

    def close_files(self) -> None:
        """Close the open files; a set without a manifest is no set."""
        self._finish_file()
        self._documents.close()
        self._prompts.close()

    def _write(self, ids: npt.NDArray[np.int64]) -> None:
        if ids.size == 0:
            return
        self.token_count += ids.size
        while ids.size:
            room = self._file_tokens - self._in_file
            data = ids[:room].astype(self._dtype).tobytes()
            if self._file is None:
                self._file = (self._folder / f"tokens-{len(self._files):05d}.bin").open("wb", buffering=1 << 20)
            self._file.write(data)
            self._hash.update(data)
            self._in_file += min(room, ids.size)
            ids = ids[room:]
            if self._in_file == self._file_tokens:
                self._finish_file()

    def _finish_file(self) -> None:
        if self._file is None:
            return
        name = Path(self._file.name).name
        self._file.close()
        self._files.append(TokenFile(name, self._in_file, self._hash.hexdigest()))
        self._file, self._hash, self._in_file = None, hashlib.sha256(), 0
