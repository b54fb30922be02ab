"""Maps parameter names to those of transformers and to files. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from engine.config.errors import ConfigError
from engine.runs.files import require_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTER = {"embedding.weight": EMBEDDING, "head.weight": HEAD}
_BLOCK_NUMBERS = 4 << 20
_TABLE = re.compile(r".*\.rotary_emb\.inv_freq")  # computed buffers, which old exports contain


def hugging_face_name(name: str) -> str:
    """Return the name in transformers of a parameter of `engine.model.llama.LlamaModel`."""
    return _OUTER.get(name, f"model.{name}")


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of every weight by its name there. Raises ConfigError if there is none or one is unreadable."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        if not single.is_file():
            raise ConfigError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; pickled weights are not read")
        try:
            with safe_open(single, framework="numpy") as file:
                return dict.fromkeys(file.keys(), single)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{single} cannot be read: {error}") from error
    table = require_json_object(index, "the file of each weight", ConfigError).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise ConfigError(f"{index} cannot be read: weight_map is no table of file names")
    found = {name: folder / Path(file).name for name, file in table.items()}
    held = {path.name for path in folder.iterdir() if path.is_file()}
    if missing := sorted({path.name for path in found.values()} - held):
        raise ConfigError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more that its index names")
    return found


def check_names(there: Iterable[str], here: Iterable[str], folder: Path) -> None:
    """Raise ConfigError if the folder lacks one of the weights `here`, or has one that would not be read.

    Names are those of transformers. A head beside tied embeddings may be there as a copy of them (`check_tied_head`).
    """
    held, wanted = set(there), set(here)
    if missing := sorted(wanted - held):
        raise ConfigError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more weights of this model")
    left = sorted(name for name in held - wanted if not _TABLE.fullmatch(name) and name != HEAD)
    if left:
        raise ConfigError(f"{folder} holds {left[0]} and {len(left) - 1} more weights that this model does not have")


def check_tied_head(files: Mapping[str, Path]) -> None:
    """Raise ConfigError if a model with tied embeddings has a separate head that differs from them.

    transformers 5 then leaves them untied, version 4 drops the head. Read in blocks; files: as of `weight_files`.
    """
    if not {EMBEDDING, HEAD} <= files.keys():
        return
    embedding, head = (_raw_tensor(files[name], name) for name in (EMBEDDING, HEAD))
    is_same = embedding.size == head.size
    for at in range(0, embedding.size if is_same else 0, _BLOCK_NUMBERS):
        ours, theirs = (_as_float32(tensor[at : at + _BLOCK_NUMBERS]) for tensor in (embedding, head))
        if not np.array_equal(ours, theirs, equal_nan=True):
            is_same = False
            break
    if not is_same:
        raise different_head(files[HEAD].parent)


def different_head(folder: Path) -> ConfigError:
    """Return the error for tied embeddings with a different head."""
    return ConfigError(
        f"{folder}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}. In a copy of the folder, set "
        "tie_word_embeddings to false in config.json to have the head, as transformers 5 does, or remove "
        f"{HEAD} to have tied embeddings, as version 4 does."
    )


def _raw_tensor(path: Path, name: str) -> npt.NDArray[Any]:
    """Map the flat elements of a tensor from the file; bfloat16 as uint16. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))[name]
        begin, end = entry["data_offsets"]
        dtype = np.dtype({"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}[entry["dtype"]])
        if begin == end:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="r", offset=8 + size + begin, shape=((end - begin) // dtype.itemsize,))
    except (OSError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{path} cannot be read: {name}: {error!r}") from error


def _as_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if values.dtype == np.uint16:  # the upper halves of fp32 numbers
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
