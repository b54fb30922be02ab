"""Names of parameters here and in transformers, and the files that hold them; without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.config.errors import ConfigError
from engine.runs.files import require_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OUTER = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
_TABLE = re.compile(r".*\.rotary_emb\.inv_freq")  # buffers that old exports hold; they are computed


def hugging_face_name(name: str) -> str:
    """The name in transformers of a parameter of `engine.model.llama.LlamaModel`."""
    return _OUTER.get(name, f"model.{name}")


def weight_files(folder: Path) -> dict[str, Path]:
    """The file of every weight by its name there. Raises ConfigError when there is none, or it cannot be read."""
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
    """Raises ConfigError when the folder lacks one of the weights `here`, or holds one that nothing would read.

    Names are those of transformers. A head beside tied embeddings is a copy of them and may lie there.
    """
    held, wanted = set(there), set(here)
    if missing := sorted(wanted - held):
        raise ConfigError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more weights of this model")
    left = sorted(name for name in held - wanted if not _TABLE.fullmatch(name) and name != "lm_head.weight")
    if left:
        raise ConfigError(f"{folder} holds {left[0]} and {len(left) - 1} more weights that this model does not have")
