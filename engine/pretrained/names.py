"""Names of parameters here and in transformers, and the files that hold them. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from engine.config.errors import ConfigError
from engine.runs.records import require_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OUTER = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
_TABLE = re.compile(r".*\.rotary_emb\.inv_freq")  # buffers that old exports hold; they are computed


def hugging_face_name(name: str) -> str:
    """The name in transformers of a parameter of `engine.model.llama.LlamaModel`."""
    return _OUTER.get(name, f"model.{name}")


def weight_files(folder: Path) -> dict[str, Path] | Path:
    """The file of every weight by its name there, or the one file of all. Raises ConfigError when there is none."""
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / SINGLE_FILE).is_file():
            return folder / SINGLE_FILE
        raise ConfigError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; pickled weights are not read")
    table = require_json_object(index, "the file of each weight", ConfigError).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise ConfigError(f"{index} cannot be read: weight_map is no table of file names")
    found = {name: folder / Path(file).name for name, file in table.items()}
    held = {path.name for path in folder.iterdir() if path.is_file()}
    if missing := sorted({path.name for path in found.values()} - held):
        raise ConfigError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more that its index names")
    return found


def check_names(there: Iterable[str], here: Iterable[str], folder: Path) -> None:
    """Raises ConfigError when the folder lacks one of the weights `here`, or holds one that nothing would read.

    Names are those of transformers. A head beside tied embeddings is a copy of them and may lie there.
    """
    held, wanted = set(there), set(here)
    if missing := sorted(wanted - held):
        raise ConfigError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more weights of this model")
    left = sorted(name for name in held - wanted if not _TABLE.fullmatch(name) and name != "lm_head.weight")
    if left:
        raise ConfigError(f"{folder} holds {left[0]} and {len(left) - 1} more weights that this model does not have")
