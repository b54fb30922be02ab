"""A tiny training run on random tokens, for ranks of a pool: the same global batch whatever the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from engine.attention.library import ContextParallel, resolve_here
from engine.config.cluster import ClusterConfig
from engine.config.settings import (
    AttentionConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.distributed.mesh import Mesh, build_mesh
from engine.model.decoder import Decoder
from engine.parallel.parallelize import build_model
from engine.training.train_step import RankBatch, TrainStep, count_batches
from testkit.sections import changed

TINY_MODEL = ModelConfig(
    name="test",
    vocab_size=64,
    hidden_size=32,
    ffn_hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    init_std=0.1,
)

# seq_len 30 is no multiple of 4 or 8: every run with several ranks has a padded tail.
TINY = RunConfig(
    exp="test",
    seed=3,
    model=TINY_MODEL,
    loss=LossConfig(chunk_tokens=16),
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="constant", max_grad_norm=0.5),
    train=TrainConfig(seq_len=30, steps=20, compute_dtype="float32"),
    cluster=ClusterConfig(backend="gloo"),
)

PRESETS: dict[str, AttentionConfig] = {
    "ring": AttentionConfig(preset="ring"),
    "striped": AttentionConfig(preset="striped"),
    "burst": AttentionConfig(preset="burst", backward_circulates="q"),
}


def tiny_config(**changes: Any) -> RunConfig:
    """TINY with fields replaced: a dataclass replaces the whole section, a dict only its keys."""
    return changed(TINY, **changes)


@dataclass(frozen=True)
class TinyRun:
    """What one rank needs to train."""

    mesh: Mesh
    model: Decoder
    attention: ContextParallel
    train_step: TrainStep


@cache
def mesh_of(parallel: ParallelConfig, cluster: ClusterConfig) -> Mesh:
    """The mesh of this rank, made once per worker: its process groups live as long as the worker."""
    return build_mesh(parallel, cluster)


def start_run(config: RunConfig) -> TinyRun:
    """Mesh, model and optimizer of this rank."""
    mesh = mesh_of(config.parallel, config.cluster)
    model, attention = build_model(resolve_here(config, mesh), mesh)
    return TinyRun(mesh, model, attention, TrainStep(config, mesh, model, attention))


def random_batches(
    step: int, *, sequences: int, seq_len: int = 30, vocab_size: int = 64, ignored: Sequence[int] = ()
) -> Batch:
    """A global batch of `step`; row r has its first ignored[r] labels taken out. A pattern, so that loss can fall."""
    generator = np.random.default_rng(step)
    start = generator.integers(0, vocab_size, (sequences, 1))
    text = (start + np.arange(seq_len + 1) * 7 + generator.integers(0, 2, (sequences, seq_len + 1))) % vocab_size
    labels = text[:, 1:].copy()
    for row, count in enumerate(ignored):
        labels[row, :count] = IGNORE_INDEX
    documents = tuple(np.zeros(1, dtype=np.int64) for _ in range(sequences))
    return Batch(text[:, :-1].copy(), labels, documents, tuple(step * sequences + row for row in range(sequences)))


def own_part(batch: Batch, mesh: Mesh, *, micro_steps: int = 1) -> list[Batch]:
    """This rank's micro-batches of a global batch: rows divided by micro-step first, then by data-parallel rank."""
    parts = micro_steps * mesh.dp_size
    rows = batch.tokens.shape[0] // parts
    assert rows * parts == batch.tokens.shape[0]
    chosen = [slice((m * mesh.dp_size + mesh.dp_rank) * rows, None) for m in range(micro_steps)]
    fields = (batch.tokens, batch.labels, batch.documents, batch.samples)
    return [Batch(*(field[s][:rows] for field in fields)) for s in chosen]


def train_losses(config: RunConfig, sequences: int, steps: int, micro_steps: int = 1) -> list[float]:
    """Losses of `steps` optimizer steps over global batches of `sequences` rows."""
    run = start_run(config)
    batches = (random_batches(step, sequences=sequences, seq_len=config.train.seq_len) for step in range(steps))
    return [
        run.train_step(step, own_part(batch, run.mesh, micro_steps=micro_steps)).loss
        for step, batch in enumerate(batches)
    ]


def accumulated(run: TinyRun, parts: Sequence[Batch]) -> tuple[torch.Tensor, int]:
    """(loss sum, labels) over all ranks of one step's micro-batches, whose gradients are there afterwards."""
    local = [run.train_step.prepare(part) for part in parts]
    labels, _ = count_batches(local, run.mesh)
    return run.train_step.accumulate(local, labels), labels


def loss_of(model: Decoder, batch: RankBatch) -> torch.Tensor:
    """Sum of the loss over this rank's labels."""
    loss: torch.Tensor = model.head(model(batch.rows.tokens, batch.rows.positions, batch.attention), batch.rows.labels)
    return loss


def full_weights(model: Decoder) -> dict[str, torch.Tensor]:
    """Every parameter, gathered whole, by name."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(tensor: Any) -> torch.Tensor:
    """A tensor or DTensor as an ordinary tensor of its own."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    assert isinstance(gathered, torch.Tensor)
    return gathered.detach().clone()
