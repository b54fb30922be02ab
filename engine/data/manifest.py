"""The token set format: one folder of token files, described by a JSON manifest. Any tool can write it.

    FOLDER/manifest.json
    FOLDER/tokens-00000.bin ...   token ids one after the other, no header, little-endian (or one-dimensional .npy)
    FOLDER/documents.bin          optional: int64 little-endian, where each document starts, counted in tokens over
                                  all files; ascending, the first is 0
    FOLDER/prompts.bin            optional: int64 little-endian pairs [first, after): ranges of tokens that are read but
                                  not learned; ascending, none touches the next
    FOLDER/token_bytes.bin        optional: uint32 little-endian, vocab_size entries: bytes of text per token id;
                                  without it (and without a known tokenizer) no loss in bits per byte can be told
    FOLDER/tokenizer.json         optional: to turn ids into text

manifest.json, all that must be there:

    {"format": "burst-tokens", "version": 1, "dtype": "uint16", "vocab_size": 50257, "token_count": 123456,
     "files": [{"name": "tokens-00000.bin", "token_count": 123456}]}

dtype is uint8, uint16, uint32, int32 or int64. May be added: eod_id (the id that ends every document), bos_ids (those
that begin every text), tokenizer (a name; "bytes" is known), documents_file and document_count, prompts_file and
prompt_count, token_bytes_file, text_bytes, max_token_id, source, writer, and in each entry of files its sha256. Names
are plain: the files lie in the manifest's own folder. A manifest may also lie beside a single file under its name:
corpus.bin (or corpus.npy) and corpus.json. Unknown keys are ignored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.files import read_json_object
from engine.errors import DataError

FORMAT = "burst-tokens"
VERSION = 1
WRITER = "burst"
MANIFEST_FILE = "manifest.json"
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    name: str
    token_count: int
    sha256: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a token set's manifest says, checked for form but not yet against the files."""

    dtype: str
    vocab_size: int
    token_count: int
    files: tuple[TokenFile, ...]
    eod_id: int | None = None
    bos_ids: tuple[int, ...] = ()
    tokenizer: str | None = None
    documents_file: str | None = None
    document_count: int | None = None
    prompts_file: str | None = None
    prompt_count: int | None = None
    token_bytes_file: str | None = None
    text_bytes: int | None = None
    max_token_id: int | None = None
    source: str | None = None
    writer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `read_manifest` reads back to an equal value."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def storage_dtype(vocab_size: int) -> str:
    """The narrowest dtype that burst writes for ids below `vocab_size`: uint16 or uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of a manifest's dtype name."""
    return np.dtype(name).newbyteorder("<")


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; every mistake of form is listed in one `DataError`."""
    raw = read_json_object(path, "a token set's manifest")
    if raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise DataError(
            f"{path}: format {raw.get('format')!r} version {raw.get('version')!r}; expected {FORMAT!r} version "
            f"{VERSION}. The format is described in engine/data/manifest.py."
        )
    problems = _problems(raw)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"{path} is not a usable manifest:\n{listed}\nThe format is described in engine/data/manifest.py."
        )
    files = tuple(TokenFile(item["name"], item["token_count"], item.get("sha256")) for item in raw["files"])
    keys = Manifest.__dataclass_fields__.keys() - {"files", "bos_ids"}
    return Manifest(files=files, bos_ids=tuple(raw.get("bos_ids", ())), **{key: raw[key] for key in keys if key in raw})


def _problems(raw: dict[str, Any]) -> list[str]:
    problems = []
    if raw.get("dtype") not in DTYPES:
        problems.append(f"dtype is {raw.get('dtype')!r}; legal: {', '.join(DTYPES)}")
    problems += [f"{key} is {raw.get(key)!r}; expected a whole number > 0" for key in _not_positive(raw)]
    for key in ("eod_id", "document_count", "prompt_count", "text_bytes", "max_token_id"):
        if not (raw.get(key) is None or _is_whole(raw[key], 0)):
            problems.append(f"{key} is {raw[key]!r}; expected a whole number >= 0 or null")
    bos_ids = raw.get("bos_ids", [])
    if not (isinstance(bos_ids, list) and all(_is_whole(token, 0) for token in bos_ids)):
        problems.append(f"bos_ids is {bos_ids!r}; expected a list of whole numbers >= 0")
    for key in ("tokenizer", "source", "writer"):
        if not isinstance(raw.get(key), str | None):
            problems.append(f"{key} is {raw[key]!r}; expected a string or null")
    for key in ("documents_file", "prompts_file", "token_bytes_file"):
        if raw.get(key) is not None and not _is_plain_name(raw[key]):
            problems.append(f"{key} is {raw[key]!r}; expected the plain name of a file in the manifest's folder")
    return problems + _file_problems(raw)


def _not_positive(raw: dict[str, Any]) -> list[str]:
    return [key for key in ("vocab_size", "token_count") if not _is_whole(raw.get(key), 1)]


def _file_problems(raw: dict[str, Any]) -> list[str]:
    files = raw.get("files")
    if not isinstance(files, list) or not files or not all(isinstance(item, dict) for item in files):
        return ["files is missing or empty; expected a list of {name, token_count}"]
    problems = []
    for index, item in enumerate(files):
        if not _is_plain_name(item.get("name")):
            problems.append(f"files[{index}].name is {item.get('name')!r}; expected a plain name")
        if not _is_whole(item.get("token_count"), 1):
            problems.append(f"files[{index}].token_count is {item.get('token_count')!r}; an empty shard is of no use")
        if not isinstance(item.get("sha256"), str | None):
            problems.append(f"files[{index}].sha256 is {item['sha256']!r}; expected a string or null")
    if not problems and sum(item["token_count"] for item in files) != raw.get("token_count"):
        total = sum(item["token_count"] for item in files)
        problems.append(f"token_count is {raw.get('token_count')!r} but the files add up to {total}")
    return problems


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_plain_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"}
