"""Token sets opened at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings

from engine.data.shards import TokenShards, open_token_set
from testkit.corpora import write_token_set

# Machines under load are slow, so no deadline per example.
quick = settings(deadline=None, max_examples=60)


def make_shards(folder: Path, tokens: Sequence[int], starts: Sequence[int] = (), **changes: Any) -> TokenShards:
    """A foreign token set, with an index of documents where `starts` are given."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(starts):
        np.array(starts, dtype="<i8").tofile(folder / "d.bin")
        changes["documents_file"] = "d.bin"
    return open_token_set(write_token_set(folder, tokens, **changes))
