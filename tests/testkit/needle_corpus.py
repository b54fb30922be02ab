"""A validation split on disk, of any tokenizer, and the tasks that are made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.data.needles import NeedleTasks
from engine.data.shards import TokenShards, open_token_set
from engine.data.tokenizers import Tokenizer
from testkit.corpora import write_token_set

TEXTS = tuple(f"Document {index}: grey ducks swim, and number {index} of them is at home.\n" * 4 for index in range(12))


def write_split(folder: Path, tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS) -> TokenShards:
    """The texts as a token set, each ended by the tokenizer's own id."""
    ids = np.concatenate([np.append(text, tokenizer.eod_id) for text in tokenizer.encode(texts)])
    write_token_set(folder, ids.tolist(), vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id)
    return open_token_set(folder)


def make_tasks(shards: TokenShards, tokenizer: Tokenizer, seq_len: int, **changes: Any) -> NeedleTasks:
    """Three depths and two samples, unless `changes` say otherwise."""
    return NeedleTasks(shards, tokenizer, seq_len, **{"depths": 3, "samples": 2, "seed": 0, **changes})
