"""Sources without files, token sets opened at once, batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings
from testkit.corpora import write_token_set

from engine.data.build import Piece, iter_pieces
from engine.data.sampler import Sampler, Samples
from engine.data.shards import TokenShards, open_token_set
from engine.data.sources import Document, Source
from engine.data.texts import Text

# Machines under load are slow, so no deadline per example.
quick = settings(deadline=None, max_examples=60)


def make_source(*documents: str | Sequence[str]) -> Source:
    """A source without files; a document is a text or the pieces of one."""

    def read(path: Path) -> Iterator[Document]:
        for index, document in enumerate(documents):
            parts = [document] if isinstance(document, str) else document
            yield f"document {index}", map(Text, parts)

    return Source("made up", (Path("made-up"),), read)


def make_pieces(*documents: str | Sequence[str], max_bytes: int | None = None) -> list[Piece]:
    return list(iter_pieces(make_source(*documents), max_bytes))


def packed(shards: TokenShards, seq_len: int, seed: int, **settings: Any) -> Sampler:
    """Batches of one token set."""
    return Sampler([Samples(shards, seq_len, seed)], **settings)


def make_shards(folder: Path, tokens: Sequence[int], **changes: Any) -> TokenShards:
    return open_token_set(write_token_set(folder, tokens, **changes))
