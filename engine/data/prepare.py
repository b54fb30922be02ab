"""From a `DataConfig` to token shards on disk: prepared once, found again by everyone who asks for the same.

    PREPARED/prepared.json      what it was made from
    PREPARED/train/             a token set (engine.data.manifest)
    PREPARED/validation/        a token set
    PREPARED/tokenizer.json     unless the tokenizer is "bytes"

PREPARED is data.prepared_dir, or a folder in the cache named by a hash of configuration and source files. It is built
under another name and renamed when complete, so it exists whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import DataConfig
from engine.data.build import (
    PREPARED_FILE,
    PREPARED_FORMAT,
    TRAIN,
    VALIDATION,
    build_folder,
    remove_folder,
    remove_leftovers,
)
from engine.data.files import exclusive_lock, hash_json, read_json_object, writing_error
from engine.data.identity import (
    check_data_config,
    check_same_config,
    check_same_identity,
    make_identity,
    prepared_folder,
)
from engine.data.manifest import MANIFEST_FILE
from engine.data.progress import Progress, ProgressCallback, ignore_progress
from engine.data.shards import Tokens, TokenShards, open_token_set
from engine.data.sources import open_source
from engine.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, Tokenizer, load_saved_tokenizer
from engine.errors import DataError


@dataclass(frozen=True)
class PreparedData:
    """Tokens ready for training, both splits with the same vocabulary.

    token_bytes: bytes of text per token id, int64 [vocab_size]; null only for shards made elsewhere that do not tell
    (then no loss in bits per byte can be given). content_hash: equal on all ranks if they have the same tokens.
    """

    path: Path
    train: TokenShards
    validation: TokenShards
    vocab_size: int
    eod_id: int | None
    tokenizer: str | None
    token_bytes: Tokens | None
    content_hash: str

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of these tokens; `DataError` if the shards came without one."""
        if self.tokenizer != ByteTokenizer.name and not (self.path / TOKENIZER_FILE).is_file():
            raise DataError(f"{self.path} has no {TOKENIZER_FILE}, so ids cannot be turned into text. Add the file.")
        return load_saved_tokenizer(self.tokenizer or str(self.path / TOKENIZER_FILE), self.path)


def prepare(config: DataConfig, *, progress: ProgressCallback = ignore_progress) -> PreparedData:
    """The data that `config` describes, tokenised now unless an earlier call or another process has done it.

    Reports to `progress`. For data.format=shards nothing is written: the shards are opened and read through once.
    """
    check_data_config(config)
    if config.format == "shards":
        return _open_shards(config, scan_foreign=True)
    source = open_source(config)
    identity = make_identity(config, source)
    folder = prepared_folder(config, source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder.with_name(folder.name + ".lock"), lambda: progress(Progress("waiting"))) as locked:
            if locked:
                remove_leftovers(folder)
            if not _is_ready(folder, config, identity):
                build_folder(folder, config, source, identity, progress)
    except OSError as error:
        raise writing_error(folder, error) from None
    return _open_folder(folder)


def open_prepared(config: DataConfig) -> PreparedData:
    """The data that `prepare` made for `config`; never tokenises, so every rank may call it.

    With data.prepared_dir set the source files need not be on this machine.
    """
    check_data_config(config)
    if config.format == "shards":
        return _open_shards(config, scan_foreign=False)
    folder = prepared_folder(config)
    if not (folder / PREPARED_FILE).is_file():
        raise DataError(f"the data is not prepared: nothing at {folder}. Run `burst data prepare` with this config.")
    check_same_config(folder, _read_facts(folder)["identity"], config)
    return _open_folder(folder)


def _is_ready(folder: Path, config: DataConfig, identity: dict[str, Any]) -> bool:
    """Whether `folder` holds what is wanted; a damaged folder of the cache is removed, a user's never."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if config.prepared_dir is not None:
        if not (folder / PREPARED_FILE).is_file():
            raise DataError(f"data.prepared_dir={folder} holds other things. Name a new or empty folder.")
        made = _read_facts(folder)["identity"]
        check_same_config(folder, made, config)
        check_same_identity(folder, made, identity)
        return True
    try:
        _open_folder(folder)
    except DataError:
        remove_folder(folder)
        return False
    return True


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / PREPARED_FILE
    facts = read_json_object(path, "facts about prepared data")
    if facts.get("format") != PREPARED_FORMAT or not isinstance(facts.get("identity"), dict):
        raise DataError(f"{path} was not written by burst. Name another data.prepared_dir, or remove this folder.")
    return facts


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
        vocab_size=train.vocab_size,
        eod_id=train.eod_id,
        tokenizer=train.manifest.tokenizer,
        token_bytes=train.load_token_bytes(),
        content_hash=hash_json([_content(train), _content(validation)]),
    )


def _content(shards: TokenShards) -> list[Any]:
    """What tells one token sequence from another: the recorded hashes (or else sizes) and the window."""
    files = [(file.token_count, file.sha256) for file in shards.manifest.files]
    return [shards.manifest.dtype, shards.vocab_size, shards.token_count, files]
