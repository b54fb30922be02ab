"""The tokenizer of a folder as one object of the library tokenizers: vocabulary, added tokens, special tokens.

Ids are those of transformers' AutoTokenizer. A folder that transformers 5 reads otherwise than its tokenizer.json has
it, which is what version 4 reads, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.errors import DataError
from engine.pretrained.auto_tokenizer import ask_transformers, has_transformers
from engine.pretrained.folder import TokenizerFiles
from engine.runs.files import hash_json

# What tokenizers do differently: blanks at edges and in rows, digits, scripts, marks, code, bytes that are no letters.
PROBE_TEXTS = (
    "hello there, World! It's 1234567 of 89.",
    " a blank before,  two   three\tand\n\n\n lines\r\n  ",
    "def f(x):\n    if x >= 10:\n        return x ** 2  # comment\n",
    "größe naïve cafe\u0301 Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 漢字 🐎👩‍🚀",
    'https://example.org/a?b=c&d=%20#e {"k": [null, true]} \\frac{1}{2} € ½ \x00\x7f\u200b\ufeff',
)


@dataclass(frozen=True)
class ResolvedTokenizer:
    """inner: of the library tokenizers, with every added token. special_tokens: name -> text."""

    inner: Any
    special_tokens: Mapping[str, str]


def resolve_tokenizer(files: TokenizerFiles, *, verify: bool = False) -> ResolvedTokenizer:
    """The tokenizer of `files`. verify: ask transformers, where it is installed, whether it gives the same ids.

    Raises DataError when there is none, its files disagree, or transformers gives other ids.
    """
    if not files.file.is_file():
        return _converted(files)
    inner = _from_file(files)
    _add_tokens(inner, files)
    _check_class(inner, files)
    if verify and files.class_name and has_transformers():
        _check_same_ids(inner, files)
    return ResolvedTokenizer(inner, files.special_tokens)


def ids_of_probe(inner: Any) -> list[list[int]]:
    """Ids of `PROBE_TEXTS` and of every special token between words, special tokens found in text."""
    special = sorted(token.content for token in inner.get_added_tokens_decoder().values() if token.special)
    return _ids(inner, [*PROBE_TEXTS, *(f"a {token} b{token}c" for token in special)])


def probe_digest(inner: Any) -> str:
    """Equal for tokenizers that give `PROBE_TEXTS` the same ids."""
    return hash_json(_ids(inner, PROBE_TEXTS))


def _ids(inner: Any, texts: Any) -> list[list[int]]:
    before, inner.encode_special_tokens = inner.encode_special_tokens, False
    try:
        return [item.ids for item in inner.encode_batch(list(texts), add_special_tokens=False)]
    finally:
        inner.encode_special_tokens = before


def _from_file(files: TokenizerFiles) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(files.file))
    except Exception as error:  # the library raises nothing more specific
        raise DataError(
            f"tokenizer {files.file} cannot be loaded ({error}). Expected 'bytes', 'bpe', a folder with a tokenizer or "
            "a tokenizer.json of the library tokenizers as data.tokenizer."
        ) from None


def _add_tokens(inner: Any, files: TokenizerFiles) -> None:
    """Add what the files beside tokenizer.json add, in the order of transformers.

    The library chooses ids itself, so an id that a file states may turn out to be another: refused.
    """
    from tokenizers import AddedToken

    known = {token.content: index for index, token in inner.get_added_tokens_decoder().items()}
    for token in files.added_tokens:
        if token.content not in known:
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            named = token.special or token.content in files.special_tokens.values()
            inner.add_tokens([AddedToken(token.content, special=named, **flags)])
        if (index := inner.token_to_id(token.content)) != token.index:
            raise DataError(
                f"{files.folder}: its files disagree: {token.content!r} is id {token.index} beside {files.file.name}, "
                f"but {index} in it. Correct the folder, or save it again with transformers."
            )
    for text in (*files.special_tokens.values(), *files.extra_special_tokens):
        if text not in {token.content for token in inner.get_added_tokens_decoder().values()}:
            inner.add_tokens([AddedToken(text, special=True)])


def _check_class(inner: Any, files: TokenizerFiles) -> None:
    """LlamaTokenizer of transformers 5 replaces the pipeline of tokenizer.json; that of version 4 keeps it."""
    if files.class_name != "LlamaTokenizer":
        return
    document = json.loads(inner.to_str())
    steps = json.dumps(document.get("normalizer"))
    if '"Prepend"' in steps:
        raise DataError(
            _ambiguous(
                files,
                "its tokenizer.json puts '▁' before every text (Prepend), but LlamaTokenizer "
                "of transformers 5 does not before a text that begins with a blank",
            )
        )


def _check_same_ids(inner: Any, files: TokenizerFiles) -> None:
    from tokenizers import Tokenizer

    facts = ask_transformers(files)
    theirs = Tokenizer.from_str(facts.tokenizer)
    theirs.no_truncation()
    theirs.no_padding()
    if (ours := ids_of_probe(inner)) == (found := ids_of_probe(theirs)):
        return
    first = next((pair for pair in zip(ours, found, strict=False) if pair[0] != pair[1]), (len(ours), len(found)))
    theirs_name = f"{facts.class_name} of transformers {facts.version}"
    why = f"{theirs_name} gives {first[1]!r:.80} where tokenizer.json gives {first[0]!r:.80}"
    raise DataError(_ambiguous(files, why))


def _ambiguous(files: TokenizerFiles, why: str) -> str:
    return (
        f"{files.folder}: the ids of this tokenizer are ambiguous: {why}. In a copy of the folder, set tokenizer_class "
        "in tokenizer_config.json to PreTrainedTokenizerFast to have the ids of tokenizer.json, or save it again with "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW) to have those of that class."
    )


def _converted(files: TokenizerFiles) -> ResolvedTokenizer:
    """The tokenizer of a folder without tokenizer.json, converted by transformers."""
    from tokenizers import Tokenizer

    from engine.pretrained.folder import VOCABULARY_FILES

    held = [name for name in VOCABULARY_FILES if (files.folder / name).is_file()]
    if not held:
        raise DataError(
            f"{files.file} is missing: expected a tokenizer.json, or a folder with one, as data.tokenizer (or 'bytes', "
            "'bpe')."
        )
    if not has_transformers():
        raise DataError(
            f"{files.folder} has {', '.join(held)} but no tokenizer.json; converting them needs transformers, which is "
            "not installed here. Install it, or convert elsewhere with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)."
        )
    facts = ask_transformers(files)
    return ResolvedTokenizer(Tokenizer.from_str(facts.tokenizer), facts.special_tokens)
