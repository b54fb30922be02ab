"""What tests of image distribution need beside a testbed: an engine for the launcher, and images made of nothing."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.access.ssh import connect
from cluster.image.fleet import Connect, open_fleet, survey_nodes
from cluster.image.local import LocalImage
from cluster.image.plan import ImagePlan, PushOptions, build_image_plan
from cluster.image.push import NodeProgress, NodeResult, Push, PushTiming
from cluster.image.store import Packing, Store
from cluster.testbed.build import Testbed

DOCKERD = "/usr/sbin/dockerd"
_START_S = 60.0
FAST = PushTiming(silence_s=5.0, shared_wait_s=2.0)


class LauncherEngine:
    """A Docker daemon of this machine with a socket of its own, everything in `folder`; images lie in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.host = f"unix://{folder}/docker.sock"
        config = folder / "daemon.json"
        config.write_text(json.dumps({"deprecated-key-path": str(folder / "key.json")}))
        command = [DOCKERD, "--config-file", str(config), "--data-root", str(folder / "data")]
        command += ["--exec-root", str(folder / "exec"), "-H", self.host, "--pidfile", str(folder / "pid")]
        command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _START_S
        while self._run("info").returncode:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.close()
                raise RuntimeError(f"no dockerd: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def __call__(self, *words: str, stdin: bytes = b"") -> str:
        """What `docker WORDS` prints; raises for a failure."""
        done = self._run(*words, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def import_tree(self, name: str, tree: bytes) -> None:
        """An image of one layer, from a tar."""
        self("import", "-", name, stdin=tree)

    def build(self, name: str, base: str, layers: Mapping[str, bytes], labels: Mapping[str, str] = {}) -> None:
        """An image with one layer upon `base` for each file of `layers`."""
        context = tar_of({**layers, "Dockerfile": dockerfile(base, layers, labels).encode()})
        self("build", "--quiet", "--tag", name, "-", stdin=context)

    def close(self) -> None:
        """Stop it and remove what it wrote."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(200)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "0"}
        return subprocess.run(["docker", *words], input=stdin, env=environment, capture_output=True)


@contextlib.contextmanager
def launcher_engine() -> Iterator[LauncherEngine]:
    """A `LauncherEngine` for as long as the block lasts, in memory: sockets need short paths, and disks are shared."""
    if os.geteuid() != 0 or shutil.which(DOCKERD) is None:
        pytest.skip(f"{DOCKERD} (package docker.io) and root are needed")  # where CI is set, a skip fails the session
    folder = Path(tempfile.mkdtemp(prefix="burst-engine-", dir="/dev/shm"))
    try:
        engine = LauncherEngine(folder)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def dockerfile(base: str, layers: Mapping[str, bytes], labels: Mapping[str, str]) -> str:
    """Copies every file in a layer of its own; into /, so that no layer depends on those below."""
    lines = [f"FROM {base}", *(f"COPY {name} /{name}" for name in layers)]
    lines += [f'LABEL {name}="{value}"' for name, value in labels.items()]
    return "\n".join([*lines, "ENV RIG=1", 'CMD ["/bin/busybox", "true"]', ""])


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar of `files`, the same bytes every time."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(body), 0o755
            archive.addfile(member, io.BytesIO(body))
    return stream.getvalue()


def busybox_tree() -> bytes:
    """A file system that is one busybox."""
    return tar_of({"bin/busybox": Path("/bin/busybox").read_bytes()})


def noise(size: int, seed: int) -> bytes:
    """Bytes that no compressor makes smaller."""
    return random.Random(seed).randbytes(size)


def prose(size: int, seed: int) -> bytes:
    """Text that packs to roughly a quarter."""
    rng = random.Random(seed)
    words = [rng.randbytes(4).hex().encode() for _ in range(4096)]
    text = b" ".join(rng.choices(words, k=1 << 16)) + b"\n"
    return (text * (size // len(text) + 1))[:size]


@dataclass(frozen=True)
class Pushed:
    """One push as a test sees it."""

    plan: ImagePlan
    nodes: dict[str, NodeResult]
    elapsed_s: float

    @property
    def received_bytes(self) -> int:
        """On the wire, to all nodes."""
        return sum(node.received_bytes for node in self.nodes.values())

    @property
    def failed(self) -> set[str]:
        """Nodes that did not get the image."""
        return {name for name, node in self.nodes.items() if not node.ok}


class Watcher:
    """An observer that calls `act` once, as soon as `node` holds `after_bytes`; what `act` raises ends the push."""

    def __init__(self, node: str = "", after_bytes: int = 0, act: Callable[[], None] | None = None) -> None:
        self._node, self._after_bytes, self._act = node, after_bytes, act

    def progress(self, nodes: Sequence[NodeProgress]) -> None:
        here = next((node.here_bytes for node in nodes if node.node == self._node), 0)
        if self._act is not None and here >= self._after_bytes:
            act, self._act = self._act, None
            act()

    def note(self, node: str, text: str) -> None:
        pass


class PushRig:
    """A testbed, an engine for this machine and a store in `folder`: pushes in this process, over real SSH."""

    def __init__(self, testbed: Testbed, engine: LauncherEngine, folder: Path) -> None:
        self.testbed, self.engine, self.store = testbed, engine, Store(folder / "store")
        self.names = testbed.node_names
        engine.import_tree("rig/base:1", busybox_tree())
        self._images = itertools.count(1)

    def image(self, *mib: float, name: str | None = None, seed: int | None = None, **build: Any) -> LocalImage:
        """A new image with a layer of so many MiB of noise each; the same seed gives the same layers."""
        number = next(self._images)
        start = 1000 * (number if seed is None else seed)
        files = {f"layer{k}": noise(int(size * (1 << 20)), start + k) for k, size in enumerate(mib)}
        return self.build(name or f"rig/app:{number}", {**files, **build.pop("files", {})}, **build)

    def build(self, name: str, files: Mapping[str, bytes], labels: Mapping[str, str] = {}) -> LocalImage:
        """An image of these files upon one busybox."""
        self.engine.build(name, "rig/base:1", files, labels)
        return self.find(name)

    def find(self, name: str) -> LocalImage:
        """An image of the launcher's engine."""
        return LocalImage(("docker", "--host", self.engine.host), name)

    def push(
        self,
        image: LocalImage,
        nodes: Sequence[str] | None = None,
        *,
        observer: Watcher | None = None,
        timing: PushTiming = FAST,
        connect: Connect = connect,
        **options: Any,
    ) -> Pushed:
        """The push of `image` to `nodes` (all): what `burst image push` does, without a screen."""
        begin = time.monotonic()
        hosts = [self.testbed.host(name) for name in nodes or self.names]
        chosen = PushOptions(**options)
        facts = {"image": image.name, "identity": image.identity, "layers": list(image.diff_ids)}
        with open_fleet(hosts, connect, limit=chosen.limit) as fleet:
            surveys = survey_nodes(fleet, hosts, engine=["docker"], image=facts, shared_folder=chosen.shared_folder)
            stored = image.export(self.store)
            if any(not survey.unzstd for survey in surveys):
                stored = self.store.pack(stored, "gzip")
            plan = build_image_plan(stored, surveys, chosen)
            push = Push(
                plan, stored, self.store, fleet.sessions, fleet.events, observer=observer or Watcher(), timing=timing
            )
            results = push.run()
            fleet.close({"op": "finish", "forget_others": True})
        return Pushed(plan, {result.node: result for result in results}, time.monotonic() - begin)

    def run(self, node: str, *argv: str) -> str:
        """What a command on a node prints."""
        with connect(self.testbed.host(node)) as connection:
            result = connection.run(argv)
        assert result.exit_code == 0, result.stderr.decode()
        return result.stdout.decode().strip()

    def packed(self, image: LocalImage) -> list[Packing]:
        """Its layers as they travel."""
        return [layer.packings["zstd"] for layer in image.export(self.store).layers]

    def parts(self, node: str) -> list[Path]:
        """Unfinished layers in a node's cache."""
        return sorted(self.cache(node).glob("*.part"))

    def cache(self, node: str) -> Path:
        """Where a node keeps layers."""
        return self.testbed.node(node).folder.home / ".cache/burst/image-nodes" / node / "blobs"

    def agents(self, node: str) -> list[psutil.Process]:
        """The agents that run on a node."""
        home = str(self.testbed.node(node).folder.home)
        return [process for process in psutil.process_iter() if _is_agent(process, home)]

    @contextlib.contextmanager
    def tool(self, node: str, name: str, script: str) -> Iterator[None]:
        """A shell script in the place of a tool of one node."""
        path = self.testbed.node(node).folder.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        try:
            yield
        finally:
            path.unlink()


def _is_agent(process: psutil.Process, home: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return "burst-image-agent" in process.cmdline() and process.environ().get("HOME") == home
    return False
