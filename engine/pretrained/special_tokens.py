"""Which tokens begin and end a text, as transformers wants to be told: from a tokenizer's own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.special_tokens import special_tokens
from engine.data.tokenizers import load_tokenizer_file

BOS, EOS = "bos_token", "eos_token"


@dataclass(frozen=True)
class SpecialTokens:
    """texts: {"bos_token": ..., "eos_token": ..., ...}; ids: {"bos_token_id": ..., "eos_token_id": ...}.

    An id that is not known is null: without the key transformers takes one of the first Llama, in other vocabularies
    ordinary text. Several may end a text: that of documents in training, and that of a turn in conversations.
    """

    texts: Mapping[str, str]
    ids: Mapping[str, Any]


UNKNOWN = SpecialTokens({}, {f"{BOS}_id": None, f"{EOS}_id": None})


def find_special_tokens(tokenizer: Path, beside: Path | None) -> SpecialTokens:
    """Those of a tokenizer.json. beside: its original folder, whose own files say it where they are.

    Else the end is the token that ends documents in training, and the beginning what the tokenizer itself puts before a
    text, if it does. Raises DataError when the tokenizer cannot be loaded.
    """
    loaded = load_tokenizer_file(tokenizer)
    told = {} if beside is None else special_tokens(beside)
    texts = {EOS: loaded.token(loaded.eod_id)}
    if first := loaded.template_start():
        texts[BOS] = loaded.token(first[0])
    texts |= told
    turn = loaded.id_of(texts[EOS])
    ends = loaded.eod_id if turn in (None, loaded.eod_id) else [loaded.eod_id, turn]
    return SpecialTokens(texts, {f"{BOS}_id": loaded.id_of(texts.get(BOS)), f"{EOS}_id": ends})
