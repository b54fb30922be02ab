"""One rank of the comparison of policies, `python -m benchmarks.memory.rank FOLDER`.

All policies live in the same processes and take turns step by step; every one has a model, optimizer and log of its
own. Peak and kept bytes are counted on one more step that is not timed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.memory.cell import MemoryCell
from benchmarks.memory.counting import AttentionLog, count_attention
from benchmarks.tensors import local_tensors
from engine.attention.library import resolve_here
from engine.bench.measure import environment, run_rank, slowest_rank, summarise, turns
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.device.live_tensors import LiveTensorTracker
from engine.distributed.mesh import Mesh, build_mesh
from engine.model.llama import LlamaModel
from engine.parallel.fsdp import release_gathered_weights
from engine.parallel.parallelize import build_model
from engine.training.rank.process import leave
from engine.training.train_step import TrainStep, rank_batch


@dataclass
class PolicyRun:
    """A policy's training on this rank, and what was measured of it (seconds: of the slowest rank)."""

    policy: str
    train_step: TrainStep
    log: AttentionLog
    seconds: list[float] = field(default_factory=list)
    recompute_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, batch: Batch, *, counts: bool) -> None:
        """One training step on the clock; kept when it counts. Collective."""
        self.log.reset()
        dist.barrier()
        start = time.perf_counter()
        loss = self.train_step(0, [batch]).loss
        elapsed = time.perf_counter() - start
        elapsed, recompute = slowest_rank([elapsed, self.log.recomputed.seconds])
        self.losses.append(loss)
        if counts:
            self.seconds.append(elapsed)
            self.recompute_seconds.append(recompute)

    def count_bytes(self, batch: Batch) -> dict[str, int]:
        """Peak of live tensors over a whole step, and what its forward pass keeps; of the busiest rank. Collective.

        Saved is what is alive after the layers beyond what is alive there in a pass without gradients: weights, buffers
        of the communication and the last layer's output are the same in both.
        """
        model = self.train_step.model
        assert isinstance(model, LlamaModel)
        samples: list[int] = []
        with LiveTensorTracker() as tracker:
            # Not after the last layer: its caller still holds its input there.
            hook = model.norm.register_forward_pre_hook(lambda *_: samples.append(tracker.live_bytes))
            tracker.watch(local_tensors(model, self.train_step.optimizer))
            self._evaluate(batch)
            tracker.reset_peak()
            self.train_step(0, [batch])
        hook.remove()
        without, recording = samples
        peak, kept = slowest_rank([tracker.peak_bytes, recording - without])
        return {"peak_tensor_bytes": int(peak), "kept_bytes": int(kept)}

    def row(self) -> dict[str, Any]:
        """Times and counts as plain values. Collective, because it sums over the ranks."""
        sums = torch.tensor(
            [self.log.forward.flops, self.log.recomputed.flops, self.log.recomputed.calls], dtype=torch.int64
        )
        dist.all_reduce(sums)
        names = ("forward_flops", "recomputed_flops", "recomputed_tiles")
        return {
            "policy": self.policy,
            "step": asdict(summarise(self.seconds)),
            "seconds": self.seconds,
            "losses": self.losses,
            "attention": {
                **dict(zip(names, sums.tolist(), strict=True)),
                "recomputed_s": asdict(summarise(self.recompute_seconds)),
            },
        }

    def _evaluate(self, batch: Batch) -> None:
        step = self.train_step
        local = rank_batch(batch, step.model, step.attention, step.mesh)
        with torch.no_grad():
            step.model(local.rows.tokens, local.rows.positions, local.attention)
        release_gathered_weights(step.model)


def measure(cell: MemoryCell, device: torch.device) -> dict[str, Any]:
    """All policies of the cell, in turn."""
    config = cell.run_config(cell.policies[0])
    mesh = build_mesh(config.parallel, config.cluster)
    runs = [build_run(policy, cell, mesh) for policy in cell.policies]
    batch = random_batch(cell)
    for counts, run in turns(runs, cell.rounds):
        run.step(batch, counts=counts)
    rows = [run.row() | run.count_bytes(batch) for run in runs]
    local_tokens = runs[0].train_step.attention.padded_seq_len // mesh.degrees.cp_size
    return {"environment": environment(device), "local_tokens": local_tokens, "results": rows}


def build_run(policy: str, cell: MemoryCell, mesh: Mesh) -> PolicyRun:
    """A policy's model with the weights of all others, by the way that training takes. Collective."""
    config = cell.run_config(policy)
    model, attention = build_model(resolve_here(config, mesh), mesh)
    log = AttentionLog()
    log.watch(model)
    return PolicyRun(policy, TrainStep(config, mesh, model, count_attention(attention, log)), log)


def random_batch(cell: MemoryCell) -> Batch:
    """One sequence of random tokens, the same for every policy and rank."""
    tokens = np.random.default_rng(0).integers(0, cell.model.vocab_size, (1, cell.seq_len))
    labels = np.concatenate([tokens[:, 1:], [[IGNORE_INDEX]]], axis=1)
    return Batch(tokens, labels, (np.zeros(1, dtype=np.int64),))


if __name__ == "__main__":
    leave(run_rank(MemoryCell, sys.argv[1:], measure))
