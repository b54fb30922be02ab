"""Checkpoints that lie on the disks of nodes: which there are, whether they are as they were written; fetched, deleted.

Nodes that share no disk hold the parts of their own ranks each, all with the same manifest. A node needs a POSIX shell
and `sha256sum` for this, and nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.connection import Connect, Connection, Deadline
from cluster.ssh.hosts import Host, fan_out, fold_nodes
from engine.runs.checkpoints import (
    MANIFEST_FILE,
    CheckpointError,
    Manifest,
    commit,
    manifest_from_dict,
    new_folder,
    verify_files,
)
from engine.runs.files import parse_line, sync

Advance = Callable[[int], None]
Take = Callable[[bytes], object]

_AT = 'case $1 in "~/"*) cd -- "$HOME/${1#??}";; *) cd -- "$1";; esac'
_LIST = f"""{_AT} 2>/dev/null || exit 0
find . -path "./step-*" -type f -exec wc -c {{}} \\;
grep -o '"save_id": *"[0-9a-f]*"' /dev/null ./step-*/MANIFEST.json 2>/dev/null; :"""
_HASH = f'{_AT} && sha256sum -- "$2"'
_READ = f'{_AT} && tail -c +"$3" -- "$2"'
# As the ranks delete one: killed half-way, what is left is no checkpoint any more. Nodes may share the disk.
_REMOVE = f'{_AT} && if [ -e "$2" ]; then mv -- "$2" "$3" && rm -rf -- "$3"; fi'
_FILE = re.compile(r"\s*(\d+) \./step-(\d{8,})/(rank\d{5}\.safetensors|MANIFEST\.json)")
_SAVE = re.compile(r'\./step-(\d{8,})/MANIFEST\.json:"save_id": *("[0-9a-f]*")')
_BLOCK_BYTES = 1 << 20
_END_S = 60.0
_SILENCE_S = 60.0
_LIST_S = 300.0
_HASH_S = 3600.0
_LIST_BYTES = 64 << 20  # a million names
_ANSWER_BYTES = 64 << 10
_MANIFEST_BYTES = 256 << 20


class OverlongError(ClusterError):
    """A node sends more than it announced, or than any answer has."""


class NodeStore:
    """The folder of checkpoints `root` (which may begin with ~/) on the node that `connection` leads to.

    files: bytes of every file of a committed checkpoint, by (step, name). saves: which save of a step the node holds;
    manifests of one save differ in their time alone. Both are found out by `look`.
    """

    def __init__(self, connection: Connection, root: str) -> None:
        self._connection, self.root, self.node = connection, root, connection.host.name
        self.files: dict[tuple[int, str], int] = {}
        self.saves: dict[int, str] = {}

    def look(self) -> None:
        """List what is there. Raises ClusterError."""
        for line in self._text(_LIST, within_s=_LIST_S, limit=_LIST_BYTES).splitlines():
            if (found := _FILE.fullmatch(line)) is not None:
                self.files[int(found[2]), found[3]] = int(found[1])
            elif (found := _SAVE.fullmatch(line)) is not None:
                self.saves.setdefault(int(found[1]), found[2])

    def sha256(self, step: int, name: str) -> str:
        """The hash of a file, computed on the node."""
        return self._text(_HASH, _path(step, name), within_s=_HASH_S)[:64]

    def read(self, step: int, name: str, take: Take, offset: int = 0) -> None:
        """Hand the bytes of a file from `offset` on to `take`, piece by piece.

        Raises OverlongError before `take` gets a byte beyond the size that `look` found.
        """
        limit = self.files[step, name] - offset
        self._run((_READ, _path(step, name), str(offset + 1)), take, lambda: _SILENCE_S, limit)

    def remove(self, step: int) -> None:
        """Delete what the node holds of `step`."""
        folder = f"step-{step:08d}"
        self._text(_REMOVE, folder, f"{folder}.gone-{secrets.token_hex(4)}", within_s=_HASH_S)

    def _text(self, script: str, *words: str, within_s: float, limit: int = _ANSWER_BYTES) -> str:
        """What a script prints in that time. Raises as `_run`."""
        printed, deadline = bytearray(), Deadline.after(within_s)
        self._run((script, *words), printed.extend, lambda: deadline.left_s, limit)
        return printed.decode("ascii", "replace")

    def _run(self, script: tuple[str, ...], take: Take, patience_s: Callable[[], float], limit: int) -> None:
        """Hand what a script with its words prints on to `take`, at most `limit` bytes.

        patience_s: how long to wait for the next of them. Raises SshError, OverlongError, ClusterError.
        """
        code, *words = script
        process = self._connection.start(("sh", "-c", code, "burst", self.root, *words))
        where = f"{self.node}: {'/'.join((self.root, *words[:1]))}"
        try:
            while block := process.read(_BLOCK_BYTES, patience_s()):
                if (limit := limit - len(block)) < 0:
                    raise OverlongError(f"{where}: the node sends more than it announced or than an answer may have")
                take(block)
            result = process.wait(_END_S)
        finally:
            process.close()
        if result.exit_code != 0:
            raise ClusterError(f"{where}: {one_line(result.stderr, 300)}")


@dataclass(frozen=True)
class NodeCheckpoint:
    """A checkpoint as the disks of all nodes hold it together.

    held: bytes on each disk that has any of it. holders: who has which file. problem: why it is not whole.
    """

    step: int
    manifest: Manifest | None
    held: Mapping[NodeStore, int]
    holders: Mapping[str, NodeStore] = field(default_factory=dict)
    problem: str | None = None

    @property
    def nodes(self) -> str:
        """Who holds its parts, folded."""
        return fold_nodes(sorted({store.node for store in self.holders.values()}))

    @property
    def size(self) -> int:
        """Bytes on all disks."""
        return sum(self.held.values())

    def verify(self, advance: Advance) -> str | None:
        """What differs from the manifest, each file read where it lies; None: nothing does."""
        if self.manifest is None or self.problem is not None:
            return self.problem
        for name, facts in sorted(self.manifest.files.items()):
            store = self.holders[name]
            if store.sha256(self.step, name) != facts.sha256:
                return f"{store.node}: {store.root}/{_path(self.step, name)} does not hold what was written"
            advance(facts.bytes)
        return None

    def remove(self) -> None:
        """Delete it on every node."""
        for store in self.held:
            store.remove(self.step)

    def fetch(self, root: Path, advance: Advance) -> Path:
        """Bring it into the folder of checkpoints `root` of this machine, where it appears once it is whole.

        What an interrupted fetch brought is kept. Raises CheckpointError where a part is missing or damaged, and
        OverlongError where a node sends more of a file than it announced; that file is removed.
        """
        if self.manifest is None or self.problem is not None:
            raise CheckpointError(f"the checkpoint of step {self.step} cannot be fetched: {self.problem}")
        folder = new_folder(root, self.step, self.manifest.save_id)
        with _alone_in(folder):
            for name, facts in sorted(self.manifest.files.items()):
                try:
                    self._fetch_file(folder / name, facts.bytes, advance)
                    verify_files(folder, self.manifest, [name])
                except (CheckpointError, OverlongError):
                    (folder / name).unlink()
                    raise
                sync(folder / name)
            return commit(folder, self.manifest)

    def _fetch_file(self, path: Path, size: int, advance: Advance) -> None:
        with path.open("ab") as file:
            here = file.tell()
            if here > size:
                file.truncate(here := 0)
            advance(here)

            def take(block: bytes) -> None:
                file.write(block)
                advance(len(block))

            if here < size:
                self.holders[path.name].read(self.step, path.name, take, here)


@dataclass(frozen=True)
class NodeCheckpoints:
    """What the nodes that answered hold, newest first. errors: those that did not answer, and why."""

    found: tuple[NodeCheckpoint, ...]
    errors: Mapping[str, str]


def ask_nodes(hosts: Sequence[Host], roots: Mapping[str, str], connect: Connect) -> NodeCheckpoints:
    """The checkpoints under `roots` (by node) on `hosts`; connections stay open for what is done with them."""

    def ask(host: Host) -> NodeStore:
        store = NodeStore(connect(host), roots[host.name])
        store.look()
        return store

    outcomes = fan_out(hosts, ask)
    stores = [outcome.value for outcome in outcomes.values() if outcome.value is not None]
    errors = {name: str(outcome.error) for name, outcome in outcomes.items() if outcome.error is not None}
    steps = sorted({step for store in stores for step, name in store.files if name == MANIFEST_FILE}, reverse=True)
    return NodeCheckpoints(tuple(_checkpoint(step, stores, errors) for step in steps), errors)


def _checkpoint(step: int, stores: Sequence[NodeStore], errors: Mapping[str, str]) -> NodeCheckpoint:
    holding = [store for store in stores if (step, MANIFEST_FILE) in store.files]
    bytes_of = {store: sum(size for (of, _), size in store.files.items() if of == step) for store in stores}
    held = {store: size for store, size in bytes_of.items() if size}
    try:
        manifest = _manifest(step, holding[0])
    except (ClusterError, CheckpointError) as error:
        return NodeCheckpoint(step, None, held, problem=str(error))
    holders = {
        name: store
        for name, facts in manifest.files.items()
        for store in reversed(holding)
        if store.files.get((step, name)) == facts.bytes
    }
    lacking = sorted(manifest.files.keys() - holders.keys())
    problem = None
    if len({store.saves.get(step) for store in holding}) > 1:
        problem = "the nodes hold different saves of this step"
    elif lacking:
        away = f"; no answer of {fold_nodes(sorted(errors))}" if errors else ""
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        problem = f"{lacking[0]}{more} of {len(manifest.files)} files lie whole on no node that answers{away}"
    return NodeCheckpoint(step, manifest, held, holders, problem)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two that wrote the same files at once would damage both."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(f"another command is bringing {folder} here; wait for it") from None
    finally:
        os.close(descriptor)


def _manifest(step: int, store: NodeStore) -> Manifest:
    where, blocks = f"{store.node}: {store.root}/{_path(step, MANIFEST_FILE)}", bytearray()
    if store.files[step, MANIFEST_FILE] > _MANIFEST_BYTES:
        raise CheckpointError(f"{where} is larger than {_MANIFEST_BYTES >> 20} MiB")
    store.read(step, MANIFEST_FILE, blocks.extend)
    if (document := parse_line(bytes(blocks))) is None:
        raise CheckpointError(f"{where} is damaged: it is no JSON object")
    manifest = manifest_from_dict(document, where)
    if manifest.step != step:
        raise CheckpointError(f"{where} is of step {manifest.step}")
    return manifest


def _path(step: int, name: str) -> str:
    return f"step-{step:08d}/{name}"
