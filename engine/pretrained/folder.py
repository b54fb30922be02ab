"""The one reader of a Hugging Face model folder: config.json, generation_config.json, tokenizer files, chat templates.

Every other module takes these facts from here. Files are read as transformers 5 reads them, without transformers.

    config.json, generation_config.json       the model, and how it generates
    tokenizer.json                            the tokenizer (library tokenizers)
    tokenizer_config.json                     special tokens by name, added tokens, chat templates, tokenizer class
    special_tokens_map.json, added_tokens.json    the same facts in folders without added_tokens_decoder
    chat_template.jinja, additional_chat_templates/NAME.jinja
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError, DataError
from engine.config.schema import hash_json
from engine.runs.files import require_json_object

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES_FOLDER = "additional_chat_templates"
# Vocabularies from which transformers, with its converters, makes the tokenizer of a folder without tokenizer.json.
VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json")
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    *VOCABULARY_FILES,
    TEMPLATE_FILE,
)
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
SPECIAL_TOKEN_NAMES = tuple(f"{name}_token" for name in _NAMES)
# transformers 5.23: defaults in the signatures of tokenizer classes, for names that no file gives.
# Source: models/{llama/tokenization_llama,qwen2/tokenization_qwen2,gpt2/tokenization_gpt2}.py.
CLASS_SPECIAL_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
# The class that transformers 5.23 prefers for a model_type. Source: models/auto/tokenization_auto.py.
_CLASS_OF_MODEL = {"mistral": "TokenizersBackend", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_DISTRUSTED_MODELS = frozenset({"qwen2"})  # of these tokenizer_config.json's tokenizer_class is ignored
# Classes that take tokenizer.json as it is; every other one rebuilds parts of it.
_GENERIC_CLASSES = frozenset({"", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"})


@dataclass(frozen=True)
class AddedToken:
    """A token beside the vocabulary of the model, with its flags. index: its id where the file states one."""

    content: str
    index: int | None = None
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class ChatSource:
    """The text of a chat template. place: the file it was read from, for errors."""

    place: str
    text: str


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a folder, as its files state it.

    file: the tokenizer.json, which need not exist (`VOCABULARY_FILES`). settings: tokenizer_config.json.
    stated_ends: token ids that config.json and generation_config.json of the folder name as eos_token_id, by file.
    """

    folder: Path
    file: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    added_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    stated_ends: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def class_name(self) -> str:
        """The class, without "Fast", by which transformers reads these files; empty for one that changes nothing."""
        stated = str(self.settings.get("tokenizer_class") or "").removesuffix("Fast")
        registered = _CLASS_OF_MODEL.get(self.model_type or "", "")
        if registered in _GENERIC_CLASSES and registered:
            return ""
        name = registered if not stated or self.model_type in _DISTRUSTED_MODELS else stated
        return "" if name in _GENERIC_CLASSES else name

    @property
    def _has_decoder(self) -> bool:
        # Without this key transformers falls back to special_tokens_map.json, which then wins, and added_tokens.json.
        return "added_tokens_decoder" in self.settings

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Name -> text of every special token that the files name, such as bos_token, with those of the class."""
        tokens = dict(CLASS_SPECIAL_TOKENS.get(self.class_name, {}))
        for source in (self.settings, {} if self._has_decoder else self.special_tokens_map):
            for name, value in source.items():
                if not name.endswith("_token"):
                    continue
                if (text := _token_text(value)) is not None:
                    tokens[name] = text
                elif value is None:
                    tokens.pop(name, None)
        return tokens

    @cached_property
    def extra_special_tokens(self) -> tuple[str, ...]:
        """Special tokens without a name of their own."""
        settings: Mapping[str, Any] = (
            self.settings if self._has_decoder else {**self.settings, **self.special_tokens_map}
        )
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
        values = extra.values() if isinstance(extra, Mapping) else extra
        return tuple(text for value in values if (text := _token_text(value)) is not None)

    @cached_property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        """Tokens that the files beside tokenizer.json add, ascending by id. Raises DataError for malformed entries."""
        if self._has_decoder:
            path = self.folder / TOKENIZER_CONFIG_FILE
            decoder = self.settings["added_tokens_decoder"]
            entries = decoder.items() if isinstance(decoder, Mapping) else [(decoder, decoder)]
            found = [_added_token(index, value, path) for index, value in entries]
        else:
            special = {*self.special_tokens.values(), *self.extra_special_tokens}
            path = self.folder / ADDED_TOKENS_FILE
            found = [
                _added_token(index, {"content": content, "special": content in special}, path)
                for content, index in self.added_tokens_map.items()
            ]
        return tuple(sorted(found, key=lambda token: token.index or 0))

    @cached_property
    def chat_templates(self) -> Mapping[str, ChatSource]:
        """Name -> source; "default" is the one without a name. Files win over tokenizer_config.json."""
        files = dict(self._template_files())
        if files:
            return files
        place, found = str(self.folder / TOKENIZER_CONFIG_FILE), self.settings.get("chat_template")
        if isinstance(found, str):
            return {"default": ChatSource(place, found)}
        if isinstance(found, Mapping):
            found = [{"name": name, "template": text} for name, text in found.items()]
        entries = [entry for entry in found or () if isinstance(entry, Mapping)]
        pairs = ((entry.get("name"), entry.get("template")) for entry in entries)
        return {
            name: ChatSource(place, text) for name, text in pairs if isinstance(name, str) and isinstance(text, str)
        }

    def _template_files(self) -> Iterator[tuple[str, ChatSource]]:
        paths = {"default": self.folder / TEMPLATE_FILE}
        paths |= {path.stem: path for path in sorted((self.folder / MORE_TEMPLATES_FOLDER).glob("*.jinja"))}
        for name, path in paths.items():
            if not path.is_file():
                continue
            try:
                yield name, ChatSource(str(path), path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"cannot read {path}: {error}; expected a chat template.") from None

    @property
    def model_max_length(self) -> int | None:
        """Tokens of the longest text; None where no file states it."""
        value = self.settings.get("model_max_length")
        return int(value) if isinstance(value, int | float) and 0 < value < 1 << 60 else None

    @cached_property
    def digest(self) -> str:
        """Hash over everything that decides ids: equal files, equal ids."""
        facts: dict[str, Any] = {
            "settings": {key: value for key, value in self.settings.items() if key != "chat_template"},
            "special_tokens_map": self.special_tokens_map,
            "added_tokens_map": self.added_tokens_map,
            "class": self.class_name,
            "ends": self.stated_ends,
        }
        for path in (self.file, *(self.folder / name for name in VOCABULARY_FILES)):
            if path.is_file():
                with path.open("rb") as file:
                    facts[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return hash_json(facts)


@dataclass(frozen=True)
class ModelFolder:
    """A folder of Hugging Face. tokenizer: None where there are no tokenizer files."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer: TokenizerFiles | None


def open_model_folder(path: Path) -> ModelFolder:
    """The facts of a model folder. Raises ConfigError without a readable config.json, DataError for other files."""
    config = require_json_object(path / CONFIG_FILE, "the folder of a Hugging Face model", ConfigError)
    generation = _optional(path / GENERATION_CONFIG_FILE, "how a model generates")
    return ModelFolder(path, config, generation, find_tokenizer(path))


def find_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a folder, or None where it has no file of a tokenizer."""
    names = (TOKENIZER_FILE, *VOCABULARY_FILES)
    return open_tokenizer(folder) if any((folder / name).is_file() for name in names) else None


def open_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of a folder, or of a tokenizer.json and the files beside it; whether there is one is not checked.

    Raises DataError for a file that cannot be read.
    """
    folder, file = (path, path / TOKENIZER_FILE) if path.is_dir() else (path.parent, path)
    what = "the settings of a tokenizer"
    config = _optional(folder / CONFIG_FILE, "a model")
    documents = {CONFIG_FILE: config, GENERATION_CONFIG_FILE: _optional(folder / GENERATION_CONFIG_FILE, "a model")}
    ends = {name: ids for name, document in documents.items() if (ids := token_ids(document.get("eos_token_id")))}
    return TokenizerFiles(
        folder,
        file,
        _optional(folder / TOKENIZER_CONFIG_FILE, what),
        _optional(folder / SPECIAL_TOKENS_FILE, what),
        _optional(folder / ADDED_TOKENS_FILE, what),
        config.get("model_type"),
        ends,
    )


def _optional(path: Path, what: str) -> Mapping[str, Any]:
    return require_json_object(path, what, DataError) if path.is_file() else {}


def token_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id: null, one id or several."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _added_token(index: Any, value: Any, path: Path) -> AddedToken:
    try:
        flags = {key: bool(value.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
        normalized = bool(value.get("normalized", not flags["special"]))
        if not isinstance(value["content"], str):
            raise TypeError("content is no text")
        return AddedToken(value["content"], int(index), normalized=normalized, **flags)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(
            f"{path}: the added token {index!r}: {value!r:.80} cannot be read; expected an id and its content."
        ) from None
