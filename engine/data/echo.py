"""Text that is read twice in a row: the second time it can be told from memory, however long ago it was.

    tokens  a b c d e f g h ...      echo_tokens = 4:  a b c d a b c d e f g h e f g h ...

With train.seq_len twice as long the second half of every sample repeats the first. Small models learn within minutes to
look back over half of their context (Olsson et al. 2022, induction heads), which plain text teaches them far later. So
a toy shows on real text whether a longer context is used.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.data.prepare import PreparedData
from engine.data.shards import Tokens, TokenShards
from engine.runs.files import hash_json


class EchoedShards(TokenShards):
    """`shards` in pieces of `piece_tokens`, each twice in a row; a last piece that is not whole is left out."""

    def __init__(self, shards: TokenShards, piece_tokens: int) -> None:
        self.manifest = shards.manifest
        self.folder = shards.folder
        self.vocab_size = shards.vocab_size
        self.eod_id = shards.eod_id
        self.bos_ids = shards.bos_ids
        self.token_count = shards.token_count // piece_tokens * piece_tokens * 2
        self._shards = shards
        self._piece = piece_tokens

    def read(self, start: int, count: int) -> Tokens:
        """See `TokenShards.read`."""
        if start < 0 or count < 0 or start + count > self.token_count:
            raise IndexError(f"tokens [{start}, {start + count}) of a sequence of {self.token_count}")
        first, places = self._places(start, count)
        return self._shards.read(first, int(places.max(initial=-1)) + 1)[places]

    def is_prompt(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """See `TokenShards.is_prompt`."""
        first, places = self._places(start, count)
        return self._shards.is_prompt(first, int(places.max(initial=-1)) + 1)[places]

    def document_offsets(self, start: int, tokens: Tokens) -> Tokens:
        """Always 0 alone: a boundary would hide what is to be remembered."""
        return np.zeros(1, dtype=np.int64)

    def document_edges(self, start: int, count: int) -> Tokens | None:
        """Null: documents are in pieces."""
        return None

    @property
    def document_count(self) -> int | None:
        """Null: documents are in pieces."""
        return None

    @property
    def text_bytes(self) -> int | None:
        """Null: no text is behind the second reading."""
        return None

    def _places(self, start: int, count: int) -> tuple[int, Tokens]:
        """(first token of the text that is needed, where after it each of [start, start + count) is read)."""
        positions = np.arange(start, start + count, dtype=np.int64)
        sources = positions // (2 * self._piece) * self._piece + positions % self._piece
        first = int(sources.min()) if count else 0
        return first, sources - first


def echoed(data: PreparedData, piece_tokens: int) -> PreparedData:
    """`data`, both splits read in pieces that come twice."""
    return replace(
        data,
        train=EchoedShards(data.train, piece_tokens),
        validation=EchoedShards(data.validation, piece_tokens),
        content_hash=hash_json([data.content_hash, piece_tokens]),
    )
