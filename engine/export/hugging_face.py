"""Exports a checkpoint to a folder for transformers: safetensors, config.json, tokenizer. NumPy, no torch.

One weight is in memory at a time, so models far larger than this machine's memory can be written; the library
safetensors would need all weights of a file. The folder is renamed to its name when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open

from engine.config.settings import ModelConfig, RunConfig
from engine.data.chat import ChatTemplate
from engine.data.tokenizers import FileTokenizer, load_tokenizer_file
from engine.export.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config, adapter_name
from engine.pretrained.folder import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    MORE_TEMPLATES_FOLDER,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    ModelFolder,
    open_model_folder,
    open_tokenizer,
    token_ids,
)
from engine.pretrained.names import INDEX_FILE, SINGLE_FILE, hugging_face_name
from engine.pretrained.shape import config_json, config_json_from, hub_config_json, pretrained_of, yarn_warning
from engine.runs.checkpoints import CheckpointError, Manifest, TensorFacts
from engine.runs.files import json_text, new_folder

ExportDtype = Literal["bfloat16", "float32"]
Wide = np.ndarray[Any, np.dtype[np.float32]]
BYTES_OF: Mapping[ExportDtype, int] = {"float32": 4, "bfloat16": 2}
_FILE_DTYPES: Mapping[ExportDtype, str] = {"float32": "F32", "bfloat16": "BF16"}
_LEGAL = ("license", "licence", "notice", "use_policy")  # beginnings of names
_PREFIX = "model."


@dataclass(frozen=True)
class ExportOrder:
    """What to export: the checkpoint of a run of `config` to `folder`, in files of at most `file_bytes`.

    base: the model folder that training started from, whose other settings are copied.
    tokenizer: a folder with a tokenizer, or a tokenizer.json with files beside it; over files of the same name in base.
    chat: the template that rendered the run's conversations, if there were any.
    """

    checkpoint: Path
    config: RunConfig
    folder: Path
    dtype: ExportDtype = "bfloat16"
    file_bytes: int = 5 << 30
    base: Path | None = None
    tokenizer: Path | None = None
    chat: ChatTemplate | None = None

    @property
    def single_file(self) -> str:
        """Name of the file of weights where there is one."""
        return SINGLE_FILE if self.config.model.lora.rank is None else ADAPTER_FILE


@dataclass(frozen=True)
class Exported:
    """What was written. warnings: differences between transformers and the run."""

    step: int
    files: int
    bytes: int
    warnings: tuple[str, ...]


def export(order: ExportOrder, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> Exported:
    """Write the export; `progress` gets the bytes of weights read. manifest: of the verified checkpoint.

    Raises CheckpointError when the folder exists or cannot be written, ConfigError when no family of transformers has
    this shape, DataError when the tokenizer cannot be read.
    """
    check_new(order.folder)
    base = None if order.base is None else open_model_folder(order.base)
    tokenizer = None if order.tokenizer is None else load_tokenizer_file(order.tokenizer)
    if order.config.model.lora.rank is not None:
        return _export_adapters(order, manifest, tokenizer, progress)
    document, warnings = _config_json(order, base)
    if order.config.model.hf_config is None and (warning := yarn_warning(document)):
        warnings += (warning,)
    try:
        with new_folder(order.folder) as part:
            _copy_files(order, base, part)
            is_ours = base is None and order.config.model.hf_config is None
            generation = _ends_of_new(document, tokenizer) if is_ours else _set_ends(document, base, tokenizer)
            _write_json(part / CONFIG_FILE, document, None if base is None else base.config)
            if generation is not None:
                original = None if base is None else base.generation_config
                _write_json(part / GENERATION_CONFIG_FILE, generation, original)
            if tokenizer is not None:
                _complete_tokenizer(order, tokenizer, part)
            files, size = _write_weights(order, manifest, part, progress)
    except OSError as error:
        raise CheckpointError(f"cannot write {order.folder}: {error.strerror or error}") from error
    return Exported(manifest.step, files, size, warnings)


def _export_adapters(
    order: ExportOrder, manifest: Manifest, tokenizer: FileTokenizer | None, progress: Callable[[int], None]
) -> Exported:
    """Write adapters alone, as peft reads them, with the tokenizer."""
    try:
        with new_folder(order.folder) as part:
            if order.base is not None:
                _copy(order.base, TOKENIZER_FILES, part)
            _copy_files(order, None, part)
            if tokenizer is not None:
                _complete_tokenizer(order, tokenizer, part)
            (part / ADAPTER_CONFIG_FILE).write_text(json_text(adapter_config(order.config.model)))
            files, size = _write_weights(order, manifest, part, progress)
    except OSError as error:
        raise CheckpointError(f"cannot write {order.folder}: {error.strerror or error}") from error
    warnings = _mask_warnings(order.config)
    if order.config.model.init_from is None:
        warnings += ("model.init_from: null: the adapters belong to random weights, which are not exported",)
    return Exported(manifest.step, files, size, warnings)


def _config_json(order: ExportOrder, base: ModelFolder | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return config.json, and warnings about settings that transformers cannot express."""
    model, seq_len = order.config.model, order.config.train.seq_len
    if model.hf_config is not None:
        return hub_config_json(model.hf_config, seq_len=seq_len, dtype=order.dtype), _mask_warnings(order.config)
    window, warnings = _window(order.config, base)
    facts: dict[str, Any] = {"seq_len": seq_len, "window_tokens": window, "dtype": order.dtype}
    if base is None:
        return config_json(model, **facts), warnings
    return config_json_from(base, model, **facts), warnings


def _mask_warnings(config: RunConfig) -> tuple[str, ...]:
    """Return a warning where the masks of a run are not those of the config.json that it trained."""
    assert config.model.hf_config is not None
    kinds = {*config.attention.mask_layers} or {config.attention.mask}
    windows = {"window"} if config.model.hf_config.get("sliding_window") else set()
    others = kinds - {"causal", "no_attention"} - windows
    return (_no_name(others),) if others else ()


def _no_name(kinds: Iterable[str]) -> str:
    return (
        f"attention.mask={'/'.join(sorted(kinds))} has no name in transformers: the exported model looks at all tokens "
        "before each"
    )


def _copy_files(order: ExportOrder, base: ModelFolder | None, part: Path) -> None:
    """Copy the files that training does not change; those of order.tokenizer override those of base.

    README.md is not copied, since it describes another model; neither are weights in other formats and Python files.
    """
    if base is not None:
        legal = [path.name for path in base.path.iterdir() if path.name.lower().startswith(_LEGAL) and path.is_file()]
        _copy(base.path, (CONFIG_FILE, GENERATION_CONFIG_FILE, *TOKENIZER_FILES, *legal), part)
    if order.tokenizer is not None:
        files = open_tokenizer(order.tokenizer)
        _copy(files.folder, TOKENIZER_FILES, part)
        if files.file.is_file():
            shutil.copyfile(files.file, part / TOKENIZER_FILE)


def _copy(source: Path, names: Sequence[str], part: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
    if (source / MORE_TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / MORE_TEMPLATES_FOLDER, part / MORE_TEMPLATES_FOLDER, dirs_exist_ok=True)


def _write_json(path: Path, document: Mapping[str, Any], original: Mapping[str, Any] | None) -> None:
    """Write `document` unless the copied file is equal already."""
    if original is None or document != original or not path.is_file():
        path.write_text(json_text(document))


def _ends_of_new(document: dict[str, Any], tokenizer: FileTokenizer | None) -> dict[str, Any] | None:
    """Set in config.json of a new model what begins and ends a text; the generation_config.json, None for none."""
    # Without these keys transformers uses the ids of the first Llama, which are ordinary text in other vocabularies.
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        ids = {"bos_token_id": tokenizer.named_id("bos_token"), "eos_token_id": tokenizer.eod_id}
    document |= ids
    return ids if tokenizer is not None else None


def _set_ends(
    document: dict[str, Any], base: ModelFolder | None, tokenizer: FileTokenizer | None
) -> dict[str, Any] | None:
    """Set bos and eos ids in config.json; return the generation_config.json to write, None for none.

    Ids stated by config.json and a base folder are kept unchanged; the id that ends documents in training is added if
    no file names it.
    """
    generation = {} if base is None else dict(base.generation_config)
    stated = [index for source in (document, generation) for index in token_ids(source.get("eos_token_id"))]
    if tokenizer is not None and tokenizer.eod_id not in stated:
        for target in (document, generation):
            known = token_ids(target.get("eos_token_id"))
            if known or target is document:
                target["eos_token_id"] = [*known, tokenizer.eod_id] if known else tokenizer.eod_id
    return generation or None


def _complete_tokenizer(order: ExportOrder, tokenizer: FileTokenizer, part: Path) -> None:
    """Add bos and eos tokens to tokenizer_config.json if no file names them; write the chat template of the run."""
    written, named = open_tokenizer(part), tokenizer.named_tokens()
    missing: dict[str, str] = {
        name: named[name]
        for name in ("bos_token", "eos_token")
        if name in named and name not in {**written.settings, **written.special_tokens}
    }
    if missing or not (part / TOKENIZER_CONFIG_FILE).is_file():
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **missing, **written.settings}
        if order.chat is not None:
            settings = {**order.chat.special_tokens, **settings}
        (part / TOKENIZER_CONFIG_FILE).write_text(json_text(settings))
    default = written.chat_templates.get("default")
    if order.chat is not None and (default is None or default.text != order.chat.source):
        (part / TEMPLATE_FILE).write_text(order.chat.source, encoding="utf-8")


def check_new(folder: Path) -> None:
    """Raise CheckpointError if `folder` exists."""
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder} exists; export writes a new folder")


def weight_bytes(manifest: Manifest) -> int:
    """Return the bytes of weights in a checkpoint, which `export` reads."""
    return sum(4 * math.prod(facts.shape) for name, facts in manifest.tensors.items() if name.startswith(_PREFIX))


def _window(config: RunConfig, base: ModelFolder | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the attention window (None: causal), and warnings about settings that transformers cannot express."""
    attention = config.attention
    kinds = {*attention.mask_layers} or {attention.mask}
    if kinds == {"causal"}:
        before = None if base is None else pretrained_of(base).window_tokens
        # Sequences within the window of the base do not change it.
        return (before if before is not None and config.train.seq_len <= before else None), ()
    if kinds == {"window"}:
        return attention.window_tokens, ()
    return None, (_no_name(kinds),)


def _write_weights(
    order: ExportOrder, manifest: Manifest, folder: Path, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Write the weights; return the numbers of files and bytes."""
    weights = {name: facts for name, facts in manifest.tensors.items() if name.startswith(_PREFIX)}
    groups = list(_grouped(weights, order))
    total = sum(math.prod(facts.shape) for facts in weights.values()) * BYTES_OF[order.dtype]
    places: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = order.single_file if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        outer = {name: _outer_name(name.removeprefix(_PREFIX), order.config.model) for name in names}
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


def _outer_name(name: str, model: ModelConfig) -> str:
    """Return the name of a parameter in transformers."""
    if model.lora.rank is not None:
        return adapter_name(name)
    return name if model.implementation == "hf" else hugging_face_name(name)


def _grouped(weights: Mapping[str, TensorFacts], order: ExportOrder) -> Iterator[Sequence[str]]:
    """Yield names by file, in order of the model; a weight larger than a file gets its own."""
    names: list[str] = []
    held = 0
    for name, facts in weights.items():
        size = math.prod(facts.shape) * BYTES_OF[order.dtype]
        if names and held + size > order.file_bytes and order.single_file == SINGLE_FILE:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _assembled(folder: Path, name: str, facts: TensorFacts) -> Wide:
    """Assemble a weight from its chunks."""
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
    """Return the header of a safetensors file: the length of a JSON object, and the object with all offsets."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * BYTES_OF[dtype]
        table[name] = {"dtype": _FILE_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bfloat16_bits(wide: Wide) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the upper halves of fp32 numbers, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)
