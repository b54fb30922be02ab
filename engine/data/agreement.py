"""Checks that the tokens of a run are those that the weights of model.init_from were trained with."""

from __future__ import annotations

from pathlib import Path

from engine.config.errors import DataError
from engine.config.settings import RunConfig
from engine.data.tokenizers import FileTokenizer, load_tokenizer_file, tokenizer_of
from engine.pretrained.folder import TOKENIZER_FILE, find_tokenizer
from engine.pretrained.resolve import probe_digest


def tokenizer_problem(config: RunConfig, prepared: Path | None = None) -> str | None:
    """Return the problem if the tokens of a run are not those of its model.init_from; None if they agree.

    A folder without a tokenizer agrees with any. Of prepared shards their tokenizer.json counts; shards without one
    agree with any.

    Args:
        config: of the run; model.init_from is on this machine.
        prepared: the folder of the prepared data, where there is one.
    """
    if config.model.init_from is None:
        return None
    folder = Path(config.model.init_from).expanduser()
    theirs_files = find_tokenizer(folder)
    if theirs_files is None:
        return None
    if (problem := bytes_problem(config, folder)) is not None:
        return problem
    path = _path_of(config, prepared)
    if path is None or path == theirs_files.folder or not path.exists():
        return None
    try:
        ours, theirs = load_tokenizer_file(path), tokenizer_of(theirs_files, str(folder))
    except DataError as error:
        return f"model.init_from={folder}: cannot compare tokenizers: {error}"
    difference = _difference(ours, theirs)
    if difference is None:
        return None
    return (
        f"the tokens of {path} are not those of model.init_from={folder}: {difference}. Prepare the data with "
        f"data.tokenizer={folder}"
    )


def bytes_problem(config: RunConfig, folder: Path) -> str | None:
    """One sentence when tokens are bytes, of which weights in `folder`, which has a tokenizer, know none; else None."""
    if config.data.format == "shards" or config.data.tokenizer != "bytes":
        return None
    return (
        f"data.tokenizer=bytes: the weights of model.init_from={folder} know none of its ids; set "
        f"data.tokenizer={folder}"
    )


def vocabulary_problem(config: RunConfig, vocab_size: int) -> str | None:
    """Return the problem if a tokenizer has more ids (`vocab_size`) than the model has embeddings; else None."""
    rows = config.model.vocab_size
    if vocab_size <= rows:
        return None
    got = f"model.vocab_size: got {rows}, but the tokenizer has {vocab_size} tokens"
    if config.model.init_from is None:
        return f"{got}; set model.vocab_size={-(-vocab_size // 64) * 64}"
    return (
        f"{got}, and model.init_from={config.model.init_from} has weights for {rows}. Prepare the data with the "
        "tokenizer of that folder, without the tokens that were added, or give it rows for them with transformers: "
        f"model.resize_token_embeddings({vocab_size}, pad_to_multiple_of=64), save_pretrained(NEW), then "
        "model.init_from=NEW with the model.vocab_size of `burst model NEW`"
    )


def _path_of(config: RunConfig, prepared: Path | None) -> Path | None:
    if prepared is not None and (prepared / TOKENIZER_FILE).is_file():
        return prepared
    if config.data.format == "shards":
        path = Path(config.data.paths[0]).expanduser() if config.data.paths else None
        return path if path is not None and (path / TOKENIZER_FILE).is_file() else None
    path = config.data.tokenizer_path
    return path.parent if path is not None and path.name == TOKENIZER_FILE else path


def _difference(ours: FileTokenizer, theirs: FileTokenizer) -> str | None:
    added = {token.content: index for index, token in theirs.inner.get_added_tokens_decoder().items()}
    for content, index in added.items():
        if (found := ours.inner.token_to_id(content)) != index:
            return f"{content!r} is id {found} there and {index} in the folder"
    if probe_digest(ours.inner) != probe_digest(theirs.inner):
        return "they give the same text other ids"
    return None
