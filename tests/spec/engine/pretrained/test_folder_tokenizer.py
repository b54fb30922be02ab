"""Tokenizers of model folders: ids, added tokens and special tokens are those of transformers' AutoTokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.config.errors import DataError
from engine.data.tokenizers import load_tokenizer_file, train_bpe
from engine.pretrained.folder import open_tokenizer
from engine.pretrained.resolve import PROBE_TEXTS, version_note

TEXTS = [*PROBE_TEXTS, "a<|new|>b <|im_end|> c</s>d <s>", "hello", " hello", ""]
ALPHABET = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")})
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *ALPHABET,
    "he",
    "hell",
    "hello",
    "▁hello",
]


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(train_bpe(["hello there world " * 9, "größe naïve " * 5], 300).inner.to_str())


def llama2(prefix: str) -> Tokenizer:
    pieces = {piece: index for index, piece in enumerate([*PIECES, "ll"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    inner = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "Prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def unigram() -> Tokenizer:
    pieces = [(piece, -float(index)) for index, piece in enumerate(dict.fromkeys(PIECES))]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    return inner


def word_piece() -> Tokenizer:
    words = {word: index for index, word in enumerate(["[UNK]", "</s>", "hello", "a", "##b", "there", "##ll"])}
    inner = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens(["</s>"])
    return inner


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "byte-level": (byte_level, {"eos_token": "<|endoftext|>"}),
    "metaspace": (lambda: llama2("Metaspace"), {"eos_token": "</s>"}),
    "prepend": (lambda: llama2("Prepend"), {"eos_token": "</s>"}),
    "unigram": (unigram, {"eos_token": "</s>"}),
    "word piece": (word_piece, {"eos_token": "</s>"}),
    "llama class": (lambda: llama2("Metaspace"), {"tokenizer_class": "LlamaTokenizerFast"}),
    "an end that only tokenizer_config.json names": (byte_level, {"eos_token": "<|im_end|>"}),
}
ADDED: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda _: {},
    "tokenizer_config.json": lambda size: {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                str(size): {"content": "<|new|>", "special": True, "normalized": False},
                str(size + 1): {"content": "tool", "special": False, "normalized": True},
            }
        }
    },
    "added_tokens.json": lambda size: {"added_tokens.json": {"<|new|>": size, "tool": size + 1}},
    "special_tokens_map.json": lambda _: {"special_tokens_map.json": {"pad_token": {"content": "<|new|>"}}},
    "extra special tokens": lambda _: {"tokenizer_config.json": {"additional_special_tokens": ["<|new|>"]}},
}


def write(folder: Path, kind: str, added: str = "none", **more: Any) -> Path:
    """A folder with this tokenizer and what its other files add."""
    make, settings = KINDS[kind]
    inner = make()
    inner.save(str(folder / "tokenizer.json"))
    size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    files = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **settings}}
    for name, document in ADDED[added](size).items():
        files[name] = files.get(name, {}) | document
    for name, document in (files | more).items():
        (folder / name).write_text(json.dumps(document))
    return folder


def ids_of(theirs: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(theirs(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", ADDED)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, kind: str, added: str) -> None:
    folder = write(tmp_path, kind, added)
    ours, theirs = load_tokenizer_file(folder), AutoTokenizer.from_pretrained(folder)
    ours.inner.encode_special_tokens = False
    for text in TEXTS:
        assert ours.inner.encode(text, add_special_tokens=False).ids == ids_of(theirs, text), repr(text)
    assert ours.inner.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    assert ours.eod_id == theirs.eos_token_id
    assert ours.special_tokens == {
        name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)
    }


def test_what_is_saved_reads_back_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path, "an end that only tokenizer_config.json names", "tokenizer_config.json")
    saved = tmp_path / "saved"
    saved.mkdir()
    ours = load_tokenizer_file(folder)
    ours.save(saved)
    again = load_tokenizer_file(saved)
    assert again.eod_id == ours.eod_id
    assert again.encode(TEXTS)[5].tolist() == ours.encode(TEXTS)[5].tolist()


def test_a_folder_equals_its_tokenizer_file(tmp_path: Path) -> None:
    folder = write(tmp_path, "byte-level", "added_tokens.json")
    whole, file = load_tokenizer_file(folder), load_tokenizer_file(folder / "tokenizer.json")
    assert whole.encode(TEXTS)[5].tolist() == file.encode(TEXTS)[5].tolist()


def test_without_a_named_end_the_one_of_config_json_counts(tmp_path: Path) -> None:
    write(tmp_path, "byte-level", **{"tokenizer_config.json": {}, "config.json": {"eos_token_id": 7}})
    assert load_tokenizer_file(tmp_path).eod_id == 7


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ends_that_disagree_are_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, "byte-level", **{name: {"eos_token_id": [7, 8]}})
    with pytest.raises(DataError, match=rf"eos_token '<\|endoftext\|>' is id 0, but {name} has eos_token_id \[7, 8\]"):
        load_tokenizer_file(tmp_path)


def test_an_id_that_two_files_give_differently_is_named(tmp_path: Path) -> None:
    write(tmp_path, "byte-level", **{"added_tokens.json": {"<|new|>": 5000}})
    with pytest.raises(DataError, match=r"'<\|new\|>' is id 5000 beside tokenizer.json"):
        load_tokenizer_file(tmp_path)


@pytest.mark.parametrize("legacy", [{}, {"legacy": False}, {"legacy": True}], ids=str)
@pytest.mark.parametrize("prefix", [{}, {"add_prefix_space": None}, {"add_prefix_space": False}], ids=str)
@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
def test_a_llama_2_folder_has_the_ids_of_its_class(
    tmp_path: Path, kind: str, legacy: dict[str, Any], prefix: dict[str, Any]
) -> None:
    """LlamaTokenizer of transformers 5 replaces the pipeline of tokenizer.json."""
    write(tmp_path, kind, **{"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", **legacy, **prefix}})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer_file(tmp_path)
    for text in ("hello", " hello", "  hello there", "größe 🐎", "a</s> b</s>c", "", "\n hello"):
        expected = theirs.encode(text, add_special_tokens=False)
        ours.inner.encode_special_tokens = False
        assert ours.inner.encode(text, add_special_tokens=False).ids == expected, f"other ids of {text!r}"
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True), f"other text of {text!r}"


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_note_names_the_version_whose_ids_are_used(tmp_path: Path, name: str) -> None:
    files = open_tokenizer(write(tmp_path, "prepend", **{"tokenizer_config.json": {"tokenizer_class": name}}))
    theirs = [AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False) for text in PROBE_TEXTS]
    inner = Tokenizer.from_file(str(files.file))
    differs = theirs != [inner.encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS]
    assert (version_note(files) is not None) is differs, "version 5 rebuilds only LlamaTokenizer"


def test_no_note_is_given_where_versions_agree(tmp_path: Path) -> None:
    write(tmp_path, "metaspace", **{"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}})
    (tmp_path / "tokenizer.json").write_text(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.to_str())
    assert version_note(open_tokenizer(tmp_path)) is None


def test_a_prepared_llama_2_tokenizer_reads_back_the_same(tmp_path: Path) -> None:
    write(tmp_path, "prepend", **{"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}})
    ours, saved = load_tokenizer_file(tmp_path), tmp_path / "saved"
    saved.mkdir()
    ours.save(saved)
    assert load_tokenizer_file(saved).inner.encode(" hello").ids == ours.inner.encode(" hello").ids


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["qwen", "other words"])
def test_a_class_that_rebuilds_the_tokenizer_is_compared_with(tmp_path: Path, kind: str) -> None:
    """Qwen2Tokenizer replaces the rule that cuts words: refused where tokenizer.json has another."""
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    write(tmp_path, "byte-level", **{"tokenizer_config.json": settings})
    if kind == "qwen":
        AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        assert load_tokenizer_file(tmp_path, verify=True).eod_id == 0
    else:
        with pytest.raises(DataError, match="Qwen2Tokenizer of transformers"):
            load_tokenizer_file(tmp_path, verify=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["set by the tokenizer", "set by the model"])
def test_a_remedy_for_ambiguous_ids_removes_the_ambiguity(tmp_path: Path, kind: str) -> None:
    name = "Qwen2Tokenizer" if kind == "set by the tokenizer" else "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": name, "eos_token": "<|endoftext|>"}
    more = {"config.json": {"model_type": "qwen2"}} if kind == "set by the model" else {}
    write(tmp_path, "byte-level", **{"tokenizer_config.json": settings}, **more)
    with pytest.raises(DataError, match="ambiguous") as refused:
        load_tokenizer_file(tmp_path, verify=True)
    if "set tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast" in str(refused.value):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert load_tokenizer_file(tmp_path, verify=True).eod_id == 0, str(refused.value)


@pytest.mark.thorough
def test_files_of_a_slow_tokenizer_are_converted_by_transformers(tmp_path: Path) -> None:
    model = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    ours, theirs = load_tokenizer_file(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.inner.encode("hello there größe").ids == ids_of(theirs, "hello there größe")
    assert ours.eod_id == theirs.eos_token_id


def test_a_folder_without_any_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json is missing: expected a"):
        load_tokenizer_file(tmp_path)
