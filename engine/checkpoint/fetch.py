"""Files of a checkpoint that lie on another node's disk, brought to those that need them over the ranks' group.

Nodes that share no disk each hold the files of their own ranks. Replicas write a part only once, and another number
of ranks cuts tensors at other places: then a rank needs what only another node has.
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
    """Which disk this rank sees a folder on: `place` among the `ranks` that see the same. others: disks of other ranks.

    Its first rank does for it what only one may.
    """

    storage: str
    place: int
    ranks: int
    others: frozenset[str]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its disk."""
        return self.place == 0


@dataclass(frozen=True)
class Fetch:
    """Brings files of the checkpoint in `folder` into `into`, a folder of this disk alone. Every rank calls it."""

    folder: Path
    into: Path
    manifest: Manifest
    disk: Disk
    group: dist.ProcessGroup

    def __call__(self, wanted: set[str]) -> Mapping[str, Path]:
        """Where each of the files `wanted` by this rank is. Raises CheckpointError on ranks that cannot get theirs."""
        here = {name for name in self.manifest.files if (self.folder / name).is_file()}
        answers = gather_objects((self.disk.storage, here, wanted - here), self.group)
        own = {name for storage, _, lacking in answers if storage == self.disk.storage for name in lacking}
        problem = ""
        for name in sorted(set().union(*(lacking for _, _, lacking in answers))):
            holders = [rank for rank, (_, held, _) in enumerate(answers) if name in held]
            if not holders:
                raise CheckpointError(f"{self.folder} lacks {name}, and no other node has it")
            problem = self._pass_on(name, holders[0], keep=name in own and self.disk.is_leader) or problem
        if any(gather_objects(problem, self.group)):
            raise CheckpointError(problem or "a file of another node's disk could not be brought to all that need it")
        return {name: (self.folder if name in here else self.into) / name for name in wanted}

    def clean(self) -> None:
        """Delete what was brought."""
        if self.disk.is_leader:
            shutil.rmtree(self.into, ignore_errors=True)

    def _pass_on(self, name: str, holder: int, *, keep: bool) -> str:
        """One file from the rank `holder` to all, in blocks; gives why it could not be sent or kept, or nothing.

        Whatever fails here, the others are served: so nobody is left waiting.
        """
        sends, problem = dist.get_rank() == holder, ""
        with contextlib.ExitStack() as stack:
            file: BinaryIO | None = None
            try:
                if sends:
                    file = stack.enter_context((self.folder / name).open("rb"))
                elif keep:
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
                    if keep and file is not None:
                        file.write(block.numpy().data)
                except OSError as error:
                    problem, file = f"{name}: {error.strerror}", None
        if keep and not problem:
            try:
                verify_files(self.into, self.manifest, [name])
            except CheckpointError as error:
                problem = str(error)
        return problem
