"""A folder of Hugging Face as settings: model, windows, tokenizer; for `burst model` and `--from FOLDER`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.config.errors import ConfigError, DataError, RunError
from engine.config.schema import hash_json, to_plain
from engine.config.settings import Implementation, ModelConfig
from engine.data.chat import folder_template
from engine.data.tokenizers import tokenizer_of
from engine.predict.flops import count_parameters
from engine.pretrained.decoder_shape import Pretrained, mask_settings
from engine.pretrained.folder import TokenizerFiles, open_model_folder
from engine.pretrained.hub import default_implementation, read_model
from engine.pretrained.names import INDEX_FILE, SINGLE_FILE, weight_files
from engine.pretrained.resolve import version_note
from engine.runs.files import cache_folder, replace_file

_SHOWN = ("name", "vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_NOTABLE = 0.01  # share of the parameters by which a count may be off before it is said


@dataclass(frozen=True)
class ModelSource:
    """What a folder says of a run. is_default: whether its implementation is the one without a choice."""

    folder: Path
    pretrained: Pretrained
    tokenizer: TokenizerFiles | None
    has_weights: bool
    is_default: bool

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the section model that are not the default; weights where there are some."""
        plain, default = to_plain(self.pretrained.model), to_plain(ModelConfig())
        shown = {name: plain[name] for name in plain if name in _SHOWN or plain[name] != default[name]}
        if "hf_config" in shown:  # long, so last
            shown["hf_config"] = shown.pop("hf_config")
        return {**shown, **({"init_from": str(self.folder)} if self.has_weights else {})}

    @property
    def option(self) -> str:
        """The file of the group model that is this model, with windows of its layers."""
        values, header = self.settings, f"# {self.folder}\n"
        if self.pretrained.mask_layers != ("causal",):
            masks = {"mask_layers": list(self.pretrained.mask_layers), "window_tokens": self.pretrained.window_tokens}
            values, header = {"model": values, "attention": masks}, f"# @package _global_\n{header}"
        return header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    @property
    def warnings(self) -> list[str]:
        """What a launch of this model should say."""
        model, found = self.pretrained.model, []
        if model.implementation == "hf" and self.is_default:
            assert model.hf_config is not None
            family = model.hf_config.get("model_type")
            found.append(
                f"this engine has no decoder of model_type={family}, so transformers' own code computes it "
                "(model.implementation=hf): every node needs transformers"
            )
        counted, held = count_parameters(model).total, self.pretrained.num_parameters
        if held is not None and abs(counted - held) > _NOTABLE * held:
            found.append(
                f"its family is not of a known pattern: predictions of time count {counted:,} parameters of {held:,}"
            )
        return found

    @property
    def notes(self) -> list[str]:
        """What `burst model` says beside the settings."""
        found, pretrained, folder = self.warnings, self.pretrained, self.folder
        found.append(
            "it has no tokenizer, so data.tokenizer is not compared with it"
            if self.tokenizer is None
            else f"its tokenizer: data.tokenizer={folder}"
        )
        if self.tokenizer is not None and (note := version_note(self.tokenizer)) is not None:
            found.append(note)
        if pretrained.mask_layers == ("window",):
            found.append(f"its window: attention.mask=window attention.window_tokens={pretrained.window_tokens}")
        elif pretrained.mask_layers != ("causal",):
            found.append(f"masks of its layers: {mask_settings(pretrained.mask_layers, pretrained.window_tokens)}")
        if pretrained.model.implementation == "hf":
            length = f"{pretrained.seq_len:,} tokens"
            found.append(f"trained on {length}; for longer sequences change rope_parameters in a copy of config.json")
        else:
            found.append(
                f"trained on {pretrained.seq_len:,} tokens; for longer sequences stretch RoPE, as with "
                f"model.rope_scaling.kind=yarn model.rope_scaling.factor=4 "
                f"model.rope_scaling.original_seq_len={pretrained.seq_len}"
            )
        if not self.has_weights:
            found.append(
                f"no weights to begin with: {folder} has no {SINGLE_FILE} or {INDEX_FILE} (pickled weights are not "
                "read), so a run would start from random ones"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The document of `burst model --json`."""
        return {
            "folder": str(self.folder),
            "model": self.settings,
            "mask_layers": list(self.pretrained.mask_layers),
            "window_tokens": self.pretrained.window_tokens,
            "seq_len": self.pretrained.seq_len,
            "notes": self.notes,
        }


def open_source(folder: Path, implementation: Implementation | None = None) -> ModelSource:
    """Read a folder; the weights are looked for, not read.

    Raises ConfigError when it holds no model that this implementation has (None: the engine's, else transformers'), or
    weights, a tokenizer or a chat template that cannot be read.
    """
    folder = folder.expanduser().absolute()
    opened = open_model_folder(folder)
    pretrained = read_model(opened, implementation)
    _check_tokenizer(opened.tokenizer, folder)
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    if has_weights:
        weight_files(folder)
    is_default = pretrained.model.implementation == default_implementation(opened)
    return ModelSource(folder, pretrained, opened.tokenizer, has_weights, is_default)


def _check_tokenizer(files: TokenizerFiles | None, folder: Path) -> None:
    """Raise ConfigError for a tokenizer.json that cannot be loaded, or a chat template that is not valid Jinja."""
    if files is None:
        return
    try:
        if files.file.is_file():  # others are converted by transformers, which need not be installed here
            tokenizer_of(files, str(folder))
        if (template := folder_template(files)) is not None:
            template.check_syntax()
    except DataError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True)
class Words:
    """What a configuration is composed from; notes: what to say of the folder that some of it is taken from."""

    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...]
    notes: tuple[str, ...]


def words_from(folder: Path, overrides: Sequence[str], config_dirs: Sequence[Path]) -> Words:
    """Return `overrides` behind those that take everything from `folder`, and `config_dirs` with the file of its model.

    The model becomes an option of the group model in the cache of this user: its config.json is more than a command
    line holds.

    Raises:
        ConfigError: The folder holds no model that can be trained, or the overrides choose one, too.
        RunError: The file cannot be written.
    """
    keys = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in overrides}
    if "model" in keys:
        raise ConfigError(f"--from {folder} and model={keys['model']} both choose the model; leave one of them out")
    source = open_source(folder, _implementation(keys.get("model.implementation")))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", source.pretrained.model.name).lstrip(".") or "model"
    files = cache_folder() / "models" / hash_json(source.option)[:32]
    place = files / "model" / f"{name}.yaml"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, source.option)
    except OSError as error:
        raise RunError(f"cannot write {place}: {error.strerror or error}") from error
    words = [f"model='{name}'"]
    if source.tokenizer is not None and "data.tokenizer" not in keys:
        quoted = str(source.folder).replace("\\", "\\\\").replace("'", "\\'")
        words.append(f"data.tokenizer='{quoted}'")
    return Words((*words, *overrides), (*config_dirs, files), tuple(source.warnings))


def _implementation(text: str | None) -> Implementation | None:
    """Return the implementation that an override names; None: none, or none that there is, which composing refuses."""
    return text if text in ("burst", "hf") else None  # type: ignore[return-value]
