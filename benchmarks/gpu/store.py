"""The results on the disk: replaced whole after every measurement, so a reader never sees half of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import markdown
from benchmarks.gpu.worker import error_text
from engine.runs.files import replace_file, replace_json


def result_stem(device_name: str, date: str, only: Sequence[str] = ()) -> str:
    """gpu_DEVICE_YYYYMM: of a device as its driver names it, and an ISO date; _PART of each part of a session of some,
    which must not replace one of all.
    """
    words = re.sub(r"\([^)]*\)|\b(NVIDIA|Intel|AMD|CPU|Processor|\d+-Core)\b|@.*", " ", device_name)
    short = re.sub(r"[^a-z0-9]+", "", words.lower()) or "unknown"
    parts = dict.fromkeys(entry.partition(":")[0] for entry in only)
    return "_".join(("gpu", short, f"{date[:4]}{date[5:7]}", *parts))


def write_document(document: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """(STEM.json, STEM.md) of the document; each is either the old one or the new one at any moment."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = document["name"]
    json_path, text_path = folder / f"{stem}.json", folder / f"{stem}.md"
    replace_json(json_path, document)
    replace_file(text_path, page(document))
    return json_path, text_path


def page(document: Mapping[str, Any]) -> str:
    """The Markdown page; where rows have another shape than its tables expect, what went wrong instead of it."""
    try:
        return markdown(document)
    except Exception as error:
        return f"The figures of {document['name']}.json could not be shown: {error_text(error)}\n"
