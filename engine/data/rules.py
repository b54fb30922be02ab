"""Rules about files that a configuration names; files of this machine are checked before anything starts."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.errors import ConfigError, DataError
from engine.config.settings import DataConfig, RunConfig

if TYPE_CHECKING:
    from engine.pretrained.folder import ModelFolder


def file_rules(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per violated rule; none if ranks run on other machines, which a launch checks."""
    if config.cluster.runs_elsewhere:
        return
    yield from _files(config.data)
    if config.model.init_from is not None:
        yield from _first_weights(config, Path(config.model.init_from).expanduser())


def _files(data: DataConfig) -> Iterator[str]:
    """Check the files of this machine; a launch checks those of other machines."""
    looked = f"(looked from {Path.cwd()})"
    for entry in data.paths:
        if not _names_something(entry):
            yield f"data.paths: no such file or folder: {entry!r} {looked}; give paths that exist"
    for entry in data.mix_paths:
        if not Path(entry).expanduser().is_dir():
            yield f"data.mix_paths: no such folder: {entry!r} {looked}; give folders that `burst data prepare` made"
    if data.tokenizer_path is not None and not _is_tokenizer(data.tokenizer_path):
        yield (
            f"data.tokenizer: got {data.tokenizer!r}, expected bytes, bpe or the path of a tokenizer.json that exists, "
            f"or of a folder with one {looked}"
        )
    template = data.chat_template
    if data.messages_field and template not in (None, "chatml") and not Path(template).expanduser().is_file():
        yield (
            f"data.chat_template: got {template!r}, expected null, chatml or the path of a .jinja file that exists "
            f"{looked}"
        )
    if data.prepared_dir is not None and Path(data.prepared_dir).expanduser().is_file():
        yield f"data.prepared_dir: {data.prepared_dir!r} is a file; give a folder, which need not exist"


def _names_something(entry: str) -> bool:
    """Return whether `entry` names a file, a folder, or a glob with at least one match."""
    path = Path(entry).expanduser()
    if not entry or path.exists() or not any(character in entry for character in "*?["):
        return bool(entry) and path.exists()
    return bool(glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)


def _is_tokenizer(path: Path) -> bool:
    from engine.pretrained.folder import find_tokenizer

    try:
        return path.is_file() or (path.is_dir() and find_tokenizer(path) is not None)
    except DataError:  # a damaged file next to it, which its reader reports
        return True


def _first_weights(config: RunConfig, folder: Path) -> Iterator[str]:
    # Imported only if weights are named, since these modules import numpy.
    from engine.data.agreement import tokenizer_problem
    from engine.pretrained.folder import open_model_folder
    from engine.pretrained.names import check_tied_head, weight_files

    try:
        opened = open_model_folder(folder)
        problems = list(_other_model(config, opened))
        if config.model.tie_embeddings:
            check_tied_head(weight_files(folder))
        if problem := tokenizer_problem(config):
            yield problem
    except (ConfigError, DataError) as error:
        yield f"model.init_from: {error}"
        return
    yield from problems


def model_problems(config: RunConfig, document: Mapping[str, Any], *, has_tokenizer: bool) -> Iterator[str]:
    """Yield contradictions between this run and the folder model.init_from of another machine.

    Ranks compare its weights and the ids of its tokenizer.

    Args:
        config: Configuration of the run, which names a folder.
        document: config.json of the folder.
        has_tokenizer: Whether the folder has files of a tokenizer.
    """
    from engine.data.agreement import bytes_problem
    from engine.pretrained.folder import ModelFolder

    folder = Path(str(config.model.init_from))
    if has_tokenizer and (problem := bytes_problem(config, folder)):
        yield problem
    try:
        yield from list(_other_model(config, ModelFolder(folder, document, {}, None)))
    except ConfigError as error:
        yield f"model.init_from: {error}"


def _other_model(config: RunConfig, opened: ModelFolder) -> Iterator[str]:
    """Yield in what the model of a folder is not that of the run. Raises ConfigError for one that cannot be read."""
    from engine.pretrained.decoder_shape import document_differences, quantized_text
    from engine.pretrained.shape import differences, pretrained_of

    folder = opened.path
    if config.model.implementation == "hf":
        if opened.config.get("quantization_config"):
            yield f"model.init_from={folder}: {quantized_text(opened.config)}"
        if found := document_differences(config.model.hf_config or {}, opened.config):
            yield (
                f"model.init_from={folder} holds another model than model.hf_config: {'; '.join(found)}. "
                f"`burst launch --from {folder}` takes all of it"
            )
        return
    pretrained = pretrained_of(opened)
    if found := differences(config.model, pretrained.model):
        yield (
            f"model.init_from={folder} holds another model: {'; '.join(found)}. `burst model {folder}` shows its shape"
        )
    attention, window = config.attention, pretrained.window_tokens
    kinds = {*attention.mask_layers} or {attention.mask}
    if window is not None and "causal" in kinds and config.train.seq_len > window:
        yield (
            f"model.init_from={folder}: its tokens look at {window} tokens, but attention.mask=causal lets them look "
            f"at all {config.train.seq_len}; set attention.mask=window attention.window_tokens={window}"
        )
