"""Imported models on real ranks; apart from transformers, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint.checkpointer import Snapshot
from engine.config.settings import AttentionConfig, RunConfig
from engine.parallel.shard import shard_batch
from engine.pretrained.names import hugging_face_name
from engine.pretrained.shape import read_pretrained
from testkit.saved_checkpoints import checkpointing
from testkit.tiny_training import TinyRun, full_weights, own_part, random_batches, start_run, tiny_config, whole

TOKENS = 30


def config_of(folder: Path, **sections: Any) -> RunConfig:
    """A run of the model in a folder."""
    found = read_pretrained(folder)
    window = found.window_tokens
    mask: dict[str, Any] = {} if window is None else {"mask": "window", "window_tokens": window}
    attention = AttentionConfig(**{**mask, **sections.pop("attention", {})})
    model = vars(found.model) | {"init_from": str(folder)}
    return tiny_config(model=model, attention=attention, **sections)


def imported_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return {hugging_face_name(name): value for name, value in full_weights(start_run(config).model).items()}


def logits_of(run: TinyRun) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [1, T, V] on the first batch, its mean loss) of a run on one rank, or on ranks that shard alone."""
    batch = random_batches(0, sequences=1)
    local = shard_batch(batch.tokens, batch.labels, layout=run.attention.layout, cp_rank=0, device=run.mesh.device)
    functions = run.attention.run_context().functions(run.train_step.config.model.num_layers)
    hidden = run.model(local.tokens, local.positions, functions)
    with torch.no_grad():
        logits = F.linear(hidden, whole(run.model.head.weight))
    return logits, run.model.head(hidden, local.labels) / TOKENS


def facts(config: RunConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits [1, T, V], gradients of the mean loss by transformers' names) of an imported model on one rank."""
    run = start_run(config)
    logits, loss = logits_of(run)
    loss.backward()
    gradients = {
        hugging_face_name(name): p.grad.full_tensor() for name, p in run.model.named_parameters() if p.grad is not None
    }
    return logits, gradients


def train_and_save(config: RunConfig, root: str) -> torch.Tensor:
    """Logits [1, T, V] on the first batch, after five steps that end with a checkpoint."""
    run = start_run(config)
    for step in range(5):
        run.train_step(step, own_part(random_batches(step, sequences=2), run.mesh))
    with checkpointing(run, root) as (checkpointer, training):
        checkpointer.save(Snapshot(5, training.tensors, {"updates": 5}))
    with torch.no_grad():
        return logits_of(run)[0]
