"""Sources of text: plain files, JSONL, parquet, and the source code of the Python standard library.

A source is a list of files and gives their documents in chunks of about a mebibyte, so that text of any size passes
through in bounded memory.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import math
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.conversations import parse_json, read_conversation
from engine.runs.figures import count_of

if TYPE_CHECKING:
    from engine.data.chat import ChatTemplate, Spans

CHUNK_BYTES = 1 << 20
_ARCHIVES = frozenset({".zst", ".bz2", ".xz", ".zip", ".7z", ".tgz"})
_PARQUET_ROWS = 256
_MOST_PROBLEMS = 20  # listed; further ones are counted
_UTF8_CONTINUATION = bytes(range(0x80, 0xC0))
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"})
_STDLIB_SKIPPED_PREFIX = "_sysconfigdata"  # facts about one build of Python, not part of the library


@dataclass(frozen=True)
class TextChunk:
    """Consecutive text of one document.

    learned: characters [first, after) that a model learns to write, ascending; null: all, empty: none. begins: its
    document does, here.
    """

    text: str
    learned: Spans | None = None
    begins: bool = True

    @cached_property
    def data(self) -> bytes:
        """The text as UTF-8."""
        return self.text.encode()

    def cut(self, size: int) -> tuple[TextChunk, TextChunk]:
        """Split after `size` bytes, or before the character that spans the boundary; return both parts."""
        head = self.data[:size].decode(errors="ignore")
        return self.part(0, len(head)), self.part(len(head), len(self.text))

    def part(self, start: int, end: int) -> TextChunk:
        """Return its characters [start, end)."""
        return replace(self, text=self.text[start:end], learned=_shifted(self.learned, start, end))

    def followed_by(self, chunk: TextChunk) -> TextChunk:
        """Return both as one chunk of the same document."""
        learned = self.learned
        if learned is not None:
            size = len(self.text)
            learned = (*learned, *((first + size, after + size) for first, after in chunk.learned or ()))
        return replace(self, text=self.text + chunk.text, learned=learned)


Document = Iterable[TextChunk]


@dataclass(frozen=True)
class BadRow:
    """A row, or a text file, that cannot be used; problem: its position and the reason."""

    problem: str


@dataclass
class Problems:
    """A count of problems, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Count a problem, and store it if it is one of the first."""
        self.count += 1
        if len(self.first) < _MOST_PROBLEMS:
            self.first.append(problem)

    def listed(self) -> str:
        """Return a message."""
        if self.count == 1:
            return self.first[0]
        left = self.count - len(self.first)
        lines = [f"{self.count} parts of the data cannot be read:", *self.first]
        return "\n  - ".join(lines) + (f"\n  and {left} more" if left > 0 else "")


@dataclass(frozen=True)
class Source:
    """An ordered list of files and the way to read documents out of one of them.

    template_hash: of the chat template that renders its conversations; null where its documents are none.
    skips_bad_rows: they are left out and counted; else they are an error.
    """

    description: str
    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[Document | BadRow]]
    template_hash: str | None = None
    skips_bad_rows: bool = False

    def chunks(self, max_bytes: int | None, skipped: Problems | None = None) -> Iterator[TextChunk]:
        """Yield all text in non-empty chunks, up to `max_bytes` bytes of UTF-8 or the character that exceeds it.

        Rows that are left out are added to `skipped`. Raises DataError for invalid text, with the location
        of every problem, and if every row would be left out; OSError for a file that cannot be read.
        """
        problems, is_empty = Problems(), True
        skipped = Problems() if skipped is None else skipped
        for chunk in self._good_chunks(max_bytes, problems, skipped if self.skips_bad_rows else problems):
            is_empty = False
            yield chunk
        if problems.count:
            raise DataError(problems.listed())
        if is_empty and skipped.count:
            raise DataError(f"no row is left, data.on_bad_row=skip leaves all of them out. {skipped.listed()}")

    def _good_chunks(self, max_bytes: int | None, problems: Problems, bad_rows: Problems) -> Iterator[TextChunk]:
        """Yield the chunks of `chunks`; add problems of files to `problems` and of rows to `bad_rows`."""
        left = math.inf if max_bytes is None else max_bytes
        for parts in chain.from_iterable(_documents(self.read, path, problems, bad_rows) for path in self.files):
            begins = True
            for part in parts:
                chunk = part if begins else replace(part, begins=False)
                size = len(chunk.data)
                if size > left:
                    chunk, _ = chunk.cut(int(left))
                if chunk.text:
                    yield chunk
                    begins = False
                left -= size
                if left <= 0:
                    return


def _documents(
    read: Callable[[Path], Iterator[Document | BadRow]], path: Path, problems: Problems, bad_rows: Problems
) -> Iterator[Document]:
    """Yield the documents of a file; an error that stops reading is added to `problems`."""
    try:
        for document in read(path):
            if isinstance(document, BadRow):
                bad_rows.add(document.problem)
            else:
                yield _chunks_until_problem(document, problems)
    except DataError as error:
        problems.add(str(error))


def _chunks_until_problem(document: Document, problems: Problems) -> Document:
    try:
        yield from document
    except DataError as error:
        problems.add(str(error))


class _BadTextError(DataError):
    """A file is not UTF-8."""


def open_source(config: DataConfig) -> Source:
    """Open the configured source: lists its files, reads nothing. Raises DataError and OSError."""
    template = None
    if config.messages_field is not None:
        from engine.data.chat import find_template  # only conversations need Jinja, which GPU images may lack

        template = find_template(config)
    suffixes, reader = _FORMATS[config.format]
    if config.format == "stdlib":
        files, what = stdlib_files(Path(sysconfig.get_paths()["stdlib"])), "source code of the Python standard library"
    else:
        suffixes = suffixes or config.resolved_text_suffixes
        files = list_files(config.paths, suffixes)
        what = count_of(f"{config.format} file", len(files))
        if config.format == "text" and (others := len(list_files(config.paths, ("",))) - len(files)):
            what += f"; {others} more in these folders skipped, whose names do not end in data.text_suffixes"
    read = partial(reader, config=config, template=template)
    template_hash = None if template is None else template.content_hash
    return Source(what, files, read, template_hash, skips_bad_rows=config.on_bad_row == "skip")


# --- files ------------------------------------------------------------------------------------------------------------


def list_files(paths: Sequence[str], suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the absolute paths of all regular files in `paths`, in order and sorted within an entry.

    An entry is a file, a glob (`**` goes into folders) or a folder, which stands for every file below it that ends
    in one of `suffixes` and is not hidden. A file named twice is read once.
    """
    found = tuple(dict.fromkeys(chain.from_iterable(_matches(entry, suffixes) for entry in paths)))
    if not found:
        raise DataError(
            f"data.paths: {', '.join(map(repr, paths))} holds no files to read. Name a folder with a file ending in "
            f"{' or '.join(map(repr, suffixes))} in it, or the files."
        )
    return found


def _matches(entry: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(entry).expanduser().absolute()
    if entry and path.is_dir():
        return sorted(_files_below(path, suffixes))
    if entry and path.is_file():
        return [path]
    if not glob.has_magic(entry):
        raise DataError(
            f"data.paths: no such file or folder: {entry!r} (looked from {Path.cwd()}). Name regular files, folders or "
            "globs that exist."
        )
    matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute patterns)
    return sorted(Path(match) for match in matches if Path(match).is_file())


def _files_below(folder: Path, suffixes: tuple[str, ...], skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield files with these suffixes, in any order, none hidden or in a folder named in `skipped`."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths = (Path(parent, name) for name in names if not name.startswith(".") and name.endswith(suffixes))
        yield from (path for path in paths if path.is_file())


# --- plain text -------------------------------------------------------------------------------------------------------


def split_text(text: str, learned: Spans | None = None) -> Iterator[TextChunk]:
    """Split `text` into chunks of at most CHUNK_BYTES characters, after a line break if possible."""
    start = 0
    while len(text) - start > CHUNK_BYTES:
        cut = text.rfind("\n", start, start + CHUNK_BYTES) + 1 or start + CHUNK_BYTES
        yield TextChunk(text[start:cut], _shifted(learned, start, cut))
        start = cut
    yield TextChunk(text[start:], _shifted(learned, start, len(text)))


def _shifted(spans: Spans | None, start: int, end: int) -> Spans | None:
    """Return the part of `spans` within characters [start, end), counted from `start`."""
    if spans is None:
        return None
    clipped = ((max(first, start) - start, min(after, end) - start) for first, after in spans)
    return tuple((first, after) for first, after in clipped if first < after)


@contextlib.contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressing .gz. Raises DataError for other archives, by suffix."""
    if path.suffix in _ARCHIVES:
        raise DataError(f"{path} is compressed ({path.suffix}); only .gz is read as it is. Unpack it first.")
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as packed:
            yield cast(IO[bytes], packed)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}. Copy it again, or rename it.") from None


def _read_text(path: Path, config: DataConfig, **_: object) -> Iterator[Document | BadRow]:
    if config.on_bad_row == "skip":  # check the whole file before yielding its first chunk
        try:
            for _piece in _text_chunks(path):
                pass
        except _BadTextError as error:
            yield BadRow(str(error))
            return
    yield _text_chunks(path)


def _text_chunks(path: Path) -> Iterator[TextChunk]:
    offset, carry, is_last = 0, b"", False
    with _open_bytes(path) as file:
        while not is_last:
            block = file.read(CHUNK_BYTES)
            data, is_last = carry + block, not block
            # After the last line, else before the last character, which may be incomplete.
            cut = len(data) if is_last else data.rfind(b"\n") + 1 or len(data.rstrip(_UTF8_CONTINUATION)) - 1
            try:
                text = data[:cut].decode()
            except UnicodeDecodeError as error:
                raise _BadTextError(
                    f"{path}: invalid UTF-8 at byte offset {offset + error.start} ({error.reason}). Convert the file "
                    "(iconv -f latin1 -t utf-8 ...), unpack it if it is compressed, or leave it out of data.paths."
                ) from None
            yield TextChunk(text.removeprefix("\ufeff") if offset == 0 else text)
            offset, carry = offset + len(data[:cut]), data[cut:]


# --- records ----------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path, config: DataConfig, template: ChatTemplate | None) -> Iterator[Document | BadRow]:
    with _open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            location = f"{path}:{number}"
            try:
                record = parse_json(line.decode("utf-8-sig").rstrip("\r\n"))
                if not isinstance(record, dict):
                    raise DataError(f"{location}: {line[:40]!r} is no object; expected one JSON object per line.")
                chunks = _record_chunks(record, location, config, template)
                b"".join(chunk.data for chunk in chunks)  # raises for unpaired surrogates
            except DataError as error:
                yield BadRow(str(error))
            except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError, too
                yield BadRow(f"{location}: bad JSON ({error}). Expected one JSON object per line.")
            else:
                yield chunks


def _read_parquet(path: Path, config: DataConfig, **_: object) -> Iterator[Document | BadRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"reading {path} needs the package pyarrow, which is not installed. Run: pip install 'burst-train[parquet]'"
        ) from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _field(dict.fromkeys(file.schema_arrow.names, ""), str(path), config, "text_field")
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[config.text_field]):
                for at in range(batch.num_rows):
                    location = f"{path}: row {row}"
                    row += 1
                    try:
                        record = {name: batch.column(name)[at].as_py() for name in batch.schema.names}
                        chunks = _record_chunks(record, location, config, None)
                    except DataError as error:
                        yield BadRow(str(error))
                    except UnicodeDecodeError as error:
                        yield BadRow(f"{location}: invalid UTF-8 ({error.reason}). Mend the row or leave it out.")
                    else:
                        yield chunks
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{path} cannot be read as parquet from row {row} on: {reason}. Check the file.") from None


def _record_chunks(
    record: dict[str, Any], location: str, config: DataConfig, template: ChatTemplate | None
) -> list[TextChunk]:
    if template is not None:
        conversation = read_conversation(record, _field(record, location, config, "messages_field", list), location)
        return [*split_text(*template.render_chat(conversation, location))]
    text = _field(record, location, config, "text_field")
    if config.prompt_field is None:
        return [*split_text(text)]
    prompt = _field(record, location, config, "prompt_field")
    return [*split_text(prompt + text, ((len(prompt), len(prompt) + len(text)),))]  # one text: tokens may join them


def _field(record: dict[str, Any], location: str, config: DataConfig, setting: str, kind: type = str) -> Any:
    """Return the value under the key that a setting names."""
    key = getattr(config, setting)
    if key not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise DataError(f"{location}: no key '{key}'; keys present: {keys}. Set data.{setting} to one of them.")
    if not isinstance(record[key], kind):
        what = "a string" if kind is str else "a list of messages"
        raise DataError(
            f"{location}: '{key}' is {record[key]!r:.60}; expected {what}. Mend it or set another data.{setting}."
        )
    return record[key]


# --- the standard library ---------------------------------------------------------------------------------------------


def stdlib_files(folder: Path) -> tuple[Path, ...]:
    """Return the *.py files of the standard library in `folder`, sorted by relative path.

    Tests, installed packages, links and files made by one build of Python are left out, so machines with the same
    Python release have the same text.
    """
    files = _files_below(folder, (".py",), _STDLIB_SKIPPED)
    kept = [path for path in files if not (path.name.startswith(_STDLIB_SKIPPED_PREFIX) or path.is_symlink())]
    return tuple(sorted(kept, key=Path.as_posix))


def _read_stdlib_file(path: Path, **_: object) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:  # a few files are in other encodings on purpose
        return
    yield split_text(text)


# How files of a folder end, and how one is read.
_FORMATS: dict[str, tuple[tuple[str, ...], Callable[..., Iterator[Document | BadRow]]]] = {
    "stdlib": ((), _read_stdlib_file),
    "text": ((), _read_text),
    "jsonl": ((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), _read_jsonl),
    "parquet": ((".parquet",), _read_parquet),
}
