"""Tokens that stand for no text: what the files beside a tokenizer call them, and which begin every document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.files import read_json_object
from engine.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer_file

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_FILES = ("special_tokens_map.json", TOKENIZER_CONFIG_FILE)  # the later one wins


def special_tokens(folder: Path) -> dict[str, str]:
    """Name -> text of the special tokens that the files beside a tokenizer give, such as bos_token."""
    tokens: dict[str, str] = {}
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        for key, value in read_json_object(path, "the settings of a tokenizer").items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


def named_bos(config: DataConfig) -> str | None:
    """The token that the files beside a tokenizer.json name as the first one of a sequence."""
    return special_tokens(Path(config.tokenizer).expanduser().absolute().parent).get("bos_token")


def find_bos_ids(config: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that begin every document: those of the tokenizer's own template, as transformers has it.

    Without such a template data.bos=on takes the token that the files beside the tokenizer name; DataError if none
    does. What a template adds after a text is left out: `eod_id` ends every document.
    """
    if config.bos == "off" or config.tokenizer == "bpe" or not isinstance(tokenizer, FileTokenizer):
        return ()
    by_template = tokenizer.template_start()
    if by_template or config.bos == "auto":
        return by_template
    found = tokenizer.id_of(named_bos(config))
    if found is None:
        raise DataError(
            f"data.bos=on: the template of data.tokenizer={config.tokenizer} adds no token before a text, and no "
            f"bos_token of its vocabulary is named in {' or '.join(_FILES)} beside it. Name one there, or set "
            "data.bos=auto."
        )
    return (found,)


def tokens_for_export(tokenizer: Path, beside: Path | None) -> tuple[dict[str, str], dict[str, Any]]:
    """What begins and ends a text, for transformers: ({"bos_token": ..., ...}, {"bos_token_id": ..., ...}).

    beside: the original folder of a tokenizer.json, whose own files say it where they are. Else the end is the token
    that ends documents in training, and the beginning what the tokenizer itself puts before a text, if it does. An id
    that is not known is null. Several may end a text: that of documents in training, and that of a turn in
    conversations. Raises DataError when the tokenizer cannot be loaded.
    """
    loaded = load_tokenizer_file(tokenizer)
    texts = {"eos_token": loaded.token(loaded.eod_id)}
    if first := loaded.template_start():
        texts["bos_token"] = loaded.token(first[0])
    texts |= {} if beside is None else special_tokens(beside)
    turn = loaded.id_of(texts["eos_token"])
    ends = loaded.eod_id if turn in (None, loaded.eod_id) else [loaded.eod_id, turn]
    return texts, {"bos_token_id": loaded.id_of(texts.get("bos_token")), "eos_token_id": ends}
