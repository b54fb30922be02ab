"""Which tokens begin and end a text, as transformers wants to be told: from a tokenizer's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.chat_template import special_tokens_of
from engine.data.tokenizers import FileTokenizer, load_tokenizer_file

BOS, EOS = "bos_token", "eos_token"


@dataclass(frozen=True)
class SpecialTokens:
    """texts: {"bos_token": ..., "eos_token": ..., ...}; ids: {"bos_token_id": ..., "eos_token_id": ...}, as known."""

    texts: Mapping[str, str]
    ids: Mapping[str, int]


def find_special_tokens(tokenizer: Path, beside: Path | None) -> SpecialTokens:
    """Those of a tokenizer.json. beside: its original folder, whose own files say it where they are.

    Else the end is the token that ends documents in training, and the beginning what the tokenizer itself puts before a
    text, if it does. Raises DataError when the tokenizer cannot be loaded.
    """
    loaded = load_tokenizer_file(tokenizer)
    told = {} if beside is None else special_tokens_of(beside)
    texts = {EOS: loaded.token(loaded.eod_id), **_beginning(tokenizer), **told}
    ids = {f"{name}_id": number for name in (BOS, EOS) if (number := _id(loaded, texts.get(name))) is not None}
    return SpecialTokens(texts, ids)


def _id(tokenizer: FileTokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_id(token)


def _beginning(tokenizer: Path) -> dict[str, str]:
    """The token that a template of the tokenizer puts before every text."""
    document = json.loads(tokenizer.read_text(encoding="utf-8"))
    for template in _templates(document.get("post_processor") or {}):
        first = (template.get("single") or [{}])[0]
        if "SpecialToken" in first:
            return {BOS: str(first["SpecialToken"]["id"])}
    return {}


def _templates(processor: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if processor.get("type") == "TemplateProcessing":
        yield processor
    for inner in processor.get("processors", ()):
        yield from _templates(inner)
