"""One rank of the benchmark of checkpoints, `python -m benchmarks.checkpoint.rank FOLDER`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from engine.bench.measure import environment, run_rank, slowest_rank, summarise, turns
from engine.bench.spec import RankSetup, Rounds
from engine.checkpoint.checkpointer import Checkpointer, Snapshot
from engine.config.settings import CheckpointConfig
from engine.training.rank.process import leave

TENSORS = 12  # of about equal size, fp32, sharded over the ranks


@dataclass(frozen=True)
class CheckpointCell:
    """A state of `mib` over all ranks, saved in the folder `target`."""

    setup: RankSetup
    rounds: Rounds
    mib: int
    target: str


class Saves:
    """Three ways of saving the same state; each gives seconds (that training stands still, until it is on the disk)."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        config = {"every_steps": 1, "keep_last": 2}
        self._now = Checkpointer(CheckpointConfig(**config), folder / "now", {})  # type: ignore[arg-type]
        self._later = Checkpointer(CheckpointConfig(**config, in_background=True), folder / "later", {})  # type: ignore[arg-type]
        self._step = 0

    def all(self) -> dict[str, Callable[[], tuple[float, float]]]:
        """By name."""
        return {"synchronous": self.synchronous, "background": self.background, "torch": self.torch}

    def synchronous(self) -> tuple[float, float]:
        """Hashed, synced, committed."""
        (saved,) = self._now.save(self._snapshot())
        return saved.stall_s, saved.seconds

    def background(self) -> tuple[float, float]:
        """The same, while training would go on."""
        self._later.save(self._snapshot())
        (saved,) = self._later.finish()
        return saved.stall_s, saved.seconds

    def torch(self) -> tuple[float, float]:
        """torch.distributed.checkpoint as it is: pickled metadata, no hashes, no commit."""
        target = self.folder / "torch"
        begin = time.perf_counter()
        save_by_torch(dict(self.tensors), checkpoint_id=target, no_dist=False)
        seconds = time.perf_counter() - begin
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target)
        dist.barrier()
        return seconds, seconds

    def _snapshot(self) -> Snapshot:
        self._step += 1
        return Snapshot(self._step, self.tensors, {"updates": self._step})

    def close(self) -> None:
        """Ends the groups of both."""
        self._now.close()
        self._later.close()


def sharded(total_bytes: int) -> dict[str, Tensor]:
    """A state of so many bytes over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = total_bytes // TENSORS // 4 // 1024 // mesh.size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        f"tensor{index}": DTensor.from_local(torch.randn(rows, 1024, generator=generator), mesh, [Shard(0)])
        for index in range(TENSORS)
    }


def measure(cell: CheckpointCell, device: torch.device) -> dict[str, Any]:
    """The document of the benchmark, alike on all ranks."""
    tensors = sharded(cell.mib << 20)
    saves = Saves(Path(cell.target), tensors)
    variants = saves.all()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for counts, name in turns(list(variants), cell.rounds):
        dist.barrier()
        stall, seconds = slowest_rank(list(variants[name]()))
        if counts:
            found[name].append((stall, seconds))
    saves.close()
    size = sum(tensor.numel() * 4 for tensor in tensors.values())
    return {
        "bytes": size,
        "ranks": dist.get_world_size(),
        "environment": environment(device),
        "saves": {
            name: {
                "stall": asdict(summarise([stall for stall, _ in pairs])),
                "whole": asdict(summarise([seconds for _, seconds in pairs])),
            }
            for name, pairs in found.items()
        },
    }


if __name__ == "__main__":
    leave(run_rank(CheckpointCell, sys.argv[1:], measure))
