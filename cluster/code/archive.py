"""The code of the ranks as one archive, named by its content: equal sources give equal names and equal bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from cluster.agent.code import tree_id
from cluster.errors import ClusterError

PACKAGES = ("engine",)  # what ranks import of us
_ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class CodeArchive:
    """code_id: of its files, see `cluster.agent.code`. data: a packed tar of them."""

    code_id: str
    data: bytes
    num_files: int


class CodeError(ClusterError):
    """The code cannot be brought to a node."""


def build_archive(root: Path = _ROOT, packages: tuple[str, ...] = PACKAGES) -> CodeArchive:
    """The archive of `packages` below `root`, this installation. Raises CodeError when a file cannot be read."""
    files: dict[str, bytes] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            try:
                files[path.relative_to(root).as_posix()] = path.read_bytes()
            except OSError as error:
                raise CodeError(f"cannot read the code of the ranks: {path}: {error.strerror}") from error
    if not files:
        raise CodeError(f"{root}: no code of {', '.join(packages)} lies there")
    code_id = tree_id({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    return CodeArchive(code_id, _pack(files), len(files))


def _pack(files: dict[str, bytes]) -> bytes:
    """A packed tar without dates and owners."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(stream.getvalue(), compresslevel=6, mtime=0)
