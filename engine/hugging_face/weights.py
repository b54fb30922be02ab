"""Loads the weights of a Hugging Face folder into a decoder of transformers; every rank keeps the slices that it holds.

A weight that the folder has under its own name is read slice by slice. Where transformers fuses weights of the folder,
such as those of experts, its own conversion is used, one parameter at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.config.errors import ConfigError
from engine.hugging_face.adapters import base_name, is_adapter
from engine.model.decoder import persistent_buffers
from engine.model.init import local_block
from engine.pretrained.decoder_shape import document_differences
from engine.pretrained.folder import open_model_folder
from engine.pretrained.names import weight_files

_SHOWN = 4
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})  # of others the values alone are not the weights


@torch.no_grad()
def load_weights(decoder: nn.Module, model: Any, folder: Path) -> frozenset[str]:
    """Load every parameter and persistent buffer of `decoder` but its adapters, and return their names.

    They are filled in place; parameters may have any sharding.

    Args:
        decoder: Its tensors have transformers' names.
        model: The transformers model that it was made from, which knows how names are converted.
        folder: Of a Hugging Face model.

    Raises:
        ConfigError: Weights are missing, left over or of another shape, or a file cannot be read.
    """
    _check_config(model.config, folder)
    named = {name: tensor for name, tensor in saved_tensors(decoder).items() if not is_adapter(name)}
    targets = {base_name(name): tensor for name, tensor in named.items()}
    files = weight_files(folder)
    sources, converters = _sources(model, files, targets)
    missing = sorted(targets.keys() - sources.keys())
    left = sorted(name for names in (sources[key] for key in sources.keys() - targets.keys()) for name in names)
    if missing or left:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:_SHOWN])}"
            for names, what in ((missing, "missing"), (left, "not known here"))
            if names
        ]
        raise ConfigError(f"model.init_from={folder} holds other weights than model.hf_config has; {'; '.join(parts)}")
    reader = _Reader(files)
    for name, target in targets.items():
        if name in converters:
            whole = _converted(name, sources[name], converters[name], reader, model)
            _check_shape(name, whole.shape, target, folder)
            local, starts = local_block(target)
            local.copy_(whole[_box(starts, local)])
        else:
            reader.read(sources[name][0], target)
    return frozenset(named)


def _check_config(ours: Any, folder: Path) -> None:
    """Raise ConfigError if the folder's config.json, completed by transformers, describes another model than `ours`.

    Both are complete, so a key that was removed or misspelt in model.hf_config, and so has its default, shows too.
    """
    stated = {key: value for key, value in open_model_folder(folder).config.items() if key != "model_type"}
    theirs = type(ours)(**stated).to_dict()
    here = ours.to_dict()
    names = here.keys() | theirs.keys()
    if found := document_differences({name: here.get(name) for name in names}, {n: theirs.get(n) for n in names}):
        raise ConfigError(
            f"model.init_from={folder} holds another model than model.hf_config: {'; '.join(sorted(found))}"
        )


def saved_tensors(decoder: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tied weight once."""
    return {**dict(decoder.named_parameters()), **persistent_buffers(decoder)}


def _sources(
    model: Any, files: dict[str, Path], targets: dict[str, Tensor]
) -> tuple[dict[str, list[str]], dict[str, tuple[Any, dict[str, str]]]]:
    """Return the names in the folder of every parameter, and the conversion of those that have one.

    A conversion is transformers' converter, with the pattern that matched every name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    sources: dict[str, list[str]] = defaultdict(list)
    conversions: dict[str, tuple[Any, dict[str, str]]] = {}
    meta = dict.fromkeys(targets, True)
    for name in sorted(files, key=_natural):
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        if pattern is not None and name not in targets:
            converter = next(each for each in converters if pattern in each.source_patterns)
            conversions.setdefault(key, (converter, {}))[1][name] = pattern
        else:
            key = name if name in targets else key
        sources[key].append(name)
    return {key: names for key, names in sources.items() if not _is_left_out(model, key, targets)}, conversions


def _is_left_out(model: Any, key: str, targets: dict[str, Tensor]) -> bool:
    """Whether transformers leaves a weight of the folder out: tied ones, and those that its class says to ignore."""
    if key in targets:
        return False
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return key in (model._tied_weights_keys or {}) or any(re.search(each, key) for each in ignored)


def _converted(
    name: str, names: list[str], conversion: tuple[Any, dict[str, str]], reader: _Reader, model: Any
) -> Tensor:
    """Return a parameter made of weights of the folder by transformers' converter."""
    original, patterns = conversion
    converter = original.copy(
        original._original_source_patterns, original._original_target_patterns, operations=original.operations
    )
    for source in names:
        converter.add_tensor(name, source, patterns[source], lambda source=source: reader.whole(source))
    try:
        found = converter.convert(name, model=model, config=model.config)
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers' operations raise for tensors that do not fit together
        shown = ", ".join(names[:_SHOWN])
        raise ConfigError(
            f"{name} cannot be made of {len(names)} weights of the folder ({shown}, ...): {error}; one of them is "
            "missing, left over or of another shape"
        ) from error
    value = found[name]
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


class _Reader:
    """Reads tensors of safetensors files by name."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def whole(self, name: str) -> Tensor:
        """Return a tensor."""
        with self._open(name) as file:
            self._check_dtype(name, file)
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def read(self, name: str, target: Tensor) -> None:
        """Copy this rank's slice of a tensor into `target`."""
        with self._open(name) as file:
            self._check_dtype(name, file)
            part = file.get_slice(name)
            _check_shape(name, torch.Size(part.get_shape()), target, self._files[name])
            local, starts = local_block(target)
            local.copy_(part[_box(starts, local)] if target.dim() else file.get_tensor(name))

    def _check_dtype(self, name: str, file: Any) -> None:
        if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
            raise ConfigError(
                f"{self._files[name]}: {name} has dtype {dtype}, expected one of {', '.join(sorted(_DTYPES))}; weights "
                "that are quantized must be saved in 16 bits first"
            )

    def _open(self, name: str) -> Any:
        path = self._files[name]
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error


def _box(starts: Any, local: Tensor) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(starts, local.shape, strict=True))


def _check_shape(name: str, shape: torch.Size, target: Tensor, path: Path) -> None:
    if tuple(shape) != tuple(target.shape):
        raise ConfigError(f"{path}: {name} has shape {list(shape)}, expected {list(target.shape)}")


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key by which expert 10 comes after expert 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
