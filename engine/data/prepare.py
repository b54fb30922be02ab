"""Prepares token shards from a `DataConfig`, once, in a cache by content.

    PREPARED/prepared.json      settings and source files that it was made from
    PREPARED/train/             a token set (engine.data.manifest)
    PREPARED/validation/        a token set
    PREPARED/tokenizer.json     unless the tokenizer is "bytes"

PREPARED is data.prepared_dir, or a folder in the cache named by a hash of configuration and source files. It is built
under another name and renamed when complete, so it exists whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from engine.config.errors import DataError
from engine.config.schema import hash_json
from engine.config.settings import DataConfig
from engine.data.build import TRAIN, VALIDATION, Progress, ProgressCallback, build
from engine.data.manifest import MANIFEST_FILE
from engine.data.sampler import Sampler, Samples, by_length
from engine.data.shards import TokenShards, echoed, open_token_set
from engine.data.sources import Source, open_source
from engine.data.tokenizers import ByteTokenizer, Ids, Tokenizer, load_tokenizer_file
from engine.pretrained.folder import TOKENIZER_FILE, open_tokenizer
from engine.runs.files import cache_folder, json_text, new_folder, remove_folder, require_json_object

PREPARED_FILE = "prepared.json"
VERSION = 2  # increment when the same text gives other tokens
_LOCK_POLL_S = 0.1


@dataclass(frozen=True)
class PreparedData:
    """Tokens of both splits, by the same tokenizer.

    token_bytes: bytes of text per token id, int64 [vocab_size]; null only for foreign shards without this table
    (then there is no loss in bits per byte). content_hash: equal on all ranks if they have the same tokens.
    """

    path: Path
    train: TokenShards
    validation: TokenShards
    token_bytes: Ids | None
    content_hash: str

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of these tokens. Raises DataError if the shards have none."""
        name, path = self.train.manifest.tokenizer, self.path / TOKENIZER_FILE
        if name == ByteTokenizer.name:
            return ByteTokenizer()
        if not path.is_file():
            raise DataError(f"{self.path} has no {TOKENIZER_FILE}, so ids cannot be turned into text. Add the file.")
        return load_tokenizer_file(path, name)


@contextlib.contextmanager
def _files_needed() -> Iterator[None]:
    """Convert OSError into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot prepare data: {error}. Give files that you may read, free some space, or name another folder with "
            "data.prepared_dir or BURST_CACHE_DIR."
        ) from None


@_files_needed()
def prepare(config: DataConfig, *, progress: ProgressCallback = lambda _: None) -> PreparedData:
    """Prepare the data of `config` unless an earlier call or another process has done it.

    Reports to `progress`. For data.format=shards nothing is written: the shards are opened and read through once.
    """
    if config.format == "shards":
        return _open(Path(config.paths[0]), config)
    source = open_source(config)
    folder, identity = _target(config, source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The kernel frees the lock when a process dies. The file stays, since waiting processes have it open.
    with (folder.parent / f".{folder.name}.lock").open("ab") as file:
        if _lock(file, lambda: progress(Progress("waiting"))):
            for path in folder.parent.iterdir():  # left by processes that were killed
                if re.fullmatch(rf"{re.escape(folder.name)}\.(tmp|gone)-[0-9a-f]{{16}}", path.name):
                    shutil.rmtree(path, ignore_errors=True)
        if not _is_ready(folder, config, identity):
            try:
                with new_folder(folder) as work:
                    skipped = build(work, config, source, progress)
                    if _target(config, open_source(config))[1] != identity:
                        raise DataError("the source files changed while they were read. Run again when nothing writes.")
                    facts = {"skipped_rows": asdict(skipped)} if source.skips_bad_rows else {}
                    (work / PREPARED_FILE).write_text(json_text({"identity": identity, **facts}))
            except OSError as error:
                # Another process finished first (on a file system without locks); its data is equal.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    return _open(folder, config)


@_files_needed()
def open_prepared(config: DataConfig) -> PreparedData:
    """Open the data that `prepare` made for `config`; does not tokenise, so every rank may call it.

    With data.prepared_dir set the source files need not be on this machine.
    """
    if config.format == "shards":
        return _open(Path(config.paths[0]), config, scan_foreign=False)
    folder = _chosen(config) or _target(config, open_source(config))[0]
    if not (folder / PREPARED_FILE).is_file():
        raise DataError(f"the data is not prepared: nothing at {folder}. Run `burst data prepare` with this config.")
    _check_same(folder, {"config": config_facts(config)})
    return _open(folder, config)


def skipped_rows(folder: Path) -> dict[str, Any] | None:
    """Return {"count", "first" (messages)} of the rows that data.on_bad_row=skip left out, else None."""
    path = folder / PREPARED_FILE
    if not path.is_file():
        return None
    found = require_json_object(path, "facts about prepared data", DataError).get("skipped_rows")
    return found if isinstance(found, dict) and isinstance(found.get("count"), int) else None


def _lock(file: BinaryIO, on_wait: Callable[[], None]) -> bool:
    """Wait for the exclusive lock of `file`; return False if the file system has no locks."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()  # repeatedly, so that hang detection sees progress
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return False
        else:
            return True


def config_facts(config: DataConfig) -> dict[str, Any]:
    """Return the settings that change the tokens, and only those."""
    return {
        "format": config.format,
        "paths": list(config.paths) if config.format != "stdlib" else [],
        "text_suffixes": list(config.resolved_text_suffixes) if config.format == "text" else None,
        "on_bad_row": "skip" if config.on_bad_row == "skip" and config.format in ("text", "jsonl", "parquet") else None,
        "text_field": config.text_field if config.format in ("jsonl", "parquet") else None,
        "prompt_field": config.prompt_field,
        "messages_field": config.messages_field,
        "chat_template": None if config.messages_field is None else config.chat_template,
        "tokenizer": config.tokenizer,
        "bos": None if config.tokenizer_path is None else config.bos,
        "bpe_vocab_size": config.bpe_vocab_size if config.tokenizer == "bpe" else None,
        "validation_fraction": config.validation_fraction,
        "max_bytes": config.max_bytes,
    }


def _chosen(config: DataConfig) -> Path | None:
    return None if config.prepared_dir is None else Path(config.prepared_dir).expanduser().absolute()


def _target(config: DataConfig, source: Source) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the prepared data of `config`, and its identity.

    Identity: settings, source files (path, size, modification time), tokenizer and chat template. If these are equal,
    so are the tokens.
    """
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    identity = {
        "version": VERSION,
        "config": config_facts(config),
        "files_hash": hash_json(facts),
        "tokenizer_hash": config.tokenizer_path and open_tokenizer(config.tokenizer_path).digest,
        "template_hash": source.template_hash,
    }
    return _chosen(config) or cache_folder() / "data" / hash_json(identity)[:16], identity


def _check_same(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise DataError with the differences between `wanted` and the identity of the data in `folder`."""
    path = folder / PREPARED_FILE
    made = require_json_object(path, "facts about prepared data", DataError).get("identity")
    if not isinstance(made, dict) or not isinstance(made.get("config"), dict):
        raise DataError(f"{path} was not written by burst. Name another data.prepared_dir, or remove this folder.")
    before, now = ({**one["config"], **one, "config": None} for one in (made, made | wanted))
    changed = [
        f"\n  - {key}: made with {before.get(key)!r}, now {now.get(key)!r}"
        for key in now | before
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise DataError(
            f"{folder} was prepared from something else:{''.join(changed)}\n"
            "Name another data.prepared_dir, or remove this folder to prepare it again."
        )


def _is_ready(folder: Path, config: DataConfig, identity: dict[str, Any]) -> bool:
    """Return whether `folder` has the wanted data; a damaged folder is removed from the cache, never a user's."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if config.prepared_dir is not None:
        if not (folder / PREPARED_FILE).is_file():
            raise DataError(f"data.prepared_dir={folder} holds other things. Name a new or empty folder.")
        _check_same(folder, identity)
        return True
    try:
        _open(folder, config)
    except DataError:
        remove_folder(folder)
        return False
    return True


def _open(path: Path, config: DataConfig, *, scan_foreign: bool = True) -> PreparedData:
    """Open the two token sets in the folder `path`, or split the one that `path` names."""
    path = path.expanduser().absolute()
    folders = [path / name for name in (TRAIN, VALIDATION)]
    if any((folder / MANIFEST_FILE).is_file() for folder in folders):
        train, validation = (open_token_set(folder, scan_foreign=scan_foreign) for folder in folders)
    else:
        whole = open_token_set(path, scan_foreign=scan_foreign)
        path, (train, validation) = whole.folder, whole.split_tail(config.validation_fraction)
    for key in ("vocab_size", "eod_id", "bos_ids", "tokenizer"):
        ours, theirs = getattr(train.manifest, key), getattr(validation.manifest, key)
        if ours != theirs:
            raise DataError(
                f"{path}: {key} of train is {ours!r} but of validation {theirs!r}. Prepare both with one tokenizer."
            )
    if train.learned_count(0, train.token_count) == 0:
        raise DataError(
            f"{path}: no token of its {train.token_count:,} training tokens is learned: all of them are prompts, so "
            "there is no loss. Give text that is learned: answers under data.text_field, or messages of the assistant."
        )
    content_hash = hash_json([_content(train), _content(validation)])
    return PreparedData(path, train, validation, train.load_token_bytes(), content_hash)


def _content(shards: TokenShards) -> list[Any]:
    """Return the identity of a token sequence: the recorded hashes (or else sizes) and the window."""
    made = shards.manifest
    return [made.dtype, made.vocab_size, shards.token_count, [(file.token_count, file.sha256) for file in made.files]]


@dataclass(frozen=True)
class TrainingData:
    """The corpus `main`, which also gives validation, and `others`, mixed as configured."""

    config: DataConfig
    main: PreparedData
    others: tuple[PreparedData, ...] = ()

    @property
    def content_hash(self) -> str:
        """Hash that is equal on all ranks with the same tokens in the same shares."""
        config = self.config
        if not self.others and not config.length_buckets:
            return self.main.content_hash
        hashes = [data.content_hash for data in (self.main, *self.others)]
        lengths = {"buckets": config.length_buckets, "shares": config.length_weights} if config.length_buckets else {}
        return hash_json({"hashes": hashes, "weights": config.mix_weights, **lengths})

    @property
    def vocab_size(self) -> int:
        """Upper bound of the ids of all corpora."""
        return max(data.train.manifest.vocab_size for data in (self.main, *self.others))

    def sampler(self, seq_len: int, seed: int, *, grad_accum_steps: int, documents_apart: bool = False) -> Sampler:
        """Build the sampler of the mixture. Raises DataError if a corpus, or a class of one, has no sample."""
        corpora = [Samples(data.train, seq_len, seed) for data in (self.main, *self.others)]
        weighted = zip(corpora, self.config.mix_weights or (1.0,), strict=True)
        parts = [(one, weight * own) for corpus, weight in weighted for one, own in by_length(corpus, self.config)]
        sources, weights = zip(*parts, strict=True)
        is_mixed = self.config.mix_weights or self.config.length_buckets
        how: dict[str, Any] = {"grad_accum_steps": grad_accum_steps, "documents_apart": documents_apart}
        return Sampler(sources, weights if is_mixed else (), seed=seed, **how)


def open_training_data(config: DataConfig) -> TrainingData:
    """Open the prepared corpus of `config` and those of `mix_paths`, whose tokenizers must be equal; for every rank.

    Raises DataError when one is not prepared, or was made with another tokenizer.
    """
    main = open_prepared(config)
    if config.echo_tokens is not None:
        train, validation = (echoed(one, config.echo_tokens) for one in (main.train, main.validation))
        known = hash_json([main.content_hash, config.echo_tokens])
        main = replace(main, train=train, validation=validation, content_hash=known)
    others = tuple(open_prepared(DataConfig(format="shards", paths=(path,))) for path in config.mix_paths)
    for path, other in zip(config.mix_paths, others, strict=True):
        if (theirs := _tokens_of(other)) != (ours := _tokens_of(main)):
            raise DataError(
                f"data.mix_paths: {path} has tokens of {theirs}, {main.path} of {ours}. Prepare both with the same "
                "data.tokenizer and data.bos."
            )
    return TrainingData(config, main, others)


def _tokens_of(data: PreparedData) -> str:
    """Return the description of tokens that must be equal in mixed corpora."""
    made = data.train.manifest
    begins = f" and beginning {list(made.bos_ids)}" if made.bos_ids else ""
    return f"{made.tokenizer} with end of document {made.eod_id}{begins}"
