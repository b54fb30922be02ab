"""Blobs of one push in a folder of the node: layers, packed, named by their sha256; `.part` while they grow.

One thread appends, others follow the growing bytes or wait for the verified whole. Python 3.6, standard library only.
"""

import abc
import contextlib
import hashlib
import os
import re
import threading
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from cluster.image.node.frames import MAX_BLOBS, FrameError

ENCODINGS = ("zstd", "gzip", "none")
PART = ".part"
_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 1 << 44
_READ_BYTES = 1 << 20


class Blob(NamedTuple):
    """One packed layer: its number in this push, sha256 and size of the packed bytes, and what they become."""

    number: int
    sha256: str
    size: int
    encoding: str
    diff_id: str
    unpacked: int


def parse_blobs(rows: Any) -> List[Blob]:
    """Blobs from a message, numbered from 0. Raises FrameError unless names are hashes and sizes make sense."""
    if not isinstance(rows, list) or len(rows) > MAX_BLOBS:
        raise FrameError("blobs are no list")
    return [_parse_blob(number, row) for number, row in enumerate(rows)]


def _parse_blob(number: int, row: Any) -> Blob:
    try:
        blob = Blob(number, row["sha256"], row["size"], row["encoding"], row["diff_id"], row["unpacked"])
    except (KeyError, TypeError):
        raise FrameError(f"blob {number} is incomplete") from None
    names = [blob.sha256, blob.diff_id[7:] if str(blob.diff_id).startswith("sha256:") else None]
    if not all(isinstance(name, str) and _HEX.fullmatch(name) for name in names):
        raise FrameError(f"blob {number} has no hash as its name")
    if not all(isinstance(size, int) and 0 <= size <= _MAX_BYTES for size in (blob.size, blob.unpacked)):
        raise FrameError(f"blob {number} has no possible size")
    if blob.encoding not in ENCODINGS:
        raise FrameError(f"blob {number} is packed in an unknown way")
    return blob


class Source(abc.ABC):
    """Where a sender reads blobs: `BlobFolder` on a node, the store of the launcher."""

    @abc.abstractmethod
    def size(self, number: int) -> int:
        """Bytes of the whole blob. Raises FrameError for a blob that is not in this push."""

    @abc.abstractmethod
    def follow(
        self, number: int, offset: int, generation: Optional[int], wait_s: float
    ) -> Tuple[int, Optional[str], int]:
        """(generation, file to read from, bytes beyond `offset` in it), after waiting for such bytes for `wait_s`.

        No file: nothing yet. Another generation than the one given: what was sent is void, begin again at 0.
        """


class _State:
    """How far one blob is. generation: grows when its bytes are thrown away, so that followers begin again."""

    def __init__(self) -> None:
        self.length = 0
        self.generation = 0
        self.complete = False
        self.digest = hashlib.sha256()
        self.received = 0


class BlobFolder(Source):
    """The blobs of one push in `folder`. `changed` is notified whenever any of them grows, completes or is dropped."""

    def __init__(self, folder: str, blobs: Iterable[Blob]) -> None:
        self.folder = folder
        self.blobs = {blob.number: blob for blob in blobs}
        self.changed = threading.Condition()
        self._states: Dict[int, _State] = {number: _State() for number in self.blobs}
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def size(self, number: int) -> int:
        """Bytes of the whole blob. Raises FrameError for a blob that is not in this push."""
        if number not in self.blobs:
            raise FrameError(f"there is no blob {number}")
        return self.blobs[number].size

    def path(self, number: int) -> str:
        """Where the verified blob lies."""
        return os.path.join(self.folder, self.blobs[number].sha256)

    def is_complete(self, number: int) -> bool:
        """Whether blob `number` is there, verified."""
        return self._states[number].complete

    def length(self, number: int) -> int:
        """How many bytes of it are there, from its start."""
        return self._states[number].length

    def received(self) -> Dict[int, int]:
        """Bytes that were appended since this object was made, by blob; those thrown away again count, too."""
        return {number: state.received for number, state in self._states.items() if state.received}

    def open_existing(self, numbers: Iterable[int]) -> List[int]:
        """Take over what earlier pushes left, hashed again; the numbers of those that were wrong, now gone."""
        corrupt = []
        for number in numbers:
            blob, path = self.blobs[number], self.path(number)
            for name in (path, path + PART):
                if self._states[number].complete or not os.path.exists(name):
                    continue
                digest, length = _digest_file(name)
                if length > blob.size or (length == blob.size and digest.hexdigest() != blob.sha256):
                    os.unlink(name)
                    corrupt.append(number)
                elif length < blob.size and name == path:
                    os.replace(name, path + PART)
                    self._take(number, digest, length)
                elif length == blob.size:
                    os.replace(name, path)
                    self._take(number, digest, length)
                    self._finish(number)
                else:
                    self._take(number, digest, length)
            if blob.size == 0 and not self._states[number].complete:
                self.append(number, 0, b"")
        return corrupt

    def append(self, number: int, offset: int, data: bytes) -> bool:
        """Append `data`; False if that made the blob whole but wrong: then it is dropped and must come again.

        Raises FrameError for bytes that do not continue the blob, OSError when they cannot be written.
        """
        state, blob = self._states[number], self.blobs[number]
        if offset != state.length or offset + len(data) > blob.size or state.complete:
            raise FrameError(f"blob {number}: bytes at {offset} while {state.length} of {blob.size}")
        part = self.path(number) + PART
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(part, flags, 0o600), "ab", buffering=0) as file:
            if file.tell() != offset:
                file.truncate(offset)  # a write that failed half-way left more than was counted
            file.write(data)
            whole = offset + len(data) == blob.size
            if whole:
                os.fsync(file.fileno())
        state.digest.update(data)
        state.received += len(data)
        if not whole:
            with self.changed:
                state.length += len(data)
                self.changed.notify_all()
            return True
        if state.digest.hexdigest() != blob.sha256:
            self.drop(number)
            return False
        os.replace(part, self.path(number))
        state.length = blob.size
        self._finish(number)
        return True

    def adopt(self, number: int, wait_s: float) -> bool:
        """Take blob `number` as another node wrote it into this (shared) folder; False if it is not there in time."""
        deadline = time.time() + wait_s
        while not os.path.exists(self.path(number)):
            if time.time() > deadline:
                return False
            time.sleep(0.2)
            os.listdir(self.folder)  # asks the server: network file systems remember what was not there
        digest, length = _digest_file(self.path(number))
        if digest.hexdigest() != self.blobs[number].sha256:
            return False
        self._take(number, digest, length)
        self._finish(number)
        return True

    def drop(self, number: int) -> None:
        """Throw away what is there of a blob; whoever follows it begins again."""
        state = self._states[number]
        with self.changed:
            for name in (self.path(number), self.path(number) + PART):
                if os.path.exists(name):
                    os.unlink(name)
            state.length, state.complete, state.digest = 0, False, hashlib.sha256()
            state.generation += 1
            self.changed.notify_all()

    def follow(
        self, number: int, offset: int, generation: Optional[int], wait_s: float
    ) -> Tuple[int, Optional[str], int]:
        """(generation, file, bytes beyond `offset`), after waiting for such bytes for up to `wait_s`.

        Another generation than the one given means: begin again at 0.
        """
        state = self._states[number]
        with self.changed:
            if state.length <= offset and generation in (None, state.generation):
                self.changed.wait(wait_s)
            ready = state.length - offset
            if generation not in (None, state.generation) or ready <= 0:
                return state.generation, None, 0
            path = self.path(number)
            return state.generation, path if state.complete else path + PART, ready

    def remove_others(self) -> None:
        """Remove blobs of other pushes."""
        remove_blobs(self.folder, {blob.sha256 for blob in self.blobs.values()})

    def _take(self, number: int, digest: Any, length: int) -> None:
        with self.changed:
            state = self._states[number]
            state.digest, state.length = digest, length
            self.changed.notify_all()

    def _finish(self, number: int) -> None:
        with self.changed:
            self._states[number].complete = True
            self.changed.notify_all()


def remove_blobs(folder: str, keep: Set[str]) -> Tuple[int, int]:
    """(files, bytes) removed from `folder`: blobs and parts whose hash is not in `keep`, and nothing else."""
    files = size = 0
    for name in list_blobs(folder):
        if name.replace(PART, "") not in keep:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # another node removes them from a shared folder, too
                length = os.path.getsize(path)
                os.unlink(path)
                size += length
                files += 1
    return files, size


def list_blobs(folder: str) -> Dict[str, int]:
    """Size of every blob and part in `folder`, by file name; empty when there is no such folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    ours = [name for name in names if _HEX.fullmatch(name.replace(PART, "")) and len(name) in (64, 64 + len(PART))]
    sizes = {}
    for name in sorted(ours):
        with contextlib.suppress(FileNotFoundError):
            sizes[name] = os.path.getsize(os.path.join(folder, name))
    return sizes


def _digest_file(path: str) -> Tuple[Any, int]:
    digest, length = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while True:
            data = file.read(_READ_BYTES)
            if not data:
                return digest, length
            digest.update(data)
            length += len(data)
