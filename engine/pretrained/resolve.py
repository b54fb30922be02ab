"""Resolves the tokenizer of a folder to an object of the library tokenizers: vocabulary, added and special tokens.

Ids are those of AutoTokenizer of transformers 5. The pipeline that its LlamaTokenizer builds from a tokenizer.json is
built here too; other classes that read the file otherwise than it is written are refused where transformers is there to
compare with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.errors import DataError
from engine.config.schema import hash_json
from engine.pretrained.auto_tokenizer import AutoTokenizerFacts, ask_transformers
from engine.pretrained.folder import VOCABULARY_FILES, TokenizerFiles
from engine.pretrained.transformers_process import has_transformers

# Text that tokenizers treat differently: blanks at edges and in runs, digits, scripts, marks, code, control bytes.
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
    """Build the tokenizer of `files`. verify: check that transformers, if installed, gives the same ids.

    Raises DataError when there is none, its files disagree, or transformers gives other ids.
    """
    if not files.file.is_file():
        return _converted(files)
    inner = _rebuilt(_from_file(files), files)
    _add_tokens(inner, files)
    if verify and files.class_name and has_transformers():
        _check_same_ids(inner, files)
    return ResolvedTokenizer(inner, files.special_tokens)


def version_note(files: TokenizerFiles) -> str | None:
    """That the ids are those of transformers 5, where a tokenizer.json as written, which version 4 reads, gives others.

    Compared over `PROBE_TEXTS`. Raises DataError as `resolve_tokenizer`.
    """
    if files.class_name != "LlamaTokenizer" or not files.file.is_file():
        return None
    written = _from_file(files)
    if _ids(written, PROBE_TEXTS) == _ids(_rebuilt(written, files), PROBE_TEXTS):
        return None
    return (
        "its ids are those of transformers 5, which rebuilds this tokenizer (LlamaTokenizer); transformers 4 takes "
        f"{files.file.name} as it is written and gives some texts other ids, such as those that begin with a blank"
    )


def ids_of_probe(inner: Any) -> list[list[int]]:
    """Return the ids of `PROBE_TEXTS` and of every special token between words, special tokens recognised in text."""
    special = sorted(token.content for token in inner.get_added_tokens_decoder().values() if token.special)
    return _ids(inner, [*PROBE_TEXTS, *(f"a {token} b{token}c" for token in special)])


def probe_digest(inner: Any) -> str:
    """Return a hash that is equal for tokenizers that give `PROBE_TEXTS` the same ids."""
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
    """Add the tokens of the files next to tokenizer.json, in the order of transformers.

    The library chooses ids itself, so an id stated by a file may differ from it: refused.
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


def _rebuilt(inner: Any, files: TokenizerFiles) -> Any:
    """`inner` with the pipeline that LlamaTokenizer of transformers 5 builds instead of the one in tokenizer.json.

    Only vocabulary, merges, added tokens and post-processor of the file stay. Other than with version 4, no blank is
    put before a text that begins with one, unless the folder sets `legacy`. A byte-level tokenizer.json is left as it
    is and refused by `verify`, since the class would make other ids of it.

    Source: transformers 5.23, models/llama/tokenization_llama.py and _get_prepend_scheme of convert_slow_tokenizer.py.
    """
    from tokenizers import Tokenizer

    document = json.loads(inner.to_str())
    steps = json.dumps([document["normalizer"], document["pre_tokenizer"]])
    is_metaspace = '"Prepend"' in steps or '"Metaspace"' in steps
    if files.class_name != "LlamaTokenizer" or document["model"]["type"] != "BPE" or not is_metaspace:
        return inner
    prefix = files.settings.get("add_prefix_space")
    has_prefix = True if prefix is None else bool(prefix)
    scheme = ("always" if files.settings.get("legacy", False) else "first") if has_prefix else "never"
    document["model"] |= {"unk_token": None, "fuse_unk": True, "byte_fallback": True, "dropout": None}
    document["normalizer"] = None
    document["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    document["decoder"] = {"type": "Sequence", "decoders": decoders}
    return Tokenizer.from_str(json.dumps(document))


def _check_same_ids(inner: Any, files: TokenizerFiles) -> None:
    from tokenizers import Tokenizer

    facts = ask_transformers(files)
    theirs = Tokenizer.from_str(facts.tokenizer)
    theirs.no_truncation()
    theirs.no_padding()
    if (ours := ids_of_probe(inner)) == (found := ids_of_probe(theirs)):
        return
    ids = next((pair for pair in zip(ours, found, strict=False) if pair[0] != pair[1]), (ours[-1], found[-1]))
    raise DataError(_ambiguous(files, facts, *map(_from_difference, ids, reversed(ids))))


def _from_difference(ids: list[int], others: list[int]) -> str:
    """Return a few of `ids` from the first that differs from `others`."""
    pairs = zip(ids, others, strict=False)
    first = next((at for at, (mine, other) in enumerate(pairs) if mine != other), min(len(ids), len(others)))
    return f"{'... ' * bool(first)}{' '.join(map(str, ids[first : first + 4])) or 'no more'}"


def _ambiguous(files: TokenizerFiles, facts: AutoTokenizerFacts, ours: str, theirs: str) -> str:
    save_again = "save the tokenizer again with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)"
    remedy = f"{save_again} to have the ids of that class"
    if not files.model_type:  # else transformers may use the class of the model instead of tokenizer_class
        remedy += ", or set tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast to have the others"
    return (
        f"{files.folder}: the ids of this tokenizer are ambiguous: {facts.class_name} of transformers {facts.version} "
        f"gives ids {theirs} where tokenizer.json gives {ours}. In a copy of the folder, {remedy}."
    )


def _converted(files: TokenizerFiles) -> ResolvedTokenizer:
    """Load the tokenizer of a folder without tokenizer.json, converted by transformers."""
    from tokenizers import Tokenizer

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
