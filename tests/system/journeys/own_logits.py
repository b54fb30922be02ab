"""What a model says in the trainer, on one rank; apart from transformers, which takes seconds to import."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from testkit.tiny_training import start_run, whole

from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.state import weight_tensors
from engine.config.settings import AttentionConfig, CheckpointConfig, ParallelConfig, load_config
from engine.parallel.shard import shard_batch


def own_logits(config_file: str, checkpoints: str, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [1, T, V] of the newest checkpoint in a folder, on these token ids [1, T]."""
    config = load_config(Path(config_file))
    train = replace(config.train, seq_len=tokens.shape[1])
    masks = {"mask_layers": config.attention.mask_layers, "window_tokens": config.attention.window_tokens}
    single = AttentionConfig(preset="single", **masks)
    run = start_run(replace(config, parallel=ParallelConfig(), attention=single, train=train))
    checkpointer = Checkpointer(CheckpointConfig(resume_from=checkpoints), Path(checkpoints), {})
    checkpointer.restore_from(Path(checkpoints), weight_tensors(run.model), lambda manifest: None)
    checkpointer.close()
    batch = tokens.numpy()
    local = shard_batch(batch, batch, layout=run.attention.layout, cp_rank=0, device=run.mesh.device)
    with torch.no_grad():
        functions = run.attention.run_context().functions(config.model.num_layers)
        return F.linear(run.model(local.tokens, local.positions, functions), whole(run.model.head.weight))
