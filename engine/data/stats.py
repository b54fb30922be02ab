"""The simplest model of text, as the yardstick that a trained model must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.data.shards import TokenShards

if TYPE_CHECKING:
    from engine.data.prepare import PreparedData

_CHUNK_TOKENS = 1 << 22


def unigram_bits_per_byte(prepared: PreparedData) -> float:
    """Bits per byte of the validation text under a model that knows only how frequent each byte is in training.

    Every byte value is counted once more than it occurs, so an unseen byte costs many bits but not infinitely many.
    Ends of documents are left out. Exact for byte-level tokenizers; needs the tokenizer of the data.
    """
    id_bytes = prepared.load_tokenizer().id_bytes()
    train = count_bytes(prepared.train, id_bytes)
    validation = count_bytes(prepared.validation, id_bytes)
    probability = (train + 1) / (train + 1).sum()
    return float(-(validation * np.log2(probability)).sum() / validation.sum())


def count_bytes(shards: TokenShards, id_bytes: list[bytes]) -> npt.NDArray[np.int64]:
    """How often each byte value occurs in the text behind `shards`, int64 [256]."""
    ids = np.zeros(shards.vocab_size, dtype=np.int64)
    for start in range(0, shards.token_count, _CHUNK_TOKENS):
        tokens = shards.read(start, min(_CHUNK_TOKENS, shards.token_count - start))
        ids += np.bincount(tokens, minlength=shards.vocab_size)
    counts = np.zeros(256, dtype=np.int64)
    for index in np.flatnonzero(ids[: len(id_bytes)]):
        text = np.frombuffer(id_bytes[index], dtype=np.uint8)
        counts += ids[index] * np.bincount(text, minlength=256)
    return counts
