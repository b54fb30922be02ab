"""Sources without files, token sets opened at once, batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from testkit.corpora import write_token_set

from engine.data.sampler import Sampler, Samples
from engine.data.shards import TokenShards, open_token_set
from engine.data.sources import Document, Piece, Source

# Machines under load are slow, so no deadline per example.
quick = settings(deadline=None, max_examples=60)


def make_pieces(*documents: str | Sequence[str], max_bytes: int | None = None) -> list[Piece]:
    """What a source gives of documents, each a text or the pieces of one."""

    def read(path: Path) -> Iterator[Document]:
        for document in documents:
            yield map(Piece, [document] if isinstance(document, str) else document)

    return list(Source("made up", (Path("made-up"),), read).pieces(max_bytes))


def packed(shards: TokenShards, seq_len: int, seed: int, **settings: Any) -> Sampler:
    """Batches of one token set."""
    return Sampler([Samples(shards, seq_len, seed)], **settings)


def make_shards(folder: Path, tokens: Sequence[int], starts: Sequence[int] = (), **changes: Any) -> TokenShards:
    """A foreign token set, with an index of documents where `starts` are given."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(starts):
        np.array(starts, dtype="<i8").tofile(folder / "d.bin")
        changes["documents_file"] = "d.bin"
    return open_token_set(write_token_set(folder, tokens, **changes))
