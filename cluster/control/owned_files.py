"""Files of a run folder that another machine names: opened by steps, without links, so that none lies elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: opening a pipe would wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class OwnedFiles:
    """Files below `root`, by relative paths whose names were checked before. Everything raises OSError.

    A link or anything else that is no folder or plain file on the way is refused, whoever put it there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def open_append(self, path: str) -> int:
        """A descriptor that reads anywhere and writes at the end; file and folders are made as needed."""
        with self._folder_of(path, make=True) as (folder, name):
            return _plain(os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FILE, 0o600, dir_fd=folder), path)

    def open_new(self, path: str) -> int:
        """A descriptor of an empty file of this name; what was there is gone."""
        with self._folder_of(path, make=True) as (folder, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)

    def replace(self, path: str, data: bytes) -> None:
        """Let `path` hold `data`; a reader sees the old content or the new one."""
        temporary = temporary_of(path)
        descriptor = self.open_new(temporary)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)
        self.rename(temporary, path)

    def rename(self, path: str, new_path: str) -> None:
        """Give a file another name in the same folder, in place of whatever has it."""
        with self._folder_of(path, make=False) as (folder, name):
            os.rename(name, new_path.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)

    def size(self, path: str) -> int | None:
        """Length of a plain file; None when there is none."""
        try:
            with self._folder_of(path, make=False) as (folder, name):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def sizes(self, folder_path: str) -> dict[str, int]:
        """Length of every plain file in a folder, by path."""
        try:
            with self._folder_of(f"{folder_path}/.", make=False) as (folder, _), os.scandir(folder) as entries:
                plain = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
                return {f"{folder_path}/{entry.name}": entry.stat(follow_symlinks=False).st_size for entry in plain}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def free_bytes(self) -> int:
        """Room on the disk for this user."""
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def _folder_of(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """(descriptor of the folder that `path` lies in, its last name)."""
        *folders, name = path.split("/")
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700, dir_fd=descriptor)
                inner = os.open(folder, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor, name
        finally:
            os.close(descriptor)


def temporary_of(path: str) -> str:
    """Where the next content of `path` is written; no node may name such a file."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.part" if folder else f".{name}.part"


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; after an error the file is longer by what had been written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _plain(descriptor: int, path: str) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return descriptor
