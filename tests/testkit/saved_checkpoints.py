"""Checkpoints without a training: committed folders with a few numbers, or bytes that nobody reads as numbers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from engine.config.settings import CheckpointConfig, ModelConfig
from engine.data.tokenizers import train_bpe
from engine.pretrained.shape import config_json
from engine.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    Chunk,
    Manifest,
    TensorFacts,
    commit,
    file_facts,
    list_checkpoints,
    new_folder,
    open_checkpoint,
    verify_files,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine.checkpoint.checkpointer import Checkpointer
    from engine.checkpoint.state import TrainingTensors
    from testkit.tiny_training import TinyRun

FILE = "rank00000.safetensors"
MODEL = ModelConfig(name="mine", hidden_size=4, vocab_size=6, num_layers=1, qkv_bias=True)
WEIGHTS = {"model.embedding.weight": np.arange(24, dtype=np.float32).reshape(6, 4)}


@contextmanager
def checkpointing(
    run: TinyRun, root: Path | str, tell: Callable[[str], object] = lambda _: None, **how: Any
) -> Iterator[tuple[Checkpointer, TrainingTensors]]:
    """The checkpoints of a run, and what they hold of it; `how` is a setting or an argument of Checkpointer."""
    from engine.checkpoint.checkpointer import Checkpointer
    from engine.checkpoint.state import training_tensors

    advance = how.pop("advance", lambda: None)
    settings = CheckpointConfig(**({"every_steps": 1} | how))
    checkpointer = Checkpointer(settings, Path(root), {}, tell, advance)
    try:
        yield checkpointer, training_tensors(run.model, run.train_step.optimizer)
    finally:
        checkpointer.close()


def take_all(manifest: Manifest) -> None:
    """What is asked before a checkpoint is read: nothing."""


def save_checkpoint(
    root: Path, step: int, content: bytes | Mapping[str, np.ndarray] = b"x" * 1000, **state: Any
) -> Path:
    """The folder of a committed checkpoint of one rank: of fp32 tensors by name, or of one tensor that is no tensor."""
    folder = new_folder(root, step, os.urandom(4).hex())
    if isinstance(content, bytes):
        (folder / FILE).write_bytes(content)
        shapes: dict[str, tuple[int, ...]] = {"w": (len(content) // 4,)}
    else:
        save_file(dict(content), folder / FILE)
        shapes = {name: array.shape for name, array in content.items()}
    tensors = {
        name: TensorFacts("float32", shape, (Chunk((0,) * len(shape), shape, FILE, name),))
        for name, shape in shapes.items()
    }
    files = {FILE: file_facts(folder / FILE, "disk")}
    return commit(folder, Manifest(step, "ab", "now", files, tensors, state, {}))


def hugging_face_folder(folder: Path) -> Path:
    """A model of Hugging Face, its weights not needed."""
    folder.mkdir()
    document = config_json(MODEL, seq_len=4096, window_tokens=None, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(document))
    save_file({"lm_head.weight": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    train_bpe(["the quick brown fox"], 270).save(folder)
    return folder


def newest_verified(
    root: Path, on_bad: Callable[[Checkpoint, str], None] = lambda *_: None
) -> tuple[Checkpoint, Manifest] | None:
    """The newest checkpoint under `root` whose every file is as it was written; `on_bad` is told of damaged ones."""
    for checkpoint in list_checkpoints(root):
        try:
            manifest = open_checkpoint(checkpoint)
            verify_files(checkpoint.path, manifest)
        except CheckpointError as error:
            on_bad(checkpoint, str(error))
            continue
        return checkpoint, manifest
    return None


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and whole tensors: the same however they are sharded. All ranks must call."""
    import torch
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
