"""Saves and restores the training state of a run. Every method is collective over all ranks, in the same order.

A save: all ranks write their parts into a new folder, sync and hash them; the parts are checked to cover every tensor;
then the folder is renamed. If nodes do not share a disk, every disk gets its own folder with the same manifest, and a
checkpoint is complete when all disks have it.
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
from engine.checkpoint.parts import HostCopies, file_name, local_parts, read_parts, share_out, write_parts
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
    """A committed save.

    Attributes:
        step: Optimizer step, from 1.
        bytes: Size of its files.
        stall_s: How long training was blocked.
        seconds: Until it was committed.
    """

    step: int
    bytes: int
    stall_s: float
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """The state to save: live tensors by name, and JSON values."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


Accept = Callable[[Manifest], None]


class Checkpointer:
    """The checkpoints in the folder `root`.

    Args:
        config: When to save and how many to retain.
        root: Folder of the checkpoints of this run.
        facts: Added to every manifest.
        warn: Called with messages for the user.
        advance: Called whenever a save or restore makes progress.
    """

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
        # A separate group: collectives of a background save must not interleave with those of training.
        self._group = dist.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1, "checkpoint") if config.in_background else None
        self._copies = HostCopies()
        self._pending: Future[Saved] | None = None
        self._restored: int | None = None
        with self._agreeing(f"use {root}"):
            storage = storage_id(root)
        self._disk = self._find_disk(storage)
        with self._agreeing(f"recover {root}"):
            if self._disk.is_leader:
                recover(root)
        self._last_save = time.monotonic()

    # --- saving ------------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether to save after step `step` (from 1); equal on all ranks."""
        if self.config.every_steps is not None and step % self.config.every_steps == 0:
            return True
        if self.config.every_minutes is None:
            return False
        elapsed = torch.tensor(time.monotonic() - self._last_save, dtype=torch.float64)
        dist.broadcast(elapsed, 0)  # in the default group: a background save may be using self._group
        return float(elapsed) >= 60.0 * self.config.every_minutes

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> list[Saved]:
        """Save now or, with in_background, start a save; return the saves committed since the last call.

        Args:
            snapshot: The state; its tensors may be written again after this returns.
            wait: Save now in any case.

        Raises:
            CheckpointError: On all ranks, if this save or the background save before it fails.
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
        """Wait for the background save, if any, and return it."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def close(self) -> list[Saved]:
        """Wait for the background save, if any, return it, and free the process group."""
        try:
            return self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            dist.destroy_process_group(self._group)

    def _write(self, snapshot: Snapshot, tensors: Mapping[str, Tensor]) -> Manifest:
        """Write and commit a checkpoint; return its manifest.

        Args:
            snapshot: Shapes, placements and state.
            tensors: Those of the snapshot, or copies of this rank's parts of them.
        """
        save_id = self._broadcast(secrets.token_hex(_ID_BYTES))
        agreeing = partial(self._agreeing, f"save step {snapshot.step}")
        with agreeing():
            folder = new_folder(self.root, snapshot.step, save_id)
        try:
            with agreeing():
                held = local_parts(snapshot.tensors, self._rank)
            held_by_rank = [held] * dist.get_world_size(self._group)
            dist.gather_object(held, held_by_rank if self._rank == 0 else None, 0, group=self._group)
            chosen = self._broadcast(share_out(held_by_rank) if self._rank == 0 else None)
            with agreeing():
                write_parts(folder, self._rank, tensors, chosen)
            with agreeing():
                local_file = file_facts(folder / file_name(self._rank), self._disk.storage)
            files = {file_name(rank): facts for rank, facts in enumerate(self._gather(local_file))}
            manifest = Manifest(snapshot.step, save_id, utc_now(), files, chosen, snapshot.state, self._facts)
            if (problem := next(manifest.problems(), None)) is not None:
                raise CheckpointError(f"cannot save step {snapshot.step}: the written files are incomplete: {problem}")
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
        """Delete checkpoints beyond keep_last; a failure is a warning."""
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
        """Read the newest undamaged checkpoint into `target`; return its manifest, or None if there is none.

        Damaged ones are moved aside with a warning.

        Args:
            target: Tensors to fill.
            accept: Raises CheckpointError for a checkpoint that does not fit this run, before tensors are read.

        Raises:
            CheckpointError: All checkpoints are damaged, or the newest undamaged one does not fit.
        """
        steps = self._common_steps(self.root)
        manifest = self._newest(self.root, steps, self._disk, is_this_run=True)
        if manifest is not None:
            self._read(self.root, manifest, target, accept)
            self._restored = manifest.step
        elif steps:
            raise CheckpointError(f"no checkpoint under {self.root} is undamaged; see WHY in each of its .bad folders")
        return manifest

    def restore_from(self, source: Path, target: TrainingTensors, accept: Accept) -> Manifest:
        """Read the newest undamaged checkpoint of another run into `target`; return its manifest.

        Nothing in `source` is changed. Damaged checkpoints are skipped with a warning. A node without the folder is
        sent the files that it needs.

        Args:
            source: A run folder, its folder of checkpoints, or one checkpoint.
            target, accept: See `restore`.

        Raises:
            CheckpointError: There is no undamaged checkpoint, the one named is damaged, or it does not fit.
        """
        root, named = self._find_source(source)
        steps = self._common_steps(root) if named is None else [named]
        manifest = self._newest(root, steps, self._find_disk(read_storage_id(root)), is_this_run=False)
        if manifest is None:
            raise CheckpointError(f"{source} has no checkpoint that all ranks see")
        self._read(root, manifest, target, accept)
        return manifest

    def _newest(self, root: Path, steps: Sequence[int], disk: Disk, *, is_this_run: bool) -> Manifest | None:
        """Return the manifest of the first undamaged checkpoint among `steps`, or None.

        is_this_run: the checkpoints are of this run, so damaged ones are moved aside; else they are skipped.
        """
        for step in steps:
            checkpoint = Checkpoint.of(root, step)
            manifest, problem = self._verified(checkpoint, disk)
            if manifest is not None:
                if step != steps[0] and self._rank == 0:
                    self._warn(f"continuing from the older checkpoint of step {step} instead of step {steps[0]}")
                return manifest
            if not is_this_run and step == steps[-1]:
                raise CheckpointError(problem)
            if is_this_run:
                with self._agreeing(f"put the damaged checkpoint of step {step} aside"):
                    if self._disk.is_leader and checkpoint.path.exists():
                        put_aside(checkpoint, problem)
            if self._rank == 0:
                reaction = "moved aside" if is_this_run else "skipped"
                self._warn(f"the checkpoint of step {step} is {reaction}: {problem}")
        return None

    def _find_source(self, source: Path) -> tuple[Path, int | None]:
        """Resolve `source` by `find_source`; a node that lacks it uses the answer of another.

        Raises CheckpointError if no node has it.
        """
        local: tuple[str, int | None] | None = None
        problem: CheckpointError | None = None
        try:
            root, named = find_source(source)
            local = os.path.relpath(root, source), named
        except CheckpointError as error:
            problem = error
        answers = [answer for answer in self._gather(local) if answer is not None]
        with self._agreeing(f"continue from {source}"):
            if not answers and problem is not None:
                raise problem
        path, named = local or answers[0]
        return Path(os.path.normpath(source / path)), named

    def _find_disk(self, storage: str) -> Disk:
        storages = self._gather(storage)
        peers = tuple(rank for rank, other in enumerate(storages) if other == storage)
        return Disk(storage, peers.index(self._rank), len(peers), frozenset(storages) - {storage})

    def _common_steps(self, root: Path) -> list[int]:
        """Return the steps with a checkpoint on every disk that has checkpoints at all, newest first.

        A disk without any may belong to a new node, unless the manifest names it: then the save did not reach it.
        """
        local = {checkpoint.step: _storages(checkpoint) for checkpoint in list_checkpoints(root)}
        by_rank = self._gather((read_storage_id(root), local))
        holding = [known for _, known in by_rank if known]
        empty = {storage for storage, known in by_rank if not known}
        steps = set.intersection(*map(set, holding)) if holding else set()
        whole = (step for step in steps if not any(empty & known[step] for known in holding))
        return sorted(whole, reverse=True)

    def _open(self, checkpoint: Checkpoint) -> Manifest:
        """Return its manifest, sent by another rank if this disk lacks it. Raises CheckpointError."""
        manifest, problem, is_here = None, f"{checkpoint.path} is on no disk", checkpoint.path.exists()
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
        """Return (manifest, "") if all disks together hold the same save undamaged, else (None, the problem).

        Raises CheckpointError if it has files on a disk that no rank sees: those may be undamaged.
        """
        manifest, problem, absent = None, "", set()
        try:
            manifest = self._open(checkpoint)
            local = {name for name, file in manifest.files.items() if file.storage == disk.storage}
            # A file of a disk that no rank sees may have been copied to this one.
            foreign = {name for name, file in manifest.files.items() if file.storage not in disk.others} - local
            absent = {name for name in foreign if not (checkpoint.path / name).exists()}
            # The ranks that share a disk divide its files among them.
            verify_files(checkpoint.path, manifest, sorted(local | foreign - absent)[disk.index :: disk.ranks])
        except CheckpointError as error:
            problem = str(error)
        answers = self._gather((None if manifest is None else manifest.save_id, problem, absent))
        problems = [text for _, text, _ in answers if text]
        if not problems and len({save_id for save_id, _, _ in answers}) > 1:
            problems = [f"{checkpoint.path}: the nodes' disks hold different saves of this step"]
        if not problems and (lost := sorted(set.intersection(*(names for _, _, names in answers)))):
            raise CheckpointError(
                f"{checkpoint.path} lacks {lost[0]} and {len(lost) - 1} more, which are on a disk that no rank sees. "
                "Continue on the nodes that saved it, or copy these files here"
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
        """Run the body; if it fails on any rank, raise CheckpointError with the first cause on all ranks. Collective.

        So no rank is left waiting in a later collective for one that failed.
        """
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
    """Return the disks that took part in a save; empty if its manifest cannot be read."""
    with contextlib.suppress(CheckpointError):
        return {file.storage for file in open_checkpoint(checkpoint).files.values()}
    return set()


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    path = getattr(error, "filename", None)
    return f"{path}: {text}" if path else " ".join(str(text).split())
