"""What tests of image distribution need beside a testbed: an engine for the launcher, and images made of nothing."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.image.archive import PackedImage, Packing, pack_image
from cluster.image.engine import Image, engine_here
from cluster.image.plan import ImagePlan
from cluster.image.push import STALL_S, NodeResult, Push
from cluster.ssh.session import SshPool
from cluster.testbed.testbed import Testbed
from testkit.needs import require
from testkit.process_table import living
from testkit.testbed_fixture import Testbeds


@dataclass(frozen=True)
class LauncherEngine:
    """A Docker engine for this machine, which DOCKER_HOST=host means; images lie in memory."""

    host: str

    def __call__(self, *words: str, stdin: bytes = b"") -> str:
        """What `docker WORDS` prints; raises for a failure."""
        command, environment = ["docker", "--host", self.host, *words], {**os.environ, "DOCKER_BUILDKIT": "0"}
        done = subprocess.run(command, input=stdin, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()


@contextlib.contextmanager
def launcher_engine() -> Iterator[LauncherEngine]:
    """For as long as the block lasts: that of the only node of a testbed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Testbeds(Path(folder))) as testbeds:
        (node,) = testbeds.make(nodes=1, docker=True, docker_in_memory=True).nodes
        yield LauncherEngine(f"unix://{node.docker_socket}")


def tar_of(files: Mapping[str, bytes], links: Mapping[str, str] = {}) -> bytes:
    """A tar of `files`, the same bytes every time, with symbolic links before them."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(body), 0o755
            archive.addfile(member, io.BytesIO(body))
    return stream.getvalue()


def busybox_tree() -> bytes:
    """A file system that is one busybox."""
    require("busybox")
    links = {f"bin/{name}": "busybox" for name in ("sh", "sleep", "hostname")}
    return tar_of({"bin/busybox": Path(str(shutil.which("busybox"))).read_bytes()}, links)


def noise(size: int, seed: int) -> bytes:
    """Bytes that no compressor makes smaller."""
    return random.Random(seed).randbytes(size)


def layer(size: int, seed: int) -> bytes:
    """A layer that is one file of noise."""
    return tar_of({f"file{seed}": noise(size, seed)})


def saved_image(*layers: bytes, name: str = "a:1", links: Mapping[int, int] = {}) -> tuple[bytes, bytes]:
    """What the classic store saves of an image with these layers, and its settings. links: layers that are links."""
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    facts = {"architecture": "amd64", "os": "linux", "created": "2026-01-01T00:00:00Z", "config": {"Env": ["A=1"]}}
    config = json.dumps({**facts, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
    names, settings = [f"{k:064x}/layer.tar" for k in range(len(layers))], f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": settings, "RepoTags": [name], "Layers": names}]).encode()
    files = {names[k]: layer for k, layer in enumerate(layers) if k not in links}
    targets = {names[k]: f"../{names[other]}" for k, other in links.items()}
    return tar_of({**files, settings: config, "manifest.json": manifest, "repositories": b"{}"}, targets), config


@dataclass(frozen=True)
class Pushed:
    """One push as a test sees it. sent_bytes: what left the launcher."""

    plan: ImagePlan
    nodes: dict[str, NodeResult]
    sent_bytes: int

    @property
    def failed(self) -> set[str]:
        """Nodes that did not get the image."""
        return {name for name, node in self.nodes.items() if not node.ok}


@dataclass(frozen=True)
class Midway:
    """`act`, which is called once during a push, as soon as `node` received `after_bytes`."""

    node: str
    after_bytes: int
    act: Callable[[], None]

    def watch(self, push: Push, is_over: threading.Event) -> None:
        while push.received_bytes().get(self.node, 0) < self.after_bytes:
            if is_over.wait(0.02):
                return
        self.act()


class PushRig:
    """A testbed and an engine for this machine: pushes in this process, over real SSH."""

    def __init__(self, testbed: Testbed, engine: LauncherEngine) -> None:
        self.testbed, self.engine = testbed, engine
        self.words = ("docker", "--host", engine.host)
        self.names = testbed.node_names
        self._images = itertools.count(1)

    def image(self, *mib: float) -> Image:
        """A new image with a layer of so many MiB of noise each."""
        number = next(self._images)
        layers = [layer(int(size * (1 << 20)), 1000 * number + k) for k, size in enumerate(mib)]
        return self.load(f"rig/app:{number}", *layers)

    def load(self, name: str, *layers: bytes) -> Image:
        """An image of these layers."""
        self.engine("load", "--quiet", stdin=saved_image(*layers, name=name)[0])
        return self.find(name)

    def find(self, name: str) -> Image:
        """An image of the launcher's engine."""
        image = engine_here(self.words).find(name)
        assert image is not None
        return image

    def pack(self, image: Image, packing: Packing) -> PackedImage:
        return pack_image(self.words, image, packing)

    def push(
        self,
        image: Image,
        nodes: Sequence[str] | None = None,
        *,
        midway: Midway | None = None,
        patience_s: float = 30.0,
        stall_s: float = STALL_S,
        limit: float | None = None,
    ) -> Pushed:
        """The push of `image` to `nodes` (all): what `burst image push` does, without a screen."""
        hosts = [self.testbed.host(name) for name in nodes or self.names]
        pack, is_over = functools.partial(self.pack, image), threading.Event()
        with SshPool(patience_s=patience_s) as pool:
            push = Push(image, pack, ["docker"], hosts, pool.connect, stall_s=stall_s)
            watcher = threading.Thread(target=lambda: midway and midway.watch(push, is_over))
            watcher.start()
            try:
                plan = push.plan(limit)
                results = push.run(plan)
            finally:
                is_over.set()
                watcher.join()
            sent = push.sent_bytes
        return Pushed(plan, {result.node: result for result in results}, sent)

    def relays(self, node: str) -> list[psutil.Process]:
        """The relays that run on a node."""
        home = str(self.testbed.node(node).home)
        own = living("environ", f"HOME={home}")
        return [process for process in living("cmdline", "burst-image-relay") if process in own]
