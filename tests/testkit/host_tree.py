"""A base image without a registry: this machine's Python and a handful of its commands, as a tar stream.

What a pinned base image from a registry has and the Dockerfile needs: a shell, coreutils, useradd, python3 with venv.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

COMMANDS = ("sh", "ls", "rm", "cat", "chmod", "env", "id", "install", "mkdir", "mktemp", "sleep", "useradd", "uname")
# Packages from wheels load these; they are no dependency of the interpreter itself.
LIBRARIES = (
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libm.so.6",
    "libutil.so.1",
)
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}  # as Debian's merged /usr
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "etc/login.defs": "UID_MIN 1000\nUID_MAX 60000\nGID_MIN 1000\nGID_MAX 60000\nUSERGROUPS_ENAB yes\n",
}
LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo")


def write_host_tree(stream: IO[bytes]) -> None:
    """The tree as a tar archive for `docker import`."""
    prefix, library = Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))
    python = (prefix / "bin" / f"python{sysconfig.get_python_version()}").resolve()
    modules = [path for path in sorted(library.rglob("*")) if path.is_file() and not _left_out(path, library)]
    commands = [Path(found) for name in COMMANDS if (found := shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin"))]
    binaries = [python, *commands, *(path for path in modules if path.suffix == ".so"), *_libraries()]
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in ("usr", *LINKS.values(), "etc", "tmp", "root", "proc", "sys", "dev"):
            archive.addfile(_folder(name, 0o1777 if name == "tmp" else 0o755))
        for name, target in LINKS.items():
            archive.addfile(_link(name, target))
        for name, text in ACCOUNTS.items():
            _add_text(archive, name, text)
        seen: set[str] = set()
        for path in [*commands, python, *modules, *_libraries(), *_needed(binaries)]:
            _add_file(archive, path, seen)
        archive.addfile(_link("usr/bin/python3", str(python)))


def _left_out(path: Path, library: Path) -> bool:
    return not set(LEFT_OUT).isdisjoint(path.relative_to(library).parts) or path.suffix == ".a"


def _libraries() -> list[Path]:
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in listing.splitlines() if "x86-64" in line or "AArch64" in line)
    return [Path(words[-1]) for words in lines if words[0] in LIBRARIES]


def _needed(binaries: Iterable[Path]) -> Iterator[Path]:
    """The shared libraries that the dynamic linker would load for any of `binaries`."""
    command = ["ldd", *map(str, binaries)]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        for word in line.split():
            if word.startswith("/") and not word.endswith(":"):
                yield Path(word)


def _add_file(archive: tarfile.TarFile, path: Path, seen: set[str]) -> None:
    """Add what `path` shows, under this name and with every folder above readable for everybody."""
    name = _merged(path)
    if name in seen:
        return
    seen.add(name)
    for parent in reversed(Path(name).parents[:-1]):
        if str(parent) not in seen:
            seen.add(str(parent))
            if str(parent) not in ("usr", *LINKS.values(), "etc", "root"):
                archive.addfile(_folder(str(parent)))
    content = path.resolve().read_bytes()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))


def _merged(path: Path) -> str:
    name = str(path).lstrip("/")
    top, _, rest = name.partition("/")
    return f"{LINKS[top]}/{rest}" if top in LINKS else name


def _folder(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    return entry


def _link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), 0o644
    archive.addfile(entry, io.BytesIO(text.encode()))
