"""Asks transformers in a process of its own: importing it takes seconds and imports torch, which the front must not.

Answers are JSON documents, cached under names that say what they were made from.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.runs.files import cache_folder, read_json_object

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
_TIMEOUT_S = 900


class TransformersError(Exception):
    """transformers gave no answer; its text is the last line of what it said."""


def has_transformers() -> bool:
    """Return whether this Python can import transformers, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def ask(module: str, folder: Path, cached_as: str) -> Mapping[str, Any]:
    """Return the answer of `python -m MODULE FOLDER OUT`, which writes it to OUT, or an earlier one of this name.

    Args:
        module: That asks transformers.
        folder: Of a Hugging Face model.
        cached_as: Path of the answer in the cache of this user, which must change with whatever the answer depends on.

    Raises:
        TransformersError: There is no answer.
    """
    place = cache_folder() / cached_as
    try:
        found = read_json_object(place)
    except (OSError, ValueError):
        found = None
    if found is None:
        place.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", module, str(folder), str(place)]
        done = subprocess.run(
            argv, env={**os.environ, **_OFFLINE}, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
        found = read_json_object(place) if done.returncode == 0 else None
        if found is None:
            raise TransformersError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return found
