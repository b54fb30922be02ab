"""Loads the weights of a Hugging Face folder into a model; every rank reads only the slices that it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config.errors import ConfigError
from engine.model.decoder import Decoder
from engine.model.init import local_block
from engine.pretrained.names import EMBEDDING, HEAD, check_names, different_head, hugging_face_name, weight_files
from engine.pretrained.shape import differences, read_pretrained


@torch.no_grad()
def load_weights(model: Decoder, folder: Path) -> None:
    """Load every parameter of `model` in place; parameters may have any sharding.

    Raises:
        ConfigError: The folder holds a model of another shape or other weights (before anything is read), or a file
            cannot be read.
    """
    if different := differences(model.config, read_pretrained(folder).model):
        raise ConfigError(f"model.init_from={folder} holds another model: {'; '.join(different)}")
    model.tie_weights()
    parameters = {hugging_face_name(name): value for name, value in model.named_parameters()}
    files = weight_files(folder)
    check_names(files, parameters, folder)
    if HEAD in files and HEAD not in parameters:
        _check_tied_slices(files, parameters[EMBEDDING])
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in parameters:
        by_file[files[name]].append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    _read(file, name, parameters[name], path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error


def _check_tied_slices(files: Mapping[str, Path], embedding: Tensor) -> None:
    """Raise ConfigError if the folder has a separate head that differs from the tied embedding in this rank's shard."""
    blocks = []
    for name in (EMBEDDING, HEAD):
        block = torch.empty_like(embedding)
        with safe_open(files[name], framework="pt") as file:
            _read(file, name, block, files[name])
        blocks.append(local_block(block)[0])
    if not torch.equal(*blocks):
        raise different_head(files[HEAD].parent)


def _read(file: Any, name: str, parameter: Tensor, path: Path) -> None:
    """Copy this rank's slice of a weight into its parameter."""
    part = file.get_slice(name)
    if tuple(part.get_shape()) != tuple(parameter.shape):
        raise ConfigError(f"{path}: {name} has shape {part.get_shape()}, expected {list(parameter.shape)}")
    local, starts = local_block(parameter)
    local.copy_(part[tuple(slice(at, at + length) for at, length in zip(starts, local.shape, strict=True))])
