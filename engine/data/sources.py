"""Where text comes from: plain files, JSONL, parquet and the Python standard library's own source.

Every source yields documents as (origin, texts): where the document came from, and its text in one or more parts of
about a mebibyte, so that a file of any size passes through in bounded memory.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.files import json_type, list_files, reading_error
from engine.data.texts import PIECE_BYTES, Text, split_text

_PARQUET_ROWS = 256
_BYTE_ORDER_MARK = "\ufeff"
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
_STDLIB_SKIPPED_PREFIX = "_sysconfigdata"  # facts about one build of Python, not part of the library

Document = tuple[str, Iterable[Text]]
Record = dict[str, Any]
Read = Callable[[Path], Iterator[Document]]
Reader = tuple[Read, str | None]  # and the hash of its chat template, if it has one


@dataclass(frozen=True)
class Source:
    """An ordered list of files and the way to read documents out of one of them.

    template_hash: of the chat template that renders its conversations; null where there are none.
    """

    description: str
    files: tuple[Path, ...]
    read: Read
    template_hash: str | None = None

    def documents(self) -> Iterator[Document]:
        """Every document in a fixed order; the texts of one must be used before the next is asked for."""
        for path in self.files:
            yield from self.read(path)


def open_source(config: DataConfig, *, stdlib_folder: Path | None = None) -> Source:
    """The source that `config` names, with its files listed and nothing read yet."""
    if config.format == "stdlib":
        folder = stdlib_folder or Path(sysconfig.get_paths()["stdlib"])
        return Source("source code of the Python standard library", find_stdlib_files(folder), _read_stdlib_file)
    suffixes, reader_of = _FORMATS[config.format]
    files = list_files(config.paths, suffixes)
    read, template_hash = reader_of(config)
    return Source(f"{len(files)} {config.format} files", files, read, template_hash)


# --- plain text -------------------------------------------------------------------------------------------------------


def _read_text_file(path: Path) -> Iterator[Document]:
    yield str(path), _text_pieces(path)


def _text_pieces(path: Path) -> Iterator[Text]:
    offset, carry, is_last = 0, b"", False
    try:
        with path.open("rb") as file:
            while not is_last:
                chunk = file.read(PIECE_BYTES)
                data, is_last = carry + chunk, not chunk
                cut = len(data) if is_last else data.rfind(b"\n") + 1 or _last_character(data)
                text = decode_utf8(data[:cut], path, offset)
                yield Text(text.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else text)
                offset, carry = offset + cut, data[cut:]
    except OSError as error:
        raise reading_error(path, error) from None


def _last_character(data: bytes) -> int:
    """Offset of the last UTF-8 character of `data`, which may be incomplete; a cut there breaks none."""
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] & 0xC0 != 0x80:
            return len(data) - back
    return len(data)


def decode_utf8(data: bytes, path: Path, offset: int, line: int | None = None) -> str:
    """Text of `data`, which lies at byte `offset` of `path`; a `DataError` names the byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"{path}:{line}" if line is not None else str(path)
        remedy = "Convert the file (iconv -f latin1 -t utf-8 ...) or leave it out of data.paths."
        if offset == 0 and data.startswith(b"\x1f\x8b"):
            remedy = "It looks compressed with gzip: unpack it first."
        raise DataError(
            f"{place}: invalid UTF-8 at byte offset {offset + error.start} "
            f"(0x{data[error.start]:02x}, {error.reason}). {remedy}"
        ) from None


# --- JSONL ------------------------------------------------------------------------------------------------------------


def _jsonl_reader(config: DataConfig) -> Reader:
    prompt_field, chat_field = config.prompt_field, config.messages_field

    def text_of(record: Record, place: str) -> Iterable[Text]:
        text = _jsonl_text(record, place, config.text_field, "data.text_field")
        if prompt_field is None:
            return split_text(text)
        return chain(split_text(_jsonl_text(record, place, prompt_field, "data.prompt_field"), ()), split_text(text))

    if chat_field is None:
        return partial(_read_jsonl, texts_of=text_of), None
    from engine.data.chat import find_template, read_messages, render_chat  # only who has conversations needs Jinja

    template = find_template(config)

    def chat_of(record: Record, place: str) -> Iterable[Text]:
        messages = read_messages(_jsonl_value(record, place, chat_field, "data.messages_field"), place, chat_field)
        return (render_chat(template, messages, place),)

    return partial(_read_jsonl, texts_of=chat_of), template.content_hash


def _read_jsonl(path: Path, texts_of: Callable[[Record, str], Iterable[Text]]) -> Iterator[Document]:
    offset = 0
    try:
        with path.open("rb") as file:
            for line, data in enumerate(file, start=1):
                if data.strip():
                    record = _jsonl_record(data, path, offset, line)
                    yield f"{path}:{line}", texts_of(record, f"{path}:{line}")
                offset += len(data)
    except OSError as error:
        raise reading_error(path, error) from None


def _jsonl_record(data: bytes, path: Path, offset: int, line: int) -> Record:
    text = decode_utf8(data, path, offset, line).rstrip("\r\n")
    try:
        record = json.loads(text.removeprefix(_BYTE_ORDER_MARK) if line == 1 else text)
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{path}:{line}: bad JSON ({detail}). Expected one JSON object per line.") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}:{line}: a JSON {json_type(record)}; expected one JSON object per line.")
    return record


def _jsonl_value(record: Record, place: str, field: str, setting: str) -> object:
    if field not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise DataError(f"{place}: no key '{field}'; keys present: {keys}. Set {setting} to one of them.")
    return record[field]


def _jsonl_text(record: Record, place: str, field: str, setting: str) -> str:
    value = _jsonl_value(record, place, field, setting)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: '{field}' is a JSON {json_type(value)}; expected a string. Mend the line or set "
            f"{setting} to a key that holds text."
        )
    return value


# --- parquet ----------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"reading {path} needs the package pyarrow, which is not installed. Run: pip install 'burst-train[parquet]'"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names) or "none"
                raise DataError(
                    f"{path}: no column '{column}'; columns present: {names}. Set data.text_field to one of them."
                )
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
                for cell in batch.column(0):
                    yield f"{path}: row {row}", split_text(_cell_text(cell, path, row, column))
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow reports damaged contents, too, as OSError, but then without an error number.
        if isinstance(error, OSError) and error.errno is not None:
            raise reading_error(path, error) from None
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{path} cannot be read as parquet: {reason} Check the file or data.format.") from None


def _cell_text(cell: Any, path: Path, row: int, column: str) -> str:
    try:
        value = cell.as_py()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: row {row}: column '{column}': invalid UTF-8 at byte offset {error.start}. Mend the row."
        ) from None
    if not isinstance(value, str):
        raise DataError(
            f"{path}: row {row}: column '{column}' holds {cell.type} {value!r:.40}; expected strings. Leave "
            "such rows out, or set data.text_field to a column of text."
        )
    return value


# How files of a folder end, and how one is read.
_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[DataConfig], Reader]]] = {
    "text": ((), lambda _: (_read_text_file, None)),
    "jsonl": ((".jsonl", ".ndjson"), _jsonl_reader),
    "parquet": ((".parquet",), lambda config: (partial(_read_parquet, column=config.text_field), None)),
}


# --- the standard library ---------------------------------------------------------------------------------------------


def find_stdlib_files(folder: Path) -> tuple[Path, ...]:
    """The *.py files of the standard library at `folder`, sorted by their path inside it.

    Tests, installed packages, links and files made by one build of Python are left out, so machines with the same
    Python release have the same text.
    """
    files: list[tuple[str, Path]] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.endswith(".py") and not name.startswith(_STDLIB_SKIPPED_PREFIX) and not path.is_symlink():
                files.append((path.relative_to(folder).as_posix(), path))
    if not files:
        raise DataError(
            f"data.format=stdlib: this Python has no source files of its standard library in {folder} (only compiled "
            "files or a zip?). Give text of your own (data.format=text data.paths=[FOLDER]) or use another Python."
        )
    return tuple(path for _, path in sorted(files))


def _read_stdlib_file(path: Path) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:  # a few files are kept in other encodings on purpose
        return
    except OSError as error:
        raise reading_error(path, error) from None
    yield str(path), split_text(text.removeprefix(_BYTE_ORDER_MARK))
