"""Transfers files of a checkpoint between nodes that do not share a disk, over the process group.

Each node holds the files of its own ranks. A rank may need a file of another node, because replicas write a part only
once, and a different number of ranks shards tensors at other offsets.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from engine.distributed.collectives import gather_objects
from engine.runs.checkpoints import CheckpointError, Manifest, verify_files

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Disk:
    """The disk on which this rank sees a folder; its first rank, the leader, does what must be done once per disk.

    Attributes:
        storage: Id of the disk.
        index: Index of this rank among those that see the same disk.
        ranks: Number of ranks that see the same disk.
        others: Ids of the disks of other ranks.
    """

    storage: str
    index: int
    ranks: int
    others: frozenset[str]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first that sees the disk."""
        return self.index == 0


@dataclass(frozen=True)
class Fetch:
    """Copies files of the checkpoint `folder` from other nodes into the local folder `into`. Collective."""

    folder: Path
    into: Path
    manifest: Manifest
    disk: Disk
    group: dist.ProcessGroup

    def __call__(self, wanted: set[str]) -> Mapping[str, Path]:
        """Return the path of each file `wanted` by this rank. Raises CheckpointError if one cannot be had."""
        here = {name for name in self.manifest.files if (self.folder / name).is_file()}
        answers = gather_objects((self.disk.storage, here, wanted - here), self.group)
        needed = {name for storage, _, lacking in answers if storage == self.disk.storage for name in lacking}
        problem = ""
        for name in sorted(set().union(*(lacking for _, _, lacking in answers))):
            holders = [rank for rank, (_, held, _) in enumerate(answers) if name in held]
            if not holders:
                raise CheckpointError(f"{self.folder} lacks {name}, and no other node has it")
            problem = self._broadcast_file(name, holders[0], write=name in needed and self.disk.is_leader) or problem
        if any(gather_objects(problem, self.group)):
            raise CheckpointError(problem or "a file of another node's disk could not be copied to all that need it")
        return {name: (self.folder if name in here else self.into) / name for name in wanted}

    def clean(self) -> None:
        """Delete the copied files."""
        if self.disk.is_leader:
            shutil.rmtree(self.into, ignore_errors=True)

    def _broadcast_file(self, name: str, holder: int, *, write: bool) -> str:
        """Broadcast a file from rank `holder` in blocks; return the problem of reading or writing it, or "".

        After a local error the rank takes part in the remaining broadcasts, so that no other rank hangs.
        """
        sends, problem = dist.get_rank() == holder, ""
        with contextlib.ExitStack() as stack:
            file: BinaryIO | None = None
            try:
                if sends:
                    file = stack.enter_context((self.folder / name).open("rb"))
                elif write:
                    self.into.mkdir(mode=0o700, exist_ok=True)
                    file = stack.enter_context((self.into / name).open("wb"))
            except OSError as error:
                problem = f"{error.filename}: {error.strerror}"
            for begin in range(0, self.manifest.files[name].bytes, _BLOCK_BYTES):
                block = torch.zeros(min(_BLOCK_BYTES, self.manifest.files[name].bytes - begin), dtype=torch.uint8)
                try:
                    if sends and file is not None:
                        file.readinto(block.numpy().data)  # type: ignore[attr-defined]
                    dist.broadcast(block, holder, group=self.group)
                    if write and file is not None:
                        file.write(block.numpy().data)
                except OSError as error:
                    problem, file = f"{name}: {error.strerror}", None
        if write and not problem:
            try:
                verify_files(self.into, self.manifest, [name])
            except CheckpointError as error:
                problem = str(error)
        return problem
