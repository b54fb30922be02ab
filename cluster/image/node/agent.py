"""The agent of a push: started on a node over SSH, told what to do over stdin, gone when stdin ends.

It answers what the node has (`survey`), receives layers, passes them on to the next node, loads the image and says
whether it became the right one. Python 3.6, standard library only.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from typing import IO, Any, Callable, Dict, Iterable, List, Optional

from cluster.image.node.blobs import BlobFolder, list_blobs, parse_blobs, remove_blobs
from cluster.image.node.chain import Listener, SshLink, check_own_folder, make_runtime, sweep_runtimes, write_all
from cluster.image.node.engine import Engine, EngineError, find_unzstd, free_bytes
from cluster.image.node.frames import Frame, FrameError, FrameReader, Message, pack_message
from cluster.image.node.identity import image_identity
from cluster.image.node.keys import KeysError, add_line, authorized_line, default_keys_file, remove_lines
from cluster.image.node.links import Limiter, ReceiveError, Receiver
from cluster.image.node.loader import Archive, Loader, Stopped

_BEAT_S = 0.5
_SILENCE_S = 40.0  # the launcher says something every 5 s
_LOCK_WAIT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")


class Agent:
    """One push (or survey, or prune) on this node; `say` sends a message to the launcher, from any thread."""

    def __init__(self, say: Callable[[Message], None]) -> None:
        self._say = say
        self._engine = Engine(["docker"])
        self._node, self._cache, self._push = "", "", ""
        self._locks: Dict[str, IO[str]] = {}
        self._runtime = ""
        self._folder: Optional[BlobFolder] = None
        self._receiver: Optional[Receiver] = None
        self._token = 0
        self._loader: Optional[Loader] = None
        self._link: Optional[SshLink] = None
        self._listener: Optional[Listener] = None
        self._limiter = Limiter(None)
        self._phase = "idle"
        self._setup_message: Message = {}
        self._shared = False

    def handle(self, frame: Frame) -> bool:
        """Do what one frame says; False when that was to end."""
        if frame.message is None or frame.message["op"] == "restart":
            self._receive(frame)
            return True
        message = frame.message
        operations: Dict[str, Callable[[Message], None]] = {
            "survey": self._survey,
            "setup": self._set_up,
            "feed": self._feed,
            "complete": self._complete,
            "listen": self._listen,
            "link": self._open_link,
            "arrived": self._arrived,
            "prune": self._prune,
            "sweep": self._sweep,
            "ping": lambda message: None,
        }
        if message["op"] == "finish":
            self._finish(message)
            return False
        if message["op"] not in operations:
            raise FrameError("there is no operation {!r}".format(message["op"][:40]))
        operations[message["op"]](message)
        return True

    def close(self) -> None:
        """Leave nothing behind but blobs: no process, no key, no socket, no line in authorized_keys."""
        if self._loader is not None:
            self._loader.stop()
        for end in (self._link, self._listener):
            if end is not None:
                end.close()
        if self._push and self._listener is not None:
            remove_lines(default_keys_file(), self._node, self._push)
        if self._runtime:
            shutil.rmtree(self._runtime, ignore_errors=True)
        for lock in self._locks.values():
            lock.close()

    def beat(self) -> None:
        """Say how far everything is."""
        folder = self._folder
        received = {} if folder is None else folder.received()
        here = 0 if folder is None else sum(folder.length(number) for number in folder.blobs)
        self._say({"op": "progress", "phase": self._phase, "received": sum(received.values()), "here": here})

    def _survey(self, message: Message) -> None:
        """Answer with everything that a plan depends on."""
        self._node, self._cache = _checked_name(message["node"]), _cache_folder(message)
        self._engine = Engine([str(word) for word in message["engine"]])
        answer = {
            "op": "survey",
            "hostname": socket.gethostname(),
            "python": "{}.{}".format(*sys.version_info[:2]),
            "unzstd": find_unzstd(),
            "ssh": shutil.which("ssh") is not None,
            "keys_file": os.access(default_keys_file(), os.W_OK),
            "cache": self._cache,
            "blobs": list_blobs(self._blob_folder(message)),
            "cache_free": free_bytes(self._cache),
        }
        try:
            info = self._engine.info()
            answer.update(engine=info, engine_free=free_bytes(info["root"]) if info["root"] else None)
            if message.get("identity"):
                answer["have"] = self._engine.have(message["image"], message["identity"], message["layers"])
        except (EngineError, ValueError, KeyError) as error:
            answer["engine_error"] = str(error)
        self._say(answer)

    def _set_up(self, message: Message) -> None:
        """Take the list of blobs, look at what is here already, and begin to load as soon as layers are whole."""
        self._setup_message = message
        self._push, self._phase = _checked_name(message["push"]), "checking"
        self._limiter = Limiter(message.get("limit"))
        self._shared = bool(message.get("shared"))
        folder_path = self._blob_folder(message)
        try:
            if not self._take_lock(self._cache):
                self._fail("receive", "another push is working on this node; wait for its end")
                return
            folder = BlobFolder(folder_path, parse_blobs(message["blobs"]))
        except OSError as error:
            self._fail("receive", f"cannot use {error.filename or folder_path}: {error.strerror}")
            return
        self._folder = folder
        self._receiver = Receiver(folder, message["fetch"], self._whole, self._corrupt)
        if not self._shared:
            self._look(message["fetch"])
        self._say({"op": "ready"})
        self._start_loader([int(number) for number in message["need"]])

    def _complete(self, message: Message) -> None:
        """The engine wants all layers: fetch them all and load again."""
        if self._folder is None or self._receiver is None:
            raise FrameError("nothing is set up")
        numbers = sorted(self._folder.blobs)
        self._receiver.fetch_also(numbers)
        self._look(numbers)
        self._start_loader(numbers)

    def _look(self, numbers: Iterable[int]) -> None:
        """Take over what earlier pushes left here."""
        folder = self._folder
        if folder is None:
            return
        before = [number for number in numbers if not folder.is_complete(number)]
        for number in folder.open_existing(before):
            self._corrupt(number)
        for number in before:
            if folder.is_complete(number):
                self._whole(number)

    def _start_loader(self, need: List[int]) -> None:
        if self._folder is None:
            return
        self._phase = "receiving"
        self._loader = Loader(self._engine.command, self._folder, Archive(self._setup_message["archive"]), need)
        _thread(self._load, "loader")

    def _feed(self, message: Message) -> None:
        """From now on the launcher sends the blobs."""
        if self._receiver is None:
            raise FrameError("nothing is set up")
        if self._shared:
            if not self._take_lock(os.path.dirname(self._blob_folder(self._setup_message))):
                self._fail("receive", "another push is writing into the shared folder; wait for its end")
                return
            self._look(self._receiver.fetch)
        self._token = self._receiver.attach(self._say)

    def _receive(self, frame: Frame) -> None:
        if self._receiver is None:
            raise FrameError("bytes before any setup")
        try:
            self._receiver.frame(self._token, frame)
        except ReceiveError as error:
            self._fail("receive", str(error))

    def _listen(self, message: Message) -> None:
        """Let the previous node in, by the key of this push."""
        if self._receiver is None or self._listener is not None:
            return
        self._make_runtime()
        path = os.path.join(self._runtime, "s")
        file = default_keys_file()
        try:
            remove_lines(file, self._node)  # of pushes that were killed
            line = authorized_line(message["public_key"], path, self._push, self._node)
            self._listener = Listener(path, self._push, self._receiver, lambda text: self._fail("receive", text))
            add_line(file, line)
        except (KeysError, OSError) as error:
            self._say({"op": "listening", "error": str(error)})
            return
        self._say({"op": "listening", "error": None})

    def _open_link(self, message: Message) -> None:
        """Send to another node from now on."""
        if self._link is not None:
            self._link.close()
        self._make_runtime()
        name = _checked_name(message["name"])
        if self._folder is None:
            raise FrameError("a link before any setup")
        try:
            self._link = SshLink(
                dict(message, push=self._push),
                self._runtime,
                self._folder,
                self._limiter,
                lambda text: self._say({"op": "link_lost", "name": name, "error": text[-400:]}),
            )
        except (FrameError, OSError) as error:
            self._say({"op": "link_lost", "name": name, "error": f"cannot start ssh: {error}"})

    def _arrived(self, message: Message) -> None:
        """Another node has written a blob into the shared folder."""
        number = int(message["blob"])

        def adopt() -> None:
            try:
                self._adopt(number)
            except Exception as error:  # nobody else hears of it, and the launcher would wait for ever
                self._fail("receive", f"{type(error).__name__}: {error}")

        _thread(adopt, "adopt")

    def _adopt(self, number: int) -> None:
        folder = self._folder
        if folder is None or number not in folder.blobs or folder.is_complete(number):
            return
        if not folder.adopt(number, float(self._setup_message["shared_wait_s"])):
            text = f"what another node wrote into {folder.folder} is not here: do all nodes share that folder?"
            self._fail("receive", text)
        else:
            self._whole(number)

    def _prune(self, message: Message) -> None:
        """Remove what pushes keep here; with `repository` also its images that carry our label."""
        self._node, self._cache = _checked_name(message["node"]), _cache_folder(message)
        self._engine = Engine([str(word) for word in message["engine"]])
        dry_run, folder = bool(message.get("dry_run")), self._blob_folder(message)
        answer: Message = {"op": "pruned", "images": [], "error": None}
        found = list_blobs(folder)
        answer["files"], answer["bytes"] = len(found), sum(found.values())
        if not dry_run and found:
            place = os.path.dirname(folder) if message.get("shared") else self._cache
            if not self._take_lock(place):
                answer["error"] = "a push is working on this node"
                answer["files"] = answer["bytes"] = 0
            else:
                answer["files"], answer["bytes"] = remove_blobs(folder, set())
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                self._locks.pop(place).close()  # the next node waits for it, if the folder is shared
        if message.get("repository"):
            try:
                answer["images"] = self._engine.remove_labelled(str(message["repository"]), dry_run)
            except (EngineError, ValueError) as error:
                answer["error"] = str(error)
        self._say(answer)

    def _sweep(self, message: Message) -> None:
        """Remove what an agent that was killed here could not remove itself."""
        remove_lines(default_keys_file(), _checked_name(message["node"]))
        sweep_runtimes()

    def _finish(self, message: Message) -> None:
        """The push is over: what other images left in the cache goes, this one's layers stay for the next change."""
        if self._folder is not None and message.get("forget_others") and not self._shared:
            self._folder.remove_others()

    def _load(self) -> None:
        """Bring the image into the engine and look at what it became."""
        loader, setup = self._loader, self._setup_message
        if loader is None:
            return
        image, expected = str(setup["image"]), str(setup["identity"])
        stage = "load"
        try:
            if setup.get("same"):
                self._engine.call("image", "tag", str(setup["same"]), image)
            else:
                loader.load()
            self._phase, stage = "verifying", "verify"
            found = self._engine.inspect(image)
            identity = None if found is None else image_identity(found)
            if identity != expected:
                raise EngineError(f"the engine holds {str(identity)[:12]} instead of {expected[:12]}")
        except Stopped:
            return
        except EngineError as error:
            if loader.is_partial and stage == "load" and "no space" not in str(error).lower():
                self._say({"op": "refused", "error": str(error)})
            else:
                self._fail(stage, str(error))
            return
        except Exception as error:  # nobody else hears of it, and the launcher would wait for ever
            self._fail(stage, f"{type(error).__name__}: {error}")
            return
        self._phase = "done"
        self.beat()
        self._say({"op": "done", "identity": identity, "received": self._received()})

    def _received(self) -> List[List[int]]:
        folder = self._folder
        return [] if folder is None else [[number, size] for number, size in sorted(folder.received().items())]

    def _whole(self, number: int) -> None:
        self._say({"op": "arrived", "blob": number})

    def _corrupt(self, number: int) -> None:
        self._say({"op": "corrupt", "blob": number})

    def _fail(self, stage: str, text: str) -> None:
        self._phase = "failed"
        self._say({"op": "failed", "stage": stage, "error": text, "received": self._received()})

    def _blob_folder(self, message: Message) -> str:
        shared = message.get("shared")
        if not shared:
            return os.path.join(self._cache, "blobs")
        if not os.path.isabs(shared):
            raise FrameError("the shared folder is no absolute path")
        if not os.path.isdir(shared):
            raise FrameError("the shared folder " + str(shared) + " is not there")
        return os.path.join(shared, f"burst-image-{os.geteuid()}", "blobs")

    def _make_runtime(self) -> None:
        if not self._runtime:
            self._runtime = make_runtime()

    def _take_lock(self, folder: str) -> bool:
        """Whether this agent alone may now write into `folder`; waits a little for one that is just ending."""
        if folder in self._locks:
            return True
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if folder != self._cache:
            check_own_folder(folder)
        lock = open(os.path.join(folder, "lock"), "a")  # noqa: SIM115
        deadline = time.time() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks
                if time.time() > deadline:
                    lock.close()
                    return False
                time.sleep(0.2)
        self._locks[folder] = lock
        return True


def main() -> None:
    """Serve the launcher at the other end of stdin and stdout until it says `finish` or is gone."""
    out, lock = os.dup(1), threading.Lock()
    os.dup2(2, 1)  # what a child prints must not get between frames
    waiting_since: List[float] = []

    def say(message: Message) -> None:
        with lock, contextlib.suppress(OSError):
            write_all(out, pack_message(message))

    def watch() -> None:
        while True:
            time.sleep(_BEAT_S)
            if waiting_since and time.time() - waiting_since[0] > _SILENCE_S:
                agent.close()
                os._exit(1)
            agent.beat()

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    agent = Agent(say)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    _thread(watch, "watch")
    reader = FrameReader(lambda size: os.read(0, size))
    try:
        while True:
            waiting_since[:] = [time.time()]
            frame = reader.next()
            waiting_since.clear()
            if frame is None or not agent.handle(frame):
                break
    except (FrameError, KeyError, TypeError, ValueError, OSError) as error:
        say({"op": "failed", "stage": "protocol", "error": f"{type(error).__name__}: {error}", "received": []})
    finally:
        agent.close()
        sys.stdout.flush()
        os._exit(0)  # threads may still wait for children that were just killed


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise FrameError("not a name")
    return name


def _cache_folder(message: Message) -> str:
    """Where this node keeps blobs; its name is part of it, because nodes may share one home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "burst", "image-nodes", _checked_name(message["node"]))


def _thread(target: Callable[[], None], name: str) -> None:
    thread = threading.Thread(target=target, name=name)
    thread.daemon = True
    thread.start()
