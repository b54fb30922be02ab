"""A partial image archive, streamed into `docker load` while its layers still arrive (Python 3.6, no packages).

The archive has the settings of the image, a manifest that names all layers, and only the layers that the engine lacks.
"""

import base64
import contextlib
import json
import os
import re
import subprocess
import tarfile
import threading
import zlib
from typing import IO, Any, Iterable, List, Sequence

from cluster.image.node.blobs import Blob, BlobFolder
from cluster.image.node.chain import write_all
from cluster.image.node.engine import EngineError, find_unzstd
from cluster.image.node.frames import FrameError, Message

_COPY_BYTES = 1 << 20


class Stopped(Exception):
    """The push ended before the image was whole."""


class Archive:
    """What goes into the archive beside layers. Raises FrameError for a message that makes no sense."""

    def __init__(self, message: Message) -> None:
        try:
            self.config = base64.b64decode(message["config"], validate=True)
            self.config_name, self.tag = str(message["config_name"]), str(message["tag"])
            self.layer_names = [member_name(diff_id) for diff_id in message["layers"]]
        except (KeyError, TypeError, ValueError):
            raise FrameError("the image's settings make no sense") from None
        if not re.fullmatch(r"[0-9a-f]{64}\.json", self.config_name):
            raise FrameError("the image's settings have no hash as their name")

    def manifest(self) -> bytes:
        """manifest.json."""
        row = {"Config": self.config_name, "RepoTags": [self.tag], "Layers": self.layer_names}
        return json.dumps([row]).encode("ascii")


def member_name(diff_id: str) -> str:
    """The name of a layer in the archive. Raises ValueError unless it is sha256:..."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", diff_id):
        raise ValueError("not a diff id")
    return diff_id[7:] + ".tar"


def tar_head(name: str, size: int) -> bytes:
    """The tar header of a file."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(format=tarfile.GNU_FORMAT)


def tar_padding(size: int) -> bytes:
    """What fills a file's last tar block."""
    return b"\0" * (-size % tarfile.BLOCKSIZE)


TAR_END = b"\0" * (2 * tarfile.BLOCKSIZE)


class Loader:
    """Loads one image; `load` runs in a thread of its own, `stop` ends it from another."""

    def __init__(self, command: Sequence[str], folder: BlobFolder, archive: Archive, need: Iterable[int]) -> None:
        self._command, self._folder, self._archive, self._need = list(command), folder, archive, list(need)
        names = {member_name(folder.blobs[number].diff_id) for number in self._need}
        self.is_partial = not names.issuperset(archive.layer_names)  # layers are left out of the archive
        self._stopped = threading.Event()
        self._children: List[subprocess.Popen[bytes]] = []

    def stop(self) -> None:
        """Make `load` raise Stopped soon."""
        self._stopped.set()
        for child in self._children:
            if child.poll() is None:
                child.kill()
        with self._folder.changed:
            self._folder.changed.notify_all()

    def load(self) -> None:
        """Bring the image into the engine. Raises EngineError with its words, Stopped after `stop`."""
        for number in self._need[:1]:
            self._wait(number)  # no engine waits for a first byte that may take hours
        load = self._start([*self._command, "load", "--quiet"], stdin=subprocess.PIPE)
        said: List[bytes] = []
        reader = threading.Thread(target=lambda: said.append(_stream(load.stdout).read()), name="load output")
        reader.daemon = True
        reader.start()
        broken = ""
        try:
            self._write_archive(_stream(load.stdin))
        except Stopped:
            load.kill()
            raise
        except Exception as error:  # a damaged layer raises what its unpacker knows
            broken = str(error) or type(error).__name__  # mostly a broken pipe: then the engine says why
            reader.join(2.0)
            load.kill()
        finally:
            with contextlib.suppress(BrokenPipeError):
                _stream(load.stdin).close()
        code = load.wait()
        reader.join(10.0)
        if self._stopped.is_set():
            raise Stopped
        if code or broken:
            text = " ".join(b"".join(said).decode("utf-8", "replace").split())
            raise EngineError(text[-400:] or broken or f"docker load ended with {code}")

    def _write_archive(self, sink: IO[bytes]) -> None:
        for number in self._need:
            self._wait(number)
            blob = self._folder.blobs[number]
            write_all(sink.fileno(), tar_head(member_name(blob.diff_id), blob.unpacked))
            self._unpack(blob, sink)
            write_all(sink.fileno(), tar_padding(blob.unpacked))
        for name, body in (
            (self._archive.config_name, self._archive.config),
            ("manifest.json", self._archive.manifest()),
        ):
            write_all(sink.fileno(), tar_head(name, len(body)) + body + tar_padding(len(body)))
        write_all(sink.fileno(), TAR_END)

    def _wait(self, number: int) -> None:
        with self._folder.changed:
            while not self._folder.is_complete(number):
                if self._stopped.is_set():
                    raise Stopped
                self._folder.changed.wait(1.0)

    def _unpack(self, blob: Blob, sink: IO[bytes]) -> None:
        with open(self._folder.path(blob.number), "rb") as packed:
            if blob.encoding == "zstd" and find_unzstd() == "zstd":
                child = self._start(["zstd", "-dcq"], stdin=packed, stdout=sink)
                said = _stream(child.stderr).read()
                if child.wait():
                    raise EngineError("zstd: " + " ".join(said.decode("utf-8", "replace").split()))
                return
            for piece in _unpacked(packed, blob.encoding):
                write_all(sink.fileno(), piece)

    def _start(self, command: List[str], **streams: Any) -> "subprocess.Popen[bytes]":
        if self._stopped.is_set():
            raise Stopped
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if "stdout" not in streams else {}
        try:
            child = subprocess.Popen(
                command, bufsize=0, env=dict(os.environ, LC_ALL="C"), **{"stderr": subprocess.PIPE, **streams, **quiet}
            )
        except OSError as error:
            raise EngineError(f"cannot run {command[0]}: {error.strerror}") from error
        self._children.append(child)
        return child


def _unpacked(packed: IO[bytes], encoding: str) -> Iterable[bytes]:
    if encoding == "zstd":
        import zstandard

        yield from zstandard.ZstdDecompressor().read_to_iter(packed, write_size=_COPY_BYTES)
        return
    unzip = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    while True:
        data = packed.read(_COPY_BYTES)
        if not data:
            return
        yield data if unzip is None else unzip.decompress(data)


def _stream(stream: Any) -> Any:
    if stream is None:
        raise EngineError("no pipe")
    return stream
