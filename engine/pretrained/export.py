"""A checkpoint as a folder that transformers loads: safetensors shards, config.json, tokenizer. NumPy, no torch.

One weight is in memory at a time, so models far larger than this machine's memory can be written: the library
safetensors would want a whole file's. The folder appears under its name when it is whole.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open

from engine.config.settings import RunConfig
from engine.data.chat import TEMPLATE_FILE, ChatTemplate
from engine.data.tokenizers import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, load_tokenizer_file
from engine.pretrained.names import INDEX_FILE, SINGLE_FILE, hugging_face_name
from engine.pretrained.shape import CONFIG_FILE, config_json
from engine.runs.checkpoints import CheckpointError, Manifest, TensorFacts
from engine.runs.files import json_text, new_folder

ExportDtype = Literal["bfloat16", "float32"]
Wide = np.ndarray[Any, np.dtype[np.float32]]
BYTES_OF: Mapping[ExportDtype, int] = {"float32": 4, "bfloat16": 2}
_FILE_DTYPES: Mapping[ExportDtype, str] = {"float32": "F32", "bfloat16": "BF16"}
GENERATION_CONFIG_FILE = "generation_config.json"
_PREFIX = "model."


@dataclass(frozen=True)
class ExportOrder:
    """What to write: the checkpoint in a folder, of a run of `config`, into `folder`, in files of at most `file_bytes`.

    tokenizer: its tokenizer.json; tokenizer_folder: where that came from, with files that say what its tokens are for.
    chat: the template that the run's conversations were rendered by, if it had any.
    """

    checkpoint: Path
    config: RunConfig
    folder: Path
    dtype: ExportDtype = "bfloat16"
    file_bytes: int = 5 << 30
    tokenizer: Path | None = None
    tokenizer_folder: Path | None = None
    chat: ChatTemplate | None = None


@dataclass(frozen=True)
class Exported:
    """What was written. warnings: what transformers will do otherwise than the run did."""

    step: int
    files: int
    bytes: int
    warnings: tuple[str, ...]


def export(order: ExportOrder, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> Exported:
    """Write it; `progress` hears bytes of weights as they are read. manifest: of the checkpoint, which was verified.

    Raises CheckpointError when the folder exists or cannot be written, ConfigError when no family of transformers has
    this shape, DataError when the tokenizer cannot be read.
    """
    check_new(order.folder)
    window, warnings = _window(order.config)
    document = config_json(
        order.config.model, seq_len=order.config.train.seq_len, window_tokens=window, dtype=order.dtype
    )
    # Without the key transformers takes ids of the first Llama, in other vocabularies ordinary text.
    texts: dict[str, str] = {}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if order.tokenizer is not None:
        texts, ids = load_tokenizer_file(order.tokenizer).tokens_for_export(order.tokenizer_folder)
    try:
        with new_folder(order.folder) as part:
            files, size = _write_weights(order, manifest, part, progress)
            (part / CONFIG_FILE).write_text(json_text({**document, **ids}))
            if order.tokenizer is not None:
                shutil.copyfile(order.tokenizer, part / TOKENIZER_FILE)
                texts |= {} if order.chat is None else order.chat.special_tokens
                settings = {"tokenizer_class": "PreTrainedTokenizerFast", **texts}
                (part / TOKENIZER_CONFIG_FILE).write_text(json_text(settings))
                (part / GENERATION_CONFIG_FILE).write_text(json_text(ids))
                if order.chat is not None:
                    (part / TEMPLATE_FILE).write_text(order.chat.source, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {order.folder}: {error.strerror or error}") from error
    return Exported(manifest.step, files, size, warnings)


def check_new(folder: Path) -> None:
    """Raises CheckpointError when there is something at `folder`."""
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder} exists; export writes a new folder")


def weight_bytes(manifest: Manifest) -> int:
    """Bytes of weights in a checkpoint, which `export` reads."""
    return sum(4 * math.prod(facts.shape) for name, facts in manifest.tensors.items() if name.startswith(_PREFIX))


def _window(config: RunConfig) -> tuple[int | None, tuple[str, ...]]:
    """(keys that every token sees, or None for all before it; what transformers cannot do)."""
    attention = config.attention
    kinds = {*attention.mask_layers} or {attention.mask}
    if kinds == {"causal"}:
        return None, ()
    if kinds == {"window"}:
        return attention.window_tokens, ()
    return None, (
        f"attention.mask={'/'.join(sorted(kinds))} has no name in transformers: the exported model looks at all tokens "
        "before each",
    )


def _write_weights(
    order: ExportOrder, manifest: Manifest, folder: Path, progress: Callable[[int], None]
) -> tuple[int, int]:
    """(files, bytes of weights) that were written."""
    weights = {name: facts for name, facts in manifest.tensors.items() if name.startswith(_PREFIX)}
    groups = list(_grouped(weights, order))
    total = sum(math.prod(facts.shape) for facts in weights.values()) * BYTES_OF[order.dtype]
    places: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        outer = {name: hugging_face_name(name.removeprefix(_PREFIX)) for name in names}
        with (folder / file).open("wb") as stream:
            stream.write(_header({outer[name]: weights[name].shape for name in names}, order.dtype))
            for name in names:
                wide = _assembled(order.checkpoint, name, weights[name])
                stream.write((wide if order.dtype == "float32" else bfloat16_bits(wide)).data)
                progress(wide.nbytes)
        places |= dict.fromkeys(outer.values(), file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json_text(index))
    return len(groups), total


def _grouped(weights: Mapping[str, TensorFacts], order: ExportOrder) -> Iterator[Sequence[str]]:
    """Names by file, in order of the model; a weight larger than a file has one for itself."""
    names: list[str] = []
    held = 0
    for name, facts in weights.items():
        size = math.prod(facts.shape) * BYTES_OF[order.dtype]
        if names and held + size > order.file_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _assembled(folder: Path, name: str, facts: TensorFacts) -> Wide:
    """A whole weight from its parts."""
    if facts.dtype != "float32":
        raise CheckpointError(f"{folder}: {name} is {facts.dtype}, expected float32 weights")
    whole: Wide = np.empty(facts.shape, dtype=np.float32)
    for chunk in facts.chunks:
        box = tuple(slice(at, at + length) for at, length in zip(chunk.offsets, chunk.sizes, strict=True))
        try:
            with safe_open(folder / chunk.file, framework="numpy") as file:
                whole[box] = file.get_tensor(chunk.key).reshape(chunk.sizes)
        except OSError as error:
            raise CheckpointError(f"{folder / chunk.file} cannot be read: {error.strerror or error}") from error
    return whole


def _header(shapes: Mapping[str, Sequence[int]], dtype: ExportDtype) -> bytes:
    """How a safetensors file begins: the length of a JSON object, and that, with the place of every tensor after it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * BYTES_OF[dtype]
        table[name] = {"dtype": _FILE_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bfloat16_bits(wide: Wide) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The upper halves of fp32 numbers, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)
