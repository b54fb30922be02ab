"""Batches of packed samples, as pure functions of the seed, the step, and the position where the stream was resumed.

    documents   a a a E b b E c c c c c E ...      E = end-of-document id
    samples     |a a a E|b b E c|c c c c|E ...     seq_len = 4; the label of every token is the next one

Sample i has the seq_len + 1 tokens from i * seq_len on. An epoch visits every complete sample once, in an order drawn
from (seed, epoch); the incomplete sample at the end of the tokens is not used.

Samples may be weighted by document length, so that long documents are sampled more often (Fu et al. 2024, "Data
Engineering for Scaling Language Models to 128K Context"). A sample belongs to the class of the document with most of
its tokens, the first of equal ones; the part of a document in another sample counts with the document's whole length.
Class i has documents of at least buckets[i - 1] and below buckets[i] tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.shards import TokenShards
from engine.data.tokenizers import Ids

IGNORE_INDEX = -100
_FEISTEL_ROUNDS = 8
_MASK = (1 << 64) - 1
_CHUNK_TOKENS = 1 << 26  # classified by length together, so that memory does not grow with the corpus
BLOCK = 10_000  # consecutive samples of a mixture in which every source has exactly its share


@dataclass(frozen=True)
class Batch:
    """`batch_size` packed samples.

    tokens, labels: int64 [batch_size, seq_len]; labels[b, t] is the token after tokens[b, t], or -100: at prompts, past
    the end of the corpus (validation only), and at the end of a document where documents are apart. documents[b]:
    offsets in row b at which a document starts, ascending, the first is always 0; with seq_len appended they are the
    row's cu_seqlens. samples[b]: number of row b in the stream that training reads; empty where there is no such stream
    (validation).
    """

    tokens: Ids
    labels: Ids
    documents: tuple[Ids, ...]
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of `shards`, or those in `chosen`, as an endless stream of epochs, each in a different order."""

    shards: TokenShards
    seq_len: int
    seed: int
    chosen: Ids | None = None

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            tokens, seq_len = self.shards.token_count, self.seq_len
            raise DataError(
                f"{self.shards.folder}: the training split has {tokens:,} tokens, but seq_len={seq_len:,} needs at "
                f"least {seq_len + 1:,}. Set train.seq_len to at most {max(1, tokens - 1):,} or give more text "
                "(data.paths, data.max_bytes)."
            )
        if self.chosen is None and self.shards.learned_count(1, self.per_epoch * self.seq_len) == 0:
            raise DataError(
                f"{self.shards.folder}: no token of the {self.per_epoch:,} training samples of seq_len="
                f"{self.seq_len:,} tokens is learned: all of them are prompts, so there is no loss. Set another "
                "train.seq_len or give more text that is learned."
            )

    @property
    def per_epoch(self) -> int:
        """Samples per epoch."""
        return (self.shards.token_count - 1) // self.seq_len if self.chosen is None else self.chosen.size

    def __getitem__(self, number: int) -> int:
        """Return the index in the shards of sample `number` of the endless stream of shuffled epochs."""
        epoch, position = divmod(number, self.per_epoch)
        index = permute(position, self.per_epoch, (self.seed, epoch))
        return index if self.chosen is None else int(self.chosen[index])


class Sampler:
    """Training batches of an endless stream of samples; every rank builds the same one and reads its part.

    Row b of a batch is sample (step * grad_accum_steps + micro_step) * dp_size * batch_size + dp_rank * batch_size + b
    of the stream, so the samples of a step do not depend on how its global batch is divided. After `start_at` steps
    count from there, so that a run resumed with another batch size reads no sample twice.

    With `weights` sources are mixed: of every `BLOCK` consecutive samples each source has its share, at random
    positions. Shares are whole numbers of samples per block, at least one. The order of a source's samples does not
    depend on the others.

    documents_apart: whether the first token of a document is no label.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        weights: Sequence[float] = (),
        *,
        seed: int = 0,
        grad_accum_steps: int = 1,
        documents_apart: bool = False,
    ) -> None:
        self.sources, self.grad_accum_steps, self.documents_apart = tuple(sources), grad_accum_steps, documents_apart
        self.shares = _shares(weights)
        self._starts = list(accumulate(self.shares, initial=0))[:-1]
        self._seed = splitmix64(seed)  # the order within sources uses the seed itself
        self._first_step = self._first_sample = 0

    def locate(self, number: int) -> tuple[TokenShards, int]:
        """Return the shards and the index in them of sample `number` of the stream."""
        source = 0
        if self.shares:
            block, position = divmod(number, BLOCK)
            drawn = permute(position, BLOCK, (self._seed, block))
            source = bisect_right(self._starts, drawn) - 1
            number = block * self.shares[source] + drawn - self._starts[source]
        samples = self.sources[source]
        return samples.shards, samples[number]

    def start_at(self, step: int, sample: int) -> None:
        """Make step `step` (from 0) begin with sample number `sample` of the stream."""
        self._first_step, self._first_sample = step, sample

    def batch(self, step: int, micro_step: int, dp_rank: int, dp_size: int, batch_size: int) -> Batch:
        """Return the batch of one data-parallel rank in one micro-step, a pure function of its arguments."""
        micro_steps = (step - self._first_step) * self.grad_accum_steps + micro_step
        first = self._first_sample + (micro_steps * dp_size + dp_rank) * batch_size
        numbers = tuple(range(first, first + batch_size))
        locations = [self.locate(number) for number in numbers]
        return replace(_collect(self.sources[0].seq_len, locations, self.documents_apart), samples=numbers)


def _shares(weights: Sequence[float]) -> list[int]:
    """Return samples per block for positive `weights`, by largest remainders, each at least one."""
    total = sum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    found = [max(1, int(share)) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: int(exact[index]) - exact[index])
    for index in by_rest * BLOCK:
        if sum(found) == BLOCK:
            break
        found[index] += 1 if sum(found) < BLOCK else -(found[index] > 1)
    return found


def sequential_batches(
    shards: TokenShards,
    seq_len: int,
    *,
    batch_size: int,
    dp: tuple[int, int] = (0, 1),
    max_samples: int | None = None,
    documents_apart: bool = False,
) -> Iterator[Batch]:
    """Yield validation batches of one data-parallel rank, from the start of `shards`, unshuffled, every token once.

    Row b of batch i of rank r of `dp` = (r, ranks) is sample (i * ranks + r) * batch_size + b. They do not depend
    on the number of ranks: all of `shards`, or the first `max_samples`. Every rank gets equally many batches; rows past
    the last sample and positions past the end of the tokens have label -100, so a split may be shorter than seq_len.
    """
    dp_rank, dp_size = dp
    if shards.token_count < 2:
        raise DataError(
            f"{shards.folder}: the validation split has {shards.token_count} tokens; at least 2 are needed. Set "
            "another data.validation_fraction or give more text."
        )
    samples = -(-(shards.token_count - 1) // seq_len)
    samples = samples if max_samples is None else min(samples, max_samples)
    for index in range(-(-samples // (dp_size * batch_size))):
        first = (index * dp_size + dp_rank) * batch_size
        batch = _collect(seq_len, [(shards, first + row) for row in range(batch_size)], documents_apart)
        batch.labels[max(0, samples - first) :] = IGNORE_INDEX
        yield batch


def permute(position: int, size: int, key: tuple[int, int]) -> int:
    """Return the image of `position` under a permutation of range(size) drawn from `key`, in constant memory.

    A Feistel network permutes the next power of four above `size`; values outside range(size) are permuted again until
    they are inside (cycle walking). Plain integers: equal on every machine and with every version of numpy.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    round_key = splitmix64(splitmix64(key[0]) ^ key[1])
    value = position
    while True:
        left, right = value >> half_bits, value & half_mask
        for index in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (splitmix64(round_key + (index << 56) + right) & half_mask)
        value = left << half_bits | right
        if value < size:
            return value


def _collect(seq_len: int, locations: Sequence[tuple[TokenShards, int]], documents_apart: bool) -> Batch:
    """Build the batch of these samples, one per row; past the end of the shards tokens are padding, labels -100."""
    shape = (len(locations), seq_len)
    tokens = np.empty(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    documents = []
    for row, (shards, sample) in enumerate(locations):
        tokens[row] = shards.manifest.eod_id or 0
        start = min(sample * seq_len, shards.token_count - 1)
        ids = shards.read(start, min(seq_len + 1, shards.token_count - start))
        inputs = ids[:-1]
        tokens[row, : inputs.size] = inputs
        labels[row, : inputs.size] = np.where(shards.is_prompt(start + 1, inputs.size), IGNORE_INDEX, ids[1:])
        starts = shards.document_offsets(start, ids)  # the last may be at the first token of the next row
        documents.append(starts[starts < max(1, inputs.size)])
        if documents_apart:
            labels[row, starts[1:] - 1] = IGNORE_INDEX
    return Batch(tokens, labels, tuple(documents))


def splitmix64(value: int) -> int:
    """Hash an integer's lower 64 bits: the output of splitmix64 (Steele et al. 2014) in that state."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, eq=False)
class LengthClass:
    """The documents of one class in a corpus: those of at least `at_least` tokens and below `below` (null: any length).

    samples: their numbers, ascending. weight: share of those that are trained on.
    """

    at_least: int
    below: int | None
    samples: Ids
    weight: float

    @property
    def name(self) -> str:
        """Its range of lengths, such as "4,096 to 32,767"."""
        return f"{self.at_least:,} and more" if self.below is None else f"{self.at_least:,} to {self.below - 1:,}"


def length_classes(corpus: Samples, config: DataConfig) -> list[LengthClass]:
    """Return the length classes of `corpus`. Raises DataError without an index of documents."""
    step = max(1, _CHUNK_TOKENS // corpus.seq_len)
    chunks = (range(first, min(first + step, corpus.per_epoch)) for first in range(0, corpus.per_epoch, step))
    lengths = np.concatenate([_document_lengths(corpus.shards, samples, corpus.seq_len) for samples in chunks])
    classes = np.searchsorted(np.asarray(config.length_buckets), lengths, side="right")
    edges = pairwise((1, *config.length_buckets, None))
    return [
        LengthClass(low or 1, high, np.flatnonzero(classes == index), weight)
        for index, ((low, high), weight) in enumerate(zip(edges, config.length_weights, strict=True))
    ]


def by_length(corpus: Samples, config: DataConfig) -> list[tuple[Samples, float]]:
    """Return the samples and weight of each length class of `corpus` with a weight; without classes, of all samples.

    Raises DataError if a class with a weight has no sample.
    """
    if not config.length_buckets:
        return [(corpus, 1.0)]
    classes = length_classes(corpus, config)
    weighted = [length_class for length_class in classes if length_class.weight > 0]
    for length_class in weighted:
        if not length_class.samples.size:
            counts = "; ".join(f"{other.name}: {other.samples.size:,}" for other in classes)
            raise DataError(
                f"{corpus.shards.folder}: no sample of {corpus.seq_len:,} tokens is mostly in a document of "
                f"{length_class.name} tokens, but data.length_weights gives such samples {length_class.weight:g}. "
                f"Samples by length of document: {counts}. Set other data.length_buckets or a weight of 0, or give "
                "such documents."
            )
    return [(replace(corpus, chosen=length_class.samples), length_class.weight) for length_class in weighted]


def _document_lengths(shards: TokenShards, samples: range, seq_len: int) -> Ids:
    """Return the length of the document with most tokens of each of `samples`, [samples] int64."""
    begin, end = samples.start * seq_len, samples.stop * seq_len
    edges = shards.document_edges(begin, end - begin)
    if edges is None:
        raise DataError(
            f"{shards.folder}: data.length_buckets needs to know where documents start, but this token set has no "
            "index of them (documents_file in its manifest). Write one, or leave data.length_buckets empty."
        )
    # Spans within one sample and one document, in order.
    starts = np.arange(begin, end, seq_len)
    cuts = np.union1d(starts, edges[(edges > begin) & (edges < end)])
    # The largest of these keys in a sample is that of its longest span, the first of equal ones.
    keys = np.diff(cuts, append=end) * cuts.size + np.arange(cuts.size - 1, -1, -1)
    longest = cuts.size - 1 - np.maximum.reduceat(keys, np.searchsorted(cuts, starts)) % cuts.size
    return np.asarray(np.diff(edges)[np.searchsorted(edges, cuts[longest], side="right") - 1])
