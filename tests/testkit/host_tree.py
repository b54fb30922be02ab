"""A base image without a registry: this machine's Python and a handful of its commands, as a tar stream.

What a pinned base image from a registry has and the Dockerfile needs: a shell, coreutils, useradd, python3 with venv.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import IO

COMMANDS = ("sh", "ls", "rm", "cat", "chmod", "env", "id", "install", "mkdir", "mktemp", "sleep", "useradd", "uname")
# Packages from wheels load these; they are no dependency of the interpreter itself.
LIBRARIES = re.compile(
    r"\s(libstdc\+\+|libgcc_s|libpthread|libdl|librt|libm|libutil)\.so\.\d .*(x86-64|AArch64).* => (.*)"
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
    library = Path(sysconfig.get_path("stdlib"))
    python = (Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}").resolve()
    modules = [path for path in sorted(library.rglob("*")) if path.is_file() and not _left_out(path, library)]
    binaries = [Path(f"{shutil.which(name, path='/usr/bin:/usr/sbin:/bin:/sbin')}") for name in COMMANDS]
    binaries += [python, *(Path(found[3]) for found in LIBRARIES.finditer(_said("/sbin/ldconfig", "-p")))]
    extensions = [path for path in modules if path.suffix == ".so"]
    needed = re.findall(r"\s(/\S+) \(0x", _said("ldd", *map(str, (*binaries, *extensions))))
    files = {_merged(path): path for path in (*binaries, *modules, *map(Path, needed))}
    # An engine makes folders above a file that nobody but root may enter.
    folders = {str(parent) for name in (*files, *ACCOUNTS) for parent in Path(name).parents} - {"."}
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in sorted({*folders, "tmp", "root", "proc", "sys", "dev"}):
            _add(archive, name, tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name, target in (*LINKS.items(), ("usr/bin/python3", str(python))):
            _add(archive, name, tarfile.SYMTYPE, target=target)
        for name, text in ACCOUNTS.items():
            _add(archive, name, body=text.encode(), mode=0o644)
        for name, path in files.items():
            _add(archive, name, body=path.read_bytes())


def _left_out(path: Path, library: Path) -> bool:
    return not set(LEFT_OUT).isdisjoint(path.relative_to(library).parts) or path.suffix == ".a"


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _merged(path: Path) -> str:
    top, _, rest = str(path).lstrip("/").partition("/")
    return f"{LINKS.get(top, top)}/{rest}"


def _add(
    archive: tarfile.TarFile,
    name: str,
    kind: bytes = tarfile.REGTYPE,
    *,
    body: bytes = b"",
    mode: int = 0o755,
    target: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode, entry.linkname = kind, len(body), mode, target
    archive.addfile(entry, io.BytesIO(body))
