"""Loads a folder's tokenizer with transformers in a separate process.

Importing transformers takes seconds and imports torch, which the front of the engine must not; code that a folder
brings along (trust_remote_code) is never run.

    python -m engine.pretrained.auto_tokenizer FOLDER OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.config.errors import DataError
from engine.pretrained.folder import TokenizerFiles
from engine.pretrained.transformers_process import TransformersError, ask
from engine.runs.files import replace_json


@dataclass(frozen=True)
class AutoTokenizerFacts:
    """Result of AutoTokenizer. tokenizer: text of its tokenizer.json. version: version of transformers."""

    tokenizer: str
    special_tokens: Mapping[str, str]
    class_name: str
    version: str


def ask_transformers(files: TokenizerFiles) -> AutoTokenizerFacts:
    """Load a folder with AutoTokenizer.from_pretrained, cached by the content of its files.

    Raises DataError when it cannot load the folder.
    """
    try:
        return AutoTokenizerFacts(
            **ask("engine.pretrained.auto_tokenizer", files.folder, f"tokenizers/{files.digest[:32]}.json")
        )
    except TransformersError as error:
        raise DataError(f"transformers cannot load the tokenizer in {files.folder}: {error}") from error


def main(folder: str, out: str) -> None:
    """Write `AutoTokenizerFacts` of `folder` to the file `out`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    names = {name: getattr(tokenizer, name, None) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    facts = {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special_tokens": {name: str(value) for name, value in names.items() if isinstance(value, str) and value},
        "class_name": type(tokenizer).__name__,
        "version": transformers.__version__,
    }
    json.dumps(facts)
    replace_json(Path(out), facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
