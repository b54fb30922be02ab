"""The two ends of a link between nodes: `ssh` to the next one, and a socket that the previous one reaches through sshd.

Python 3.6, standard library only.
"""

import array
import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from typing import IO, Any, Callable, List, Optional

from cluster.image.node.blobs import Source
from cluster.image.node.frames import FrameError, FrameReader, Message, pack_message
from cluster.image.node.links import Limiter, ReceiveError, Receiver, Sender, wanted_blobs

_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
_ALIAS = "burst-next-node"
_ERROR_BYTES = 4000


def ssh_command(target: Message, key_file: str, known_hosts: str) -> List[str]:
    """The command that leads to the socket of node `target`: with this key, to this host key, nothing else allowed."""
    address, user, port = str(target["address"]), str(target["user"]), int(target["port"])
    if not _ADDRESS.fullmatch(address) or not _USER.fullmatch(user) or not 0 < port < 65536:
        raise FrameError("the next node's address makes no sense")
    options = {
        "BatchMode": "yes",
        "ClearAllForwardings": "yes",
        "Compression": "no",
        "ConnectTimeout": "10",
        "ControlPath": "none",
        "ForwardAgent": "no",
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": _ALIAS,
        "IdentitiesOnly": "yes",
        "IdentityFile": key_file,
        "LogLevel": "ERROR",
        "PreferredAuthentications": "publickey",
        "ServerAliveCountMax": "2",
        "ServerAliveInterval": "4",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": known_hosts,
    }
    words = ["ssh", "-F", "/dev/null", "-T", "-p", str(port), "-l", user]
    for name, value in sorted(options.items()):
        words += ["-o", f"{name}={value}"]
    return [*words, "--", address, "burst-image-link"]


class SshLink:
    """This node as the sender of the next one. `on_end(text)` is called once, when the link has ended."""

    def __init__(
        self, target: Message, runtime: str, source: Source, limiter: Limiter, on_end: Callable[[str], None]
    ) -> None:
        folder = tempfile.mkdtemp(dir=runtime)
        self._key, self._known_hosts = os.path.join(folder, "key"), os.path.join(folder, "known_hosts")
        self._on_end = on_end
        write_private(self._key, str(target["key"]))
        lines = [str(line) for line in target["host_keys"]]
        if not lines or any(not re.fullmatch(r"[a-z0-9@.-]+ [A-Za-z0-9+/=]+", line) for line in lines):
            raise FrameError("the next node's host keys make no sense")
        write_private(self._known_hosts, "".join(f"{_ALIAS} {line}\n" for line in lines))
        self._process = subprocess.Popen(
            ssh_command(target, self._key, self._known_hosts),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._sender = Sender(_writer(_pipe(self._process.stdin)), source, limiter, lambda text: self._process.kill())
        self._sender.message({"op": "hello", "push": target["push"]})
        self._sender.start()
        _thread(self._read, "link")

    def close(self) -> None:
        """End the link."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def _read(self) -> None:
        problem = ""
        reader = FrameReader(_pipe(self._process.stdout).read)
        try:
            while True:
                frame = reader.next()
                if frame is None:
                    break
                self._forget_key()
                if frame.message is not None and frame.message["op"] == "want":
                    self._sender.request(wanted_blobs(frame.message))
        except (FrameError, OSError, ValueError) as error:
            problem = str(error)
        self._sender.close()
        self.close()
        said = _pipe(self._process.stderr).read(_ERROR_BYTES) or b""
        self._process.wait()
        self._forget_key()
        self._sender.join(5.0)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                _pipe(stream).close()
        self._on_end(" ".join(said.decode("utf-8", "replace").split()) or problem or "the connection ended")

    def _forget_key(self) -> None:
        """ssh has read both files as soon as the other side says anything."""
        for name in (self._key, self._known_hosts):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


class Listener:
    """The socket of this push: whoever comes through it and knows the push becomes the sender of `receiver`."""

    def __init__(self, path: str, push: str, receiver: Receiver, on_failed: Callable[[str], None]) -> None:
        self._push, self._receiver, self._on_failed = push, receiver, on_failed
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(4)
        _thread(self._accept, "listener")

    def close(self) -> None:
        """Accept nobody any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            _thread(self._serve, "upstream", connection)

    def _serve(self, connection: socket.socket) -> None:
        streams: List[int] = []
        try:
            streams = _take_streams(connection)
            self._receive(streams[0], streams[1])
        except (FrameError, IndexError, OSError):
            pass  # the sender is no sender, or is gone: the launcher decides who comes next
        except ReceiveError as error:
            self._on_failed(str(error))
        finally:
            for descriptor in streams:
                os.close(descriptor)
            connection.close()

    def _receive(self, stdin: int, stdout: int) -> None:
        reader = FrameReader(lambda size: os.read(stdin, size))
        first = reader.next()
        if first is None or first.message is None or first.message.get("push") != self._push:
            raise FrameError("the sender knows nothing of this push")
        token = self._receiver.attach(lambda message: write_all(stdout, pack_message(message)))
        while True:
            frame = reader.next()
            if frame is None or not self._receiver.frame(token, frame):
                return


def _take_streams(connection: socket.socket) -> List[int]:
    """stdin and stdout of the command that sshd started, as descriptors of this process."""
    connection.settimeout(10.0)
    descriptors = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(2 * descriptors.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


def make_runtime() -> str:
    """A new folder, in memory if possible, for socket and keys; what dead agents left behind is removed."""
    base = sweep_runtimes()
    path = os.path.join(base, f"burst-image-{os.getpid()}-{os.geteuid()}")
    if _is_own_folder(path):
        shutil.rmtree(path, ignore_errors=True)  # of a process that had our number
    os.mkdir(path, 0o700)
    return path


def sweep_runtimes() -> str:
    """Where such folders lie, now without those of agents that are no more."""
    base = next((path for path in ("/dev/shm", "/tmp") if os.access(path, os.W_OK)), "/tmp")
    for name in os.listdir(base):
        found = re.fullmatch(rf"burst-image-(\d+)-{os.geteuid()}", name)
        path = os.path.join(base, name)
        if found and not os.path.exists("/proc/" + found.group(1)) and _is_own_folder(path):
            shutil.rmtree(path, ignore_errors=True)
    return base


def write_private(path: str, text: str) -> None:
    """Write `text` into a new file that only this user can read."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _writer(stream: IO[bytes]) -> Callable[[bytes], None]:
    return lambda data: write_all(stream.fileno(), data)


def _pipe(stream: Optional[IO[bytes]]) -> IO[bytes]:
    if stream is None:
        raise ValueError("no pipe")
    return stream


def _is_own_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and os.lstat(path).st_uid == os.geteuid()


def _thread(target: Callable[..., Any], name: str, *arguments: Any) -> None:
    thread = threading.Thread(target=target, name=name, args=arguments)
    thread.daemon = True
    thread.start()


def check_own_folder(path: str) -> None:
    """Raise OSError unless `path` is a folder of ours that nobody else may write into.

    In a shared folder others could lay one under our name, with links in it that lead our writes elsewhere. Servers may
    map root to another user, so a file that is made just now tells who we are there.
    """
    found = os.lstat(path)
    with tempfile.TemporaryFile(dir=path) as probe:
        owner = os.fstat(probe.fileno()).st_uid
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o022:
        raise OSError(errno.EPERM, "not a folder of ours alone", path)
