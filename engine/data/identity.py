"""Which prepared data belongs to a configuration: its folder, and the facts that must agree."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from engine.config import DataConfig
from engine.data.files import hash_json, stat_key
from engine.data.sources import Source, open_source
from engine.data.special_tokens import named_bos
from engine.data.tokenizers import BPE_MIN_VOCAB_SIZE, read_tokenizer_file
from engine.errors import ConfigError, DataError

VERSION = 1  # raise it when the same text would give other tokens
CACHE_VARIABLE = "BURST_CACHE_DIR"


def prepared_folder(config: DataConfig, source: Source | None = None) -> Path:
    """Where the data of `config` lies or will lie: data.prepared_dir, or a folder in the cache named by content."""
    if config.prepared_dir is not None:
        return Path(config.prepared_dir).expanduser().absolute()
    return cache_folder() / "data" / hash_json(make_identity(config, source or open_source(config)))[:16]


def cache_folder() -> Path:
    """$BURST_CACHE_DIR, or ~/.cache/burst."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    try:
        return Path.home() / ".cache" / "burst"
    except RuntimeError:
        raise DataError(
            f"this user has no home folder to keep a cache in. Set {CACHE_VARIABLE} or data.prepared_dir."
        ) from None


def config_facts(config: DataConfig) -> dict[str, Any]:
    """The settings that change the tokens, and only those."""
    reads_fields = config.format in ("jsonl", "parquet")
    return {
        "format": config.format,
        "paths": list(config.paths) if config.format != "stdlib" else [],
        "text_field": config.text_field if reads_fields else None,
        **({} if config.prompt_field is None else {"prompt_field": config.prompt_field}),
        **({} if config.messages_field is None else _chat_facts(config)),
        "tokenizer": config.tokenizer,
        **({} if config.tokenizer in ("bytes", "bpe") else {"bos": config.bos}),
        "bpe_vocab_size": config.bpe_vocab_size if config.tokenizer == "bpe" else None,
        "validation_fraction": config.validation_fraction,
        "max_bytes": config.max_bytes,
    }


def _chat_facts(config: DataConfig) -> dict[str, Any]:
    return {"messages_field": config.messages_field, "chat_template": config.chat_template}


def make_identity(config: DataConfig, source: Source) -> dict[str, Any]:
    """Settings, source files (path, size, modification time), tokenizer and chat template: if these are equal, so are
    the tokens."""
    tokenizer_hash = None
    if config.tokenizer not in ("bytes", "bpe"):
        text = read_tokenizer_file(Path(config.tokenizer).expanduser())
        text += (named_bos(config) or "") if config.bos == "on" else ""
        tokenizer_hash = hashlib.sha256(text.encode()).hexdigest()
    return {
        "version": VERSION,
        "config": config_facts(config),
        "files_hash": hash_json([stat_key(path) for path in source.files]),
        "tokenizer_hash": tokenizer_hash,
        **({} if source.template_hash is None else {"template_hash": source.template_hash}),
    }


def check_same_config(folder: Path, identity: dict[str, Any], config: DataConfig) -> None:
    """`DataError` that lists the settings in which the data in `folder`, made as `identity` says, differs."""
    made, now = identity.get("config", {}), config_facts(config)
    changed = [
        f"{key}: made with {made.get(key)!r}, now {now.get(key)!r}"
        for key in {**now, **made}
        if made.get(key) != now.get(key)
    ]
    if changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise DataError(
            f"{folder} was prepared from another configuration:\n{listed}\n"
            "Name another data.prepared_dir, or remove this folder to prepare it again."
        )


def check_same_identity(folder: Path, made: dict[str, Any], identity: dict[str, Any]) -> None:
    """`DataError` if source files, tokenizer or chat template have changed since the data in `folder` was made."""
    names = {"version": "burst's data format", "files_hash": "source files", "tokenizer_hash": "tokenizer"}
    names["template_hash"] = "chat template"
    changed = [what for key, what in names.items() if made.get(key) != identity.get(key)]
    if changed:
        raise DataError(
            f"{folder} is out of date: changed since it was prepared: {', '.join(changed)}. "
            "Name another data.prepared_dir, or remove this folder to prepare it again."
        )


def check_data_config(config: DataConfig) -> None:
    """Raise a `ConfigError` that lists every value of `config` that cannot be used."""
    problems = []
    if not 0 < config.validation_fraction < 1:
        problems.append(f"data.validation_fraction={config.validation_fraction}: expected a number between 0 and 1.")
    if config.max_bytes is not None and config.max_bytes < 1:
        problems.append(f"data.max_bytes={config.max_bytes}: expected a whole number > 0, or null for no limit.")
    if config.tokenizer == "bpe" and config.bpe_vocab_size < BPE_MIN_VOCAB_SIZE:
        problems.append(
            f"data.bpe_vocab_size={config.bpe_vocab_size}: expected at least {BPE_MIN_VOCAB_SIZE} "
            "(every byte and the end of a document)."
        )
    if config.format != "stdlib" and not config.paths:
        problems.append(f"data.paths is empty; data.format={config.format} needs files, folders or globs.")
    if config.format == "shards" and len(config.paths) > 1:
        problems.append(
            f"data.paths has {len(config.paths)} entries; data.format=shards takes one: a prepared folder, a "
            "folder with manifest.json, or a token file with its manifest (which may list many files)."
        )
    if problems:
        raise ConfigError(problems)
