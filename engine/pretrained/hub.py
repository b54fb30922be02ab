"""A folder of Hugging Face as a model to train: by the decoder of this engine where it has the family, else by
transformers' own code.
"""

from __future__ import annotations

from dataclasses import replace

from engine.config.errors import ConfigError
from engine.config.settings import Implementation
from engine.pretrained.auto_config import ask_config
from engine.pretrained.decoder_shape import Pretrained, read_decoder
from engine.pretrained.folder import CONFIG_FILE, ModelFolder
from engine.pretrained.shape import CONFIG_DEFAULTS, pretrained_of
from engine.pretrained.transformers_process import has_transformers


def read_model(folder: ModelFolder, implementation: Implementation | None = None) -> Pretrained:
    """Return the model of a folder as `implementation` computes it; None: as `default_implementation` does.

    For `hf` transformers is asked for what config.json leaves out, where it is installed.

    Raises:
        ConfigError: config.json is damaged, or describes a model that this implementation does not have.
    """
    implementation = implementation or default_implementation(folder)
    if implementation == "burst":
        return pretrained_of(folder)
    name, file = folder.path.resolve().name, folder.path / CONFIG_FILE
    try:
        if not has_transformers() or "text_config" in folder.config:
            return read_decoder(folder.config, name, is_complete=False)
        facts = ask_config(folder)
        return replace(read_decoder(facts.document, name, is_complete=True), num_parameters=facts.num_parameters)
    except ConfigError as error:
        raise ConfigError([f"{file}: {problem.removeprefix(f'{file}: ')}" for problem in error.problems]) from error


def default_implementation(folder: ModelFolder) -> Implementation:
    """Return who computes a model: this engine's decoder, where it has its family."""
    return "burst" if folder.config.get("model_type") in CONFIG_DEFAULTS else "hf"
