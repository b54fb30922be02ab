"""Batches of packed samples: pure functions of (seed, step), without state to save or restore.

    documents   a a a E b b E c c c c c E ...      E = end-of-document id
    samples     |a a a E|b b E c|c c c c|E ...     seq_len = 4; the label of every token is the next one

Sample i reads the seq_len + 1 tokens from i * seq_len on. An epoch visits every whole sample once, in an order drawn
from (seed, epoch); what is left at the end of the tokens, less than one sample, is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.data.shards import TokenShards
from engine.errors import DataError

IGNORE_INDEX = -100
_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 8


@dataclass(frozen=True)
class Batch:
    """`batch_size` packed samples.

    tokens, labels: int64 [batch_size, seq_len]; labels[b, t] is the token after tokens[b, t], or -100 past the end of
    the corpus (validation only). documents[b]: offsets in row b at which a document starts, ascending, the first is
    always 0; with seq_len appended they are the row's cu_seqlens.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    documents: tuple[npt.NDArray[np.int64], ...]


class PackedSampler:
    """Training batches of `shards`; every rank builds the same sampler and asks for its own part.

    Sample number (step * grad_accum_steps + micro_step) * dp_size * batch_size + dp_rank * batch_size + b of the
    endless stream of epochs is row b. So the samples of a step do not depend on how its global batch is divided.
    """

    def __init__(self, shards: TokenShards, seq_len: int, seed: int, *, grad_accum_steps: int = 1) -> None:
        if seq_len < 1 or grad_accum_steps < 1:
            raise ValueError(f"seq_len={seq_len} and grad_accum_steps={grad_accum_steps} must be at least 1")
        self.shards = shards
        self.seq_len = seq_len
        self.seed = seed
        self.grad_accum_steps = grad_accum_steps
        self.samples_per_epoch = (shards.token_count - 1) // seq_len
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{shards.folder}: the training split has {shards.token_count:,} tokens, but seq_len={seq_len:,} needs "
                f"at least {seq_len + 1:,}. Set train.seq_len to at most {max(1, shards.token_count - 1):,} or "
                "give more text (data.paths, data.max_bytes)."
            )

    def batch(self, step: int, micro_step: int, dp_rank: int, dp_size: int, batch_size: int) -> Batch:
        """The batch of one data-parallel rank in one micro-step; the same arguments always give the same batch."""
        if not (0 <= micro_step < self.grad_accum_steps and 0 <= dp_rank < dp_size and batch_size > 0 <= step):
            raise ValueError(
                f"step={step} micro_step={micro_step} of {self.grad_accum_steps}, dp_rank={dp_rank} of {dp_size}, "
                f"batch_size={batch_size}"
            )
        first = ((step * self.grad_accum_steps + micro_step) * dp_size + dp_rank) * batch_size
        samples = [self.sample_at(first + row) for row in range(batch_size)]
        return _collect(self.shards, self.seq_len, samples)

    def sample_at(self, number: int) -> int:
        """Which sample of the shards comes as `number` in the endless stream of shuffled epochs."""
        epoch, position = divmod(number, self.samples_per_epoch)
        return permute(position, self.samples_per_epoch, (self.seed, epoch))


def sequential_batches(
    shards: TokenShards,
    seq_len: int,
    *,
    batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Validation batches of one data-parallel rank, from the start of `shards`, unshuffled, every token once.

    Row b of batch i is sample (i * dp_size + dp_rank) * batch_size + b. Every rank gets the same number of batches (at
    most `max_batches`); what lies past the end of the tokens is filled up with labels of -100. So a split shorter than
    seq_len works too.
    """
    if shards.token_count < 2:
        raise DataError(
            f"{shards.folder}: the validation split has {shards.token_count} tokens; at least 2 are needed."
        )
    samples = -(-(shards.token_count - 1) // seq_len)
    batches = -(-samples // (dp_size * batch_size))
    for index in range(batches if max_batches is None else min(batches, max_batches)):
        first = (index * dp_size + dp_rank) * batch_size
        yield _collect(shards, seq_len, range(first, first + batch_size))


def permute(position: int, size: int, key: tuple[int, int]) -> int:
    """The image of `position` under a permutation of range(size) drawn from `key`, in constant memory.

    A Feistel network permutes the next power of four above `size`; values outside range(size) walk on along their cycle
    until they fall inside. Plain integers: the same on every machine and with every version of numpy.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    round_key = _mix(_mix(key[0] & _MASK) ^ (key[1] & _MASK))
    value = position
    while True:
        left, right = value >> half_bits, value & half_mask
        for index in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(round_key + (index << 56) + right) & half_mask)
        value = left << half_bits | right
        if value < size:
            return value


def _mix(value: int) -> int:
    """A 64-bit hash of a 64-bit integer (the output function of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _collect(shards: TokenShards, seq_len: int, samples: list[int] | range) -> Batch:
    """The batch whose row b is sample samples[b]; past the end of the shards tokens are padding, labels -100."""
    shape = (len(samples), seq_len)
    tokens = np.full(shape, shards.eod_id or 0, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    documents = []
    for row, sample in enumerate(samples):
        start = min(sample * seq_len, shards.token_count - 1)
        ids = shards.read(start, min(seq_len + 1, shards.token_count - start))
        inputs = ids[:-1]
        tokens[row, : inputs.size] = inputs
        labels[row, : inputs.size] = ids[1:]
        documents.append(shards.document_offsets(start, inputs))
    return Batch(tokens, labels, tuple(documents))
