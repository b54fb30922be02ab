"""From a `DataConfig` to token shards on disk: prepared once, found again by everyone who asks for the same.

    PREPARED/prepared.json      what it was made from
    PREPARED/train/             a token set (engine.data.manifest)
    PREPARED/validation/        a token set
    PREPARED/tokenizer.json     unless the tokenizer is "bytes"

PREPARED is data.prepared_dir, or a folder in the cache named by a hash of configuration and source files. It is built
under another name and renamed when complete, so it exists whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.build import TRAIN, VALIDATION, Progress, ProgressCallback, build
from engine.data.files import exclusive_lock, stat_key
from engine.data.manifest import MANIFEST_FILE
from engine.data.sampler import Sampler, Samples, by_length
from engine.data.shards import EchoedShards, Tokens, TokenShards, open_token_set
from engine.data.sources import Source, open_source
from engine.data.tokenizers import (
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer_file,
    named_bos,
    read_tokenizer_file,
)
from engine.runs.files import cache_folder, hash_json, new_folder, remove_folder
from engine.runs.records import json_text, require_json_object

PREPARED_FILE = "prepared.json"
VERSION = 1  # raise it when the same text would give other tokens
_WORDS = {"version": "burst's data format", "files_hash": "source files", "tokenizer_hash": "tokenizer"}
_WORDS["template_hash"] = "chat template"


@dataclass(frozen=True)
class PreparedData:
    """Tokens ready for training, both splits of the same tokenizer.

    token_bytes: bytes of text per token id, int64 [vocab_size]; null only for shards made elsewhere that do not tell
    (then no loss in bits per byte can be given). content_hash: equal on all ranks if they have the same tokens.
    """

    path: Path
    train: TokenShards
    validation: TokenShards
    token_bytes: Tokens | None
    content_hash: str

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of these tokens; `DataError` if the shards came without one."""
        name, path = self.train.manifest.tokenizer, self.path / TOKENIZER_FILE
        if name == ByteTokenizer.name:
            return ByteTokenizer()
        if not path.is_file():
            raise DataError(f"{self.path} has no {TOKENIZER_FILE}, so ids cannot be turned into text. Add the file.")
        return load_tokenizer_file(path, name)


def prepare(config: DataConfig, *, progress: ProgressCallback = lambda _: None) -> PreparedData:
    """The data that `config` describes, tokenised now unless an earlier call or another process has done it.

    Reports to `progress`. For data.format=shards nothing is written: the shards are opened and read through once.
    """
    if config.format == "shards":
        return _open_shards(config, scan_foreign=True)
    source = open_source(config)
    identity = make_identity(config, source)
    folder = prepared_folder(config, source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder.parent / f".{folder.name}.lock", lambda: progress(Progress("waiting"))) as locked:
            if locked:
                for path in folder.parent.iterdir():  # left by processes that were killed
                    if re.fullmatch(rf"{re.escape(folder.name)}\.(tmp|gone)-[0-9a-f]{{16}}", path.name):
                        shutil.rmtree(path, ignore_errors=True)
            if not _is_ready(folder, config, identity):
                _build_folder(folder, config, source, identity, progress)
    except OSError as error:
        raise DataError(
            f"cannot write prepared data to {folder}: {error.strerror or error}. "
            "Free some space or name another folder with data.prepared_dir or BURST_CACHE_DIR."
        ) from None
    return _open_folder(folder)


def open_prepared(config: DataConfig) -> PreparedData:
    """The data that `prepare` made for `config`; never tokenises, so every rank may call it.

    With data.prepared_dir set the source files need not be on this machine.
    """
    if config.format == "shards":
        return _open_shards(config, scan_foreign=False)
    folder = prepared_folder(config)
    if not (folder / PREPARED_FILE).is_file():
        raise DataError(f"the data is not prepared: nothing at {folder}. Run `burst data prepare` with this config.")
    _check_same(folder, {"config": config_facts(config)})
    return _open_folder(folder)


def prepared_folder(config: DataConfig, source: Source | None = None) -> Path:
    """Where the data of `config` lies or will lie: data.prepared_dir, or a folder in the cache named by content."""
    if config.prepared_dir is not None:
        return Path(config.prepared_dir).expanduser().absolute()
    return cache_folder() / "data" / hash_json(make_identity(config, source or open_source(config)))[:16]


def config_facts(config: DataConfig) -> dict[str, Any]:
    """The settings that change the tokens, and only those."""
    has_fields, has_file = config.format in ("jsonl", "parquet"), config.tokenizer not in ("bytes", "bpe")
    return {
        "format": config.format,
        "paths": list(config.paths) if config.format != "stdlib" else [],
        "text_field": config.text_field if has_fields else None,
        "prompt_field": config.prompt_field,
        "messages_field": config.messages_field,
        "chat_template": None if config.messages_field is None else config.chat_template,
        "tokenizer": config.tokenizer,
        "bos": config.bos if has_file else None,
        "bpe_vocab_size": config.bpe_vocab_size if config.tokenizer == "bpe" else None,
        "validation_fraction": config.validation_fraction,
        "max_bytes": config.max_bytes,
    }


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
        "template_hash": source.template_hash,
    }


def _check_same(folder: Path, wanted: dict[str, Any]) -> None:
    """Raises DataError that lists in what the data in `folder` was made from something else than `wanted`."""
    path = folder / PREPARED_FILE
    facts = require_json_object(path, "facts about prepared data", DataError)
    made = facts.get("identity")
    before = made.get("config") if isinstance(made, dict) else None
    if not isinstance(made, dict) or not isinstance(before, dict):
        raise DataError(f"{path} was not written by burst. Name another data.prepared_dir, or remove this folder.")
    now = wanted["config"]
    changed = [
        f"{key}: made with {before.get(key)!r}, now {now.get(key)!r}"
        for key in {**now, **before}
        if before.get(key) != now.get(key)
    ]
    if wanted.keys() != {"config"}:
        changed += [f"changed since then: {what}" for key, what in _WORDS.items() if made.get(key) != wanted.get(key)]
    if changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise DataError(
            f"{folder} was prepared from something else:\n{listed}\n"
            "Name another data.prepared_dir, or remove this folder to prepare it again."
        )


def _is_ready(folder: Path, config: DataConfig, identity: dict[str, Any]) -> bool:
    """Whether `folder` holds what is wanted; a damaged folder of the cache is removed, a user's never."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if config.prepared_dir is not None:
        if not (folder / PREPARED_FILE).is_file():
            raise DataError(f"data.prepared_dir={folder} holds other things. Name a new or empty folder.")
        _check_same(folder, identity)
        return True
    try:
        _open_folder(folder)
    except DataError:
        remove_folder(folder)
        return False
    return True


def _build_folder(
    folder: Path, config: DataConfig, source: Source, identity: dict[str, Any], progress: ProgressCallback
) -> None:
    try:
        with new_folder(folder) as work:
            build(work, config, source, progress)
            if make_identity(config, open_source(config)) != identity:
                raise DataError("the source files changed while they were read. Run again when nothing writes to them.")
            (work / PREPARED_FILE).write_text(json_text({"identity": identity}))
    except OSError as error:
        # Another process was faster (on a file system without locks): its data is as good as ours.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _open_folder(folder: Path) -> PreparedData:
    return _pair(folder, open_token_set(folder / TRAIN), open_token_set(folder / VALIDATION))


def _open_shards(config: DataConfig, *, scan_foreign: bool) -> PreparedData:
    path = Path(config.paths[0]).expanduser().absolute()
    if not path.exists():
        raise DataError(f"data.paths: {path} does not exist. Name a folder with manifest.json or a token file.")
    if all((path / name / MANIFEST_FILE).is_file() for name in (TRAIN, VALIDATION)):
        train = open_token_set(path / TRAIN, scan_foreign=scan_foreign)
        validation = open_token_set(path / VALIDATION, scan_foreign=scan_foreign)
        return _pair(path, train, validation)
    whole = open_token_set(path, scan_foreign=scan_foreign)
    return _pair(whole.folder, *whole.split_tail(config.validation_fraction))


def _pair(path: Path, train: TokenShards, validation: TokenShards) -> PreparedData:
    for key in ("vocab_size", "eod_id", "bos_ids", "tokenizer"):
        ours, theirs = getattr(train.manifest, key), getattr(validation.manifest, key)
        if ours != theirs:
            raise DataError(
                f"{path}: {key} of train is {ours!r} but of validation {theirs!r}. Prepare both with one tokenizer."
            )
    return PreparedData(
        path=path,
        train=train,
        validation=validation,
        token_bytes=train.load_token_bytes(),
        content_hash=hash_json([_content(train), _content(validation)]),
    )


def _content(shards: TokenShards) -> list[Any]:
    """What tells one token sequence from another: the recorded hashes (or else sizes) and the window."""
    files = [(file.token_count, file.sha256) for file in shards.manifest.files]
    return [shards.manifest.dtype, shards.vocab_size, shards.token_count, files]


@dataclass(frozen=True)
class TrainingData:
    """The corpus `main`, which validation is of, and `others`, mixed as `config` says."""

    config: DataConfig
    main: PreparedData
    others: tuple[PreparedData, ...] = ()

    @property
    def content_hash(self) -> str:
        """Equal on all ranks that have the same tokens in the same shares."""
        config = self.config
        if not self.others and not config.length_buckets:
            return self.main.content_hash
        hashes = [data.content_hash for data in (self.main, *self.others)]
        lengths = {"buckets": config.length_buckets, "shares": config.length_weights} if config.length_buckets else {}
        return hash_json({"hashes": hashes, "weights": config.mix_weights, **lengths})

    @property
    def vocab_size(self) -> int:
        """Ids are below this, in all of them."""
        return max(data.train.vocab_size for data in (self.main, *self.others))

    def sampler(self, seq_len: int, seed: int, *, grad_accum_steps: int, documents_apart: bool = False) -> Sampler:
        """Batches of the mixture. Raises DataError when a corpus, or a class of one, has less than one sample."""
        sources = [Samples(data.train, seq_len, seed) for data in (self.main, *self.others)]
        weights = list(self.config.mix_weights)
        if self.config.length_buckets:
            parts = [by_length(corpus, self.config) for corpus in sources]
            sources = [one for classes, _ in parts for one in classes]
            shares = zip(weights or [1.0], parts, strict=True)
            weights = [weight * share for weight, (_, own) in shares for share in own]
        return Sampler(sources, weights, seed, grad_accum_steps=grad_accum_steps, documents_apart=documents_apart)


def open_training_data(config: DataConfig) -> TrainingData:
    """The prepared corpus of `config` and those of `mix_paths`, whose tokenizers must be the same; every rank may call.

    Raises DataError when one is not prepared, or was made with another tokenizer.
    """
    main = open_prepared(config)
    if config.echo_tokens is not None:
        train, validation = (EchoedShards(one, config.echo_tokens) for one in (main.train, main.validation))
        known = hash_json([main.content_hash, config.echo_tokens])
        main = replace(main, train=train, validation=validation, content_hash=known)
    others = []
    for path in config.mix_paths:
        other = open_prepared(DataConfig(format="shards", paths=(path,)))
        theirs, ours = _tokens_of(other), _tokens_of(main)
        if theirs != ours:
            raise DataError(
                f"data.mix_paths: {Path(path)} has tokens of {theirs}, {main.path} of {ours}. Prepare both with the "
                "same data.tokenizer and data.bos."
            )
        others.append(other)
    return TrainingData(config, main, tuple(others))


def _tokens_of(data: PreparedData) -> str:
    """What must be the same in corpora that are mixed."""
    begins = f" and beginning {list(data.train.bos_ids)}" if data.train.bos_ids else ""
    return f"{data.train.manifest.tokenizer} with end of document {data.train.eod_id}{begins}"
