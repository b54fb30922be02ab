"""Completes a config.json with the defaults of its config class, by transformers in a separate process.

Code that a folder brings along (trust_remote_code) is never run.

    python -m engine.pretrained.auto_config FOLDER OUT
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.schema import hash_json
from engine.pretrained.folder import CONFIG_FILE, ModelFolder
from engine.pretrained.transformers_process import TransformersError, ask
from engine.runs.files import replace_json

# Of how transformers runs a model or of other tasks than language models, not of the decoder.
_NOT_OF_MODEL = frozenset(
    {"transformers_version", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "problem_type"}
    | {"output_attentions", "output_hidden_states", "return_dict", "use_cache"}
)


@dataclass(frozen=True)
class AutoConfigFacts:
    """A config with all defaults. num_parameters: of its causal language model, a tied weight once; None: has none."""

    document: Mapping[str, Any]
    num_parameters: int | None


def ask_config(folder: ModelFolder) -> AutoConfigFacts:
    """Load config.json with AutoConfig.from_pretrained. Raises ConfigError where transformers cannot."""
    version = importlib.metadata.version("transformers")
    name = hash_json({"config": folder.config, "transformers": version})[:32]
    try:
        return AutoConfigFacts(**ask("engine.pretrained.auto_config", folder.path, f"configs/{name}.json"))
    except TransformersError as error:
        raise ConfigError(f"{folder.path / CONFIG_FILE}: transformers {version} cannot load it: {error}") from error


def main(folder: str, out: str) -> None:
    """Write `AutoConfigFacts` of `folder` to the file `out`."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a config class raises; the rest of its text is advice for its own users
        sys.exit((str(error).strip().splitlines() or [repr(error)])[0])
    stated = config.to_dict().items()
    document = {key: value for key, value in stated if key not in _NOT_OF_MODEL and not key.startswith("_")}
    replace_json(Path(out), {"document": document, "num_parameters": _num_parameters(config)})


def _num_parameters(config: Any) -> int | None:
    """Count the parameters of the model on the meta device; None if transformers cannot build it."""
    import torch
    import transformers

    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception:  # whatever the code of a model raises; a rank that builds it says why
        return None
    return int(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
