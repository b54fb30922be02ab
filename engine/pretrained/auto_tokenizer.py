"""Loads a folder's tokenizer with transformers in a separate process.

Importing transformers takes seconds and imports torch, which the front of the engine must not; code that a folder
brings along (trust_remote_code) is never run.

    python -m engine.pretrained.auto_tokenizer FOLDER OUT
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.errors import DataError
from engine.pretrained.folder import TokenizerFiles
from engine.runs.files import cache_folder, read_json_object, replace_json

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
_TIMEOUT_S = 900


@dataclass(frozen=True)
class AutoTokenizerFacts:
    """Result of AutoTokenizer. tokenizer: text of its tokenizer.json. version: version of transformers."""

    tokenizer: str
    special_tokens: Mapping[str, str]
    class_name: str
    version: str


def has_transformers() -> bool:
    """Return whether this Python can import transformers, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def ask_transformers(files: TokenizerFiles) -> AutoTokenizerFacts:
    """Load a folder with AutoTokenizer.from_pretrained, cached by the content of its files.

    Raises DataError when it cannot load the folder.
    """
    place = cache_folder() / "tokenizers" / f"{files.digest[:32]}.json"
    try:
        found: Mapping[str, Any] | None = read_json_object(place)
    except (OSError, ValueError):
        found = None
    if found is None:
        place.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "engine.pretrained.auto_tokenizer", str(files.folder), str(place)]
        done = subprocess.run(
            argv, env={**os.environ, **_OFFLINE}, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
        found = read_json_object(place) if done.returncode == 0 else None
        if found is None:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DataError(f"transformers cannot load the tokenizer in {files.folder}: {why}")
    return AutoTokenizerFacts(**found)


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
