"""Small corpora: texts, records and token sets on disk, and the configurations that read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.config.settings import DataConfig


def text_corpus(folder: Path, *texts: str, **settings: Any) -> DataConfig:
    """Of these documents, to be prepared in `folder`."""
    source = folder / "texts"
    source.mkdir(parents=True)
    for index, text in enumerate(texts):
        (source / f"{index:03d}.txt").write_text(text)
    given = {"format": "text", "paths": (str(source),), "prepared_dir": str(folder / "prepared")}
    return DataConfig(**(given | settings))


def record_corpus(folder: Path, records: Iterable[Mapping[str, object]], **settings: Any) -> DataConfig:
    """Of these records, a fifth of them for validation, to be prepared in `folder`."""
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {"format": "jsonl", "paths": (str(path),), "prepared_dir": str(folder / "prepared")}
    return DataConfig(**(given | {"validation_fraction": 0.2} | settings))


def write_token_set(folder: Path, tokens: Sequence[int], *, dtype: str = "uint16", **changes: Any) -> Path:
    """A token set of one file, as a foreign tool might write it; `changes` go into the manifest (None removes)."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens, dtype=np.dtype(dtype).newbyteorder("<")).tofile(folder / "t.bin")
    manifest = {
        "format": "burst-tokens",
        "version": 1,
        "dtype": dtype,
        "vocab_size": 100,
        "token_count": len(tokens),
        "files": [{"name": "t.bin", "token_count": len(tokens)}],
        **changes,
    }
    text = json.dumps({key: value for key, value in manifest.items() if value is not None})
    (folder / "manifest.json").write_text(text)
    return folder
