"""Writes a token set (format: engine.data.manifest) as a stream, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from engine.data.manifest import MANIFEST_FILE, WRITER, Manifest, TokenFile, numpy_dtype, storage_dtype
from engine.data.tokenizers import Tokenizer
from engine.runs.records import json_text

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
        self._max_token_id = 0
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
            max_token_id=self._max_token_id,
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
        self._max_token_id = max(self._max_token_id, int(ids.max()))
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
