"""One line in authorized_keys for as long as a push lasts: it lets the previous node of the chain reach this push.

Python 3.6, standard library only.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from typing import Callable, Iterator, List, Optional

MARKER = "burst-image-push"
_WORD = re.compile(r"[A-Za-z0-9_.:-]+")
_KEY = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/=]+")
# Hands its own streams over to the agent, and stays until the agent is done with them.
_BRIDGE = (
    "import array,socket as s;c=s.socket(s.AF_UNIX);c.connect('{}');"
    "c.sendmsg([b'x'],[(s.SOL_SOCKET,s.SCM_RIGHTS,array.array('i',[0,1]))]);c.recv(1)"
)


class KeysError(Exception):
    """This node's authorized_keys cannot be used."""


def authorized_line(public_key: str, socket_path: str, push: str, node: str) -> str:
    """The line: this key may run one command, which reaches the socket of this push and nothing else."""
    if not _KEY.fullmatch(public_key) or not _WORD.fullmatch(push) or not _WORD.fullmatch(node):
        raise KeysError("the key of this push makes no sense")
    if not re.fullmatch(r"[A-Za-z0-9_./-]+", socket_path):
        raise KeysError(f"no socket can be named in {socket_path}")
    command = f'python3 -I -c \\"{_BRIDGE.format(socket_path)}\\"'
    return f'restrict,command="{command}" {public_key} {MARKER} {push} {node}'


def default_keys_file() -> str:
    """~/.ssh/authorized_keys of this user."""
    return os.path.realpath(os.path.expanduser("~/.ssh/authorized_keys"))


def add_line(path: str, line: str) -> None:
    """Append `line`. Raises KeysError if there is no such file: sshd reads another one then."""
    try:
        with _locked(path), open(path, "r+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode("ascii") + b"\n")
    except OSError as error:
        raise KeysError(f"cannot write {path}: {error.strerror}") from error


def remove_lines(path: str, node: str, push: Optional[str] = None) -> int:
    """How many lines of pushes to `node` (of one push, or of all) were removed; every other byte stays as it was."""
    ending = re.compile(r" {} {} {}$".format(MARKER, re.escape(push) if push else r"\S+", re.escape(node)))

    def is_ours(line: bytes) -> bool:
        return ending.search(line.decode("ascii", "replace").rstrip("\n")) is not None

    try:
        with _locked(path):
            return _rewrite(path, is_ours)
    except OSError:
        return 0


def _rewrite(path: str, is_ours: Callable[[bytes], bool]) -> int:
    with open(path, "rb") as file:
        lines = file.readlines()
    kept: List[bytes] = [line for line in lines if not is_ours(line)]
    if len(kept) == len(lines):
        return 0
    try:
        _replace(path, kept)
    except OSError:
        # A file that is mounted on its own, or a folder that takes no new file: then in place.
        with open(path, "r+b") as file:
            file.writelines(kept)
            file.truncate()
    return len(lines) - len(kept)


def _replace(path: str, lines: List[bytes]) -> None:
    status = os.stat(path)
    descriptor, temporary = tempfile.mkstemp(prefix=".authorized_keys-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), status.st_mode & 0o7777)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """One of our agents at a time changes the file (homes may be shared by all nodes)."""
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
