"""Runs of models of transformers on ranks of a pool, with checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from engine.checkpoint.checkpointer import Snapshot
from engine.config.settings import RunConfig
from testkit.saved_checkpoints import checkpointing
from testkit.tiny_training import full_weights, own_part, random_batches, start_run


def losses_and_weights(
    config: RunConfig, steps: range, root: str, load: bool, save: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the weights after them; from a checkpoint under `root`, and into one."""
    run = start_run(config)
    with checkpointing(run, root) as (checkpointer, training):
        if load:
            manifest = checkpointer.restore(training, lambda _: None)
            assert manifest is not None
            training.loaded(manifest.state["updates"])
        losses = [_loss(run, step) for step in steps]
        if save:
            checkpointer.save(Snapshot(steps.stop, training.tensors, {"updates": training.updates}))
    return losses, full_weights(run.model)


def _loss(run: Any, step: int) -> float:
    loss = run.train_step(step, own_part(random_batches(step, sequences=2), run.mesh)).loss
    assert loss is not None
    return float(loss)
