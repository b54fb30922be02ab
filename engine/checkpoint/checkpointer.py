"""Saves and restores the training state of a run; every rank calls everything, in the same order.

A save is: all ranks write their parts into a new folder, hash them and see them on the disk; rank 0 checks that the
parts make up every tensor; then the folder is renamed. Where nodes share no disk, every disk gets its own folder with
the same manifest, and a step counts when all of them have it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.checkpoint.fetch import Disk, Fetch
from engine.checkpoint.parts import HostCopies, file_name, held_parts, read_parts, share_out, write_parts
from engine.checkpoint.state import TrainingTensors
from engine.config.settings import CheckpointConfig
from engine.distributed.collectives import gather_objects
from engine.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    Manifest,
    commit,
    file_facts,
    find_source,
    list_checkpoints,
    new_folder,
    open_checkpoint,
    put_aside,
    read_storage_id,
    recover,
    storage_id,
    superfluous,
    verify_files,
)
from engine.runs.files import remove_folder, utc_now

_ID_BYTES = 8


@dataclass(frozen=True)
class Saved:
    """A save that is committed. stall_s: how long training stood still for it; seconds: until it was on the disk."""

    step: int
    bytes: int
    stall_s: float
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved: tensors as they are now, and JSON values beside them."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


Accept = Callable[[Manifest], None]


class Checkpointer:
    """The checkpoints under `root`. `facts` go into every manifest; `warn` is called with what users must see,
    `advance` whenever a save or a restore makes progress."""

    def __init__(
        self,
        config: CheckpointConfig,
        root: Path,
        facts: Mapping[str, Any],
        warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.root, self._facts, self._warn, self._advance = config, root, facts, warn, advance
        self._rank = dist.get_rank()
        # Of its own: a save in the background must not meet the collectives of training.
        self._group = dist.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1, "checkpoint") if config.in_background else None
        self._copies = HostCopies()
        self._pending: Future[Saved] | None = None
        self._restored: int | None = None
        with self._agreeing(f"use {root}"):
            storage = storage_id(root)
        self._disk = self._find_disk(storage)
        with self._agreeing(f"put {root} in order"):
            if self._disk.is_leader:
                recover(root)
        self._last_save = time.monotonic()

    # --- saving ------------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a save is to follow step `step` (from 1); the same on all ranks."""
        if self.config.every_steps is not None and step % self.config.every_steps == 0:
            return True
        if self.config.every_minutes is None:
            return False
        elapsed = torch.tensor(time.monotonic() - self._last_save, dtype=torch.float64)
        dist.broadcast(elapsed, 0)  # not of our group, which a save in the background may be using
        return float(elapsed) >= 60.0 * self.config.every_minutes

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> list[Saved]:
        """Save now or, in the background, begin to; `wait`: in any case now. Gives what has been committed meanwhile.

        Raises CheckpointError, on all ranks, when a save fails: this one, or the one before it in the background.
        """
        finished = self.finish()
        begin = self._last_save = time.monotonic()
        if self._pool is None or wait:
            manifest = self._write(snapshot, snapshot.tensors)
            seconds = time.monotonic() - begin
            return [*finished, Saved(snapshot.step, manifest.bytes, seconds, seconds)]
        copies = self._copies.take(snapshot.tensors)
        stall_s = time.monotonic() - begin

        def write() -> Saved:
            manifest = self._write(snapshot, copies)
            return Saved(snapshot.step, manifest.bytes, stall_s, time.monotonic() - begin)

        self._pending = self._pool.submit(write)
        return finished

    def finish(self) -> list[Saved]:
        """Wait for a save in the background, if there is one, and give it."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def close(self) -> list[Saved]:
        """Wait for the last save, and give it if it was in the background."""
        try:
            return self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            dist.destroy_process_group(self._group)

    def _write(self, snapshot: Snapshot, tensors: Mapping[str, Tensor]) -> Manifest:
        """What was committed. tensors: those of the snapshot, or copies of this rank's parts of them."""
        save_id = self._broadcast(secrets.token_hex(_ID_BYTES))
        agreeing = partial(self._agreeing, f"save step {snapshot.step}")
        with agreeing():
            folder = new_folder(self.root, snapshot.step, save_id)
        try:
            with agreeing():
                held = held_parts(snapshot.tensors, self._rank)
            told = [held] * dist.get_world_size(self._group)
            dist.gather_object(held, told if self._rank == 0 else None, 0, group=self._group)
            chosen = self._broadcast(share_out(told) if self._rank == 0 else None)
            with agreeing():
                write_parts(folder, self._rank, tensors, chosen)
            with agreeing():
                own = file_facts(folder / file_name(self._rank), self._disk.storage)
            files = {file_name(rank): facts for rank, facts in enumerate(self._gather(own))}
            manifest = Manifest(snapshot.step, save_id, utc_now(), files, chosen, snapshot.state, self._facts)
            if (problem := next(manifest.problems(), None)) is not None:
                raise CheckpointError(f"cannot save step {snapshot.step}: what was written is not whole: {problem}")
            with agreeing():
                if self._disk.is_leader:
                    commit(folder, manifest)
        except BaseException:
            if self._disk.is_leader:
                with contextlib.suppress(OSError):
                    remove_folder(folder)
            raise
        self._prune(snapshot.step)
        return manifest

    def _prune(self, newest: int) -> None:
        """Delete what the configuration does not keep; that this fails is told, and ends nothing."""
        if not self._disk.is_leader:
            return
        steps = [checkpoint.step for checkpoint in list_checkpoints(self.root)]
        protected = {newest, *([] if self._restored is None else [self._restored])}
        for step in superfluous(steps, keep_last=self.config.keep_last, protected=protected):
            try:
                remove_folder(Checkpoint.of(self.root, step).path)
            except OSError as error:
                self._warn(f"checkpoint of step {step} cannot be deleted: {error.strerror}")

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, target: TrainingTensors, accept: Accept) -> Manifest | None:
        """Read the newest checkpoint that all disks hold undamaged into `target`; None when there is none.

        Damaged ones are put aside and told. `accept` raises CheckpointError for one that does not go with the rest of
        this run, as `target` does for one of another model: before anything of it is read. Raises CheckpointError
        when nothing can be read although something is there.
        """
        steps = self._common_steps(self.root)
        manifest = self._newest(self.root, steps, self._disk, is_own=True)
        if manifest is not None:
            self._read(self.root, manifest, target, accept)
            self._restored = manifest.step
        elif steps:
            raise CheckpointError(f"no checkpoint under {self.root} is undamaged; see WHY in each of its .bad folders")
        return manifest

    def restore_from(self, source: Path, target: TrainingTensors, accept: Accept) -> Manifest:
        """As `restore`, from a run, its folder of checkpoints or one checkpoint, in which nothing is changed.

        Damaged ones are passed over and told; of the last, or of one that is named, damage is an error. A node without
        the folder is sent what it needs.
        """
        root, named = self._find_source(source)
        steps = self._common_steps(root) if named is None else [named]
        manifest = self._newest(root, steps, self._find_disk(read_storage_id(root)), is_own=False)
        if manifest is None:
            raise CheckpointError(f"{source} has no checkpoint that all ranks see")
        self._read(root, manifest, target, accept)
        return manifest

    def _newest(self, root: Path, steps: Sequence[int], disk: Disk, *, is_own: bool) -> Manifest | None:
        """That of the first of `steps` which is undamaged. is_own: damaged ones are put aside, not passed over."""
        for step in steps:
            checkpoint = Checkpoint.of(root, step)
            manifest, problem = self._verified(checkpoint, disk)
            if manifest is not None:
                if step != steps[0] and self._rank == 0:
                    self._warn(f"continuing from the older checkpoint of step {step} instead of step {steps[0]}")
                return manifest
            if not is_own and step == steps[-1]:
                raise CheckpointError(problem)
            if is_own:
                with self._agreeing(f"put the damaged checkpoint of step {step} aside"):
                    if self._disk.is_leader and checkpoint.path.exists():
                        put_aside(checkpoint, problem)
            if self._rank == 0:
                fate = "put aside" if is_own else "passed over"
                self._warn(f"the checkpoint of step {step} is {fate}: {problem}")
        return None

    def _find_source(self, source: Path) -> tuple[Path, int | None]:
        """As `find_source`; where there is nothing, as others found it. Raises CheckpointError when nobody has any."""
        found: tuple[str, int | None] | None = None
        problem: CheckpointError | None = None
        try:
            root, named = find_source(source)
            found = os.path.relpath(root, source), named
        except CheckpointError as error:
            problem = error
        others = [one for one in self._gather(found) if one is not None]
        with self._agreeing(f"go on from {source}"):
            if not others and problem is not None:
                raise problem
        place, named = found or others[0]
        return Path(os.path.normpath(source / place)), named

    def _find_disk(self, storage: str) -> Disk:
        storages = self._gather(storage)
        peers = tuple(rank for rank, other in enumerate(storages) if other == storage)
        return Disk(storage, peers.index(self._rank), len(peers), frozenset(storages) - {storage})

    def _common_steps(self, root: Path) -> list[int]:
        """Steps of which every disk that has any has a checkpoint, newest first: one without may be a new node's.

        A save that did not reach the disk of a rank that took part in it is none.
        """
        told = self._gather((read_storage_id(root), {one.step: _storages(one) for one in list_checkpoints(root)}))
        holding = [known for _, known in told if known]
        empty = {storage for storage, known in told if not known}
        steps = set.intersection(*map(set, holding)) if holding else set()
        whole = (step for step in steps if not any(empty & known[step] for known in holding))
        return sorted(whole, reverse=True)

    def _open(self, checkpoint: Checkpoint) -> Manifest:
        """Its manifest, from another disk where this one has nothing of it. Raises CheckpointError."""
        manifest, problem, is_here = None, f"{checkpoint.path} lies on no disk", checkpoint.path.exists()
        try:
            manifest = open_checkpoint(checkpoint) if is_here else None
        except CheckpointError as error:
            problem = str(error)
        holders = self._gather(is_here)
        if True in holders and False in holders:
            sent = self._broadcast(manifest, holders.index(True))
            manifest = manifest if is_here else sent
        if manifest is None:
            raise CheckpointError(problem)
        return manifest

    def _verified(self, checkpoint: Checkpoint, disk: Disk) -> tuple[Manifest | None, str]:
        """(its manifest, "") where all disks together hold the same save undamaged, else (None, why not).

        Raises CheckpointError when it has files on a disk that nobody sees: they may be well.
        """
        manifest, problem, absent = None, "", set()
        try:
            manifest = self._open(checkpoint)
            own = {name for name, file in manifest.files.items() if file.storage == disk.storage}
            # A file of a disk that no rank knows may have been copied here.
            foreign = {name for name, file in manifest.files.items() if file.storage not in disk.others} - own
            absent = {name for name in foreign if not (checkpoint.path / name).exists()}
            # Each of the ranks of a disk reads a share of its files.
            verify_files(checkpoint.path, manifest, sorted(own | foreign - absent)[disk.place :: disk.ranks])
        except CheckpointError as error:
            problem = str(error)
        answers = self._gather((None if manifest is None else manifest.save_id, problem, absent))
        problems = [text for _, text, _ in answers if text]
        if not problems and len({save_id for save_id, _, _ in answers}) > 1:
            problems = [f"{checkpoint.path}: the nodes' disks hold different saves of this step"]
        if not problems and (lost := sorted(set.intersection(*(names for _, _, names in answers)))):
            raise CheckpointError(
                f"{checkpoint.path} lacks {lost[0]} and {len(lost) - 1} more, which lie on a disk that no rank sees. "
                "Go on with the nodes that saved it, or copy these files here"
            )
        return (None, problems[0]) if problems else (manifest, "")

    def _read(self, root: Path, manifest: Manifest, target: TrainingTensors, accept: Accept) -> None:
        folder = Checkpoint.of(root, manifest.step).path
        with self._agreeing(f"read {folder}"):
            updates = manifest.whole("updates")
            accept(manifest)
            target.check(manifest, str(folder))
        fetch = Fetch(folder, self.root / f"fetched-{manifest.save_id}", manifest, self._disk, self._group)
        try:
            with self._agreeing(f"read {folder}"):
                read_parts(target.tensors, manifest.tensors, fetch)
        finally:
            fetch.clean()
        target.loaded(updates)

    # --- together ----------------------------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._group)

    def _broadcast(self, value: Any, rank: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, rank, group=self._group)
        return box[0]

    @contextlib.contextmanager
    def _agreeing(self, what: str) -> Iterator[None]:
        """Go on only if this went well on all ranks; else every rank raises CheckpointError with the first cause."""
        self._advance()
        problem = ""
        try:
            yield
        except Exception as error:
            problem = f"rank {self._rank}: {_reason(error)}"
        problems = [text for text in self._gather(problem) if text]
        if problems:
            raise CheckpointError(f"cannot {what}: {problems[0]}")


def _storages(checkpoint: Checkpoint) -> set[str]:
    """The disks that took part in a save, as far as its manifest can be read."""
    with contextlib.suppress(CheckpointError):
        return {file.storage for file in open_checkpoint(checkpoint).files.values()}
    return set()


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    place = getattr(error, "filename", None)
    return f"{place}: {text}" if place else " ".join(str(text).split())
