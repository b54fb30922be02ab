"""Batches of packed samples: pure functions of (seed, step), and of where the stream was taken up again.

    documents   a a a E b b E c c c c c E ...      E = end-of-document id
    samples     |a a a E|b b E c|c c c c|E ...     seq_len = 4; the label of every token is the next one

Sample i reads the seq_len + 1 tokens from i * seq_len on. An epoch visits every whole sample once, in an order drawn
from (seed, epoch); what is left at the end of the tokens, less than one sample, is not trained on.

Samples may be divided into classes by length, so that long documents are seen more often (Fu et al. 2024, "Data
Engineering for Scaling Language Models to 128K Context"): a sample belongs to the class of the document that holds most
of its tokens; of equal ones, the first. What is left of a document in another sample counts with its whole length.
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
_CHUNK_TOKENS = 1 << 26  # classified by length at a time, so that memory does not grow with the corpus
BLOCK = 10_000  # samples of a mixture in which every source has exactly its share


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
    """The samples of `shards`, or those of them in `chosen`, epoch after epoch, each in an order of its own."""

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
        """How many there are."""
        return (self.shards.token_count - 1) // self.seq_len if self.chosen is None else self.chosen.size

    def __getitem__(self, number: int) -> int:
        """Which sample of the shards comes as `number` in the endless stream of shuffled epochs."""
        epoch, position = divmod(number, self.per_epoch)
        index = permute(position, self.per_epoch, (self.seed, epoch))
        return index if self.chosen is None else int(self.chosen[index])


class Sampler:
    """Training batches of an endless stream of samples; every rank builds the same one and asks for its own part.

    Sample number (step * grad_accum_steps + micro_step) * dp_size * batch_size + dp_rank * batch_size + b of the
    stream is row b. So the samples of a step do not depend on how its global batch is divided. After `start_at` steps
    count from there, so that a run that goes on with other batches reads nothing twice.

    Without `weights` the stream is that of the one source. With them sources are mixed: of every `BLOCK` samples in a
    row each has its share, spread by chance. Shares are whole numbers of samples per block, at least one. What a source
    gives does not depend on the others: its samples come in the order in which they would without them.

    documents_apart: whether the first token of a document is nobody's label.
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
        self._seed = splitmix64(seed)  # the order inside the sources is drawn from the seed itself
        self._first_step = self._first_sample = 0

    def locate(self, number: int) -> tuple[TokenShards, int]:
        """(shards, which of their samples) of sample `number`."""
        source = 0
        if self.shares:
            block, position = divmod(number, BLOCK)
            drawn = permute(position, BLOCK, (self._seed, block))
            source = bisect_right(self._starts, drawn) - 1
            number = block * self.shares[source] + drawn - self._starts[source]
        samples = self.sources[source]
        return samples.shards, samples[number]

    def start_at(self, step: int, sample: int) -> None:
        """Step `step` (from 0) begins with sample number `sample` of the stream."""
        self._first_step, self._first_sample = step, sample

    def batch(self, step: int, micro_step: int, dp_rank: int, dp_size: int, batch_size: int) -> Batch:
        """The batch of one data-parallel rank in one micro-step; the same arguments always give the same batch."""
        micro_steps = (step - self._first_step) * self.grad_accum_steps + micro_step
        first = self._first_sample + (micro_steps * dp_size + dp_rank) * batch_size
        numbers = tuple(range(first, first + batch_size))
        locations = [self.locate(number) for number in numbers]
        return replace(_collect(self.sources[0].seq_len, locations, self.documents_apart), samples=numbers)


def _shares(weights: Sequence[float]) -> list[int]:
    """Samples per block by weight, largest remainders first; each at least one. Weights are positive numbers."""
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
    """Validation batches of one data-parallel rank, from the start of `shards`, unshuffled, every token once.

    Row b of batch i of rank r of `dp` = (r, ranks) is sample (i * ranks + r) * batch_size + b. The samples are the same
    however many ranks divide them: all of `shards`, or the first `max_samples`. Every rank gets the same number of
    batches; rows past the last sample, and what lies past the end of the tokens, have labels of -100. So a split
    shorter than seq_len works too.
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
    """The image of `position` under a permutation of range(size) drawn from `key`, in constant memory.

    A Feistel network permutes the next power of four above `size`; values outside range(size) walk on along their cycle
    until they fall inside. Plain integers: the same on every machine and with every version of numpy.
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
    """The batch of these samples, a row each; past the end of the shards tokens are padding, labels -100."""
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
        starts = shards.document_offsets(start, ids)  # the last may be that of the next row
        documents.append(starts[starts < max(1, inputs.size)])
        if documents_apart:
            labels[row, starts[1:] - 1] = IGNORE_INDEX
    return Batch(tokens, labels, tuple(documents))


def splitmix64(value: int) -> int:
    """A 64-bit hash of an integer's lower 64 bits: the output of splitmix64 (Steele et al. 2014) in that state."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, eq=False)
class LengthClass:
    """What a corpus has of one class: documents of at least `at_least` tokens and below `below` (null: any length).

    samples: their numbers, ascending. weight: share of those that are trained on.
    """

    at_least: int
    below: int | None
    samples: Ids
    weight: float

    @property
    def name(self) -> str:
        """Which lengths it has, such as "4,096 to 32,767"."""
        return f"{self.at_least:,} and more" if self.below is None else f"{self.at_least:,} to {self.below - 1:,}"


def length_classes(corpus: Samples, config: DataConfig) -> list[LengthClass]:
    """All classes by length of `corpus`. DataError without an index of documents."""
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
    """(samples, weight) of each class by length of `corpus` that is wanted at all; of all of it without such classes.

    Raises DataError when a class that should have a share has no sample.
    """
    if not config.length_buckets:
        return [(corpus, 1.0)]
    classes = length_classes(corpus, config)
    wanted = [one for one in classes if one.weight > 0]
    for one in wanted:
        if not one.samples.size:
            found = "; ".join(f"{other.name}: {other.samples.size:,}" for other in classes)
            raise DataError(
                f"{corpus.shards.folder}: no sample of {corpus.seq_len:,} tokens lies mostly in a document of "
                f"{one.name} tokens, but data.length_weights gives such samples {one.weight:g}. Samples by length of "
                f"document: {found}. Set other data.length_buckets or a weight of 0, or give such documents."
            )
    return [(replace(corpus, chosen=one.samples), one.weight) for one in wanted]


def _document_lengths(shards: TokenShards, samples: range, seq_len: int) -> Ids:
    """Tokens of the document that holds most of each of `samples`, int64 [samples]."""
    begin, end = samples.start * seq_len, samples.stop * seq_len
    edges = shards.document_edges(begin, end - begin)
    if edges is None:
        raise DataError(
            f"{shards.folder}: data.length_buckets needs to know where documents start, but this token set has no "
            "index of them (documents_file in its manifest). Write one, or leave data.length_buckets empty."
        )
    # Stretches that lie in one sample and in one document, in order.
    starts = np.arange(begin, end, seq_len)
    cuts = np.union1d(starts, edges[(edges > begin) & (edges < end)])
    # The largest of these keys in a sample is that of its longest stretch, and among equal ones of the first.
    keys = np.diff(cuts, append=end) * cuts.size + np.arange(cuts.size - 1, -1, -1)
    longest = cuts.size - 1 - np.maximum.reduceat(keys, np.searchsorted(cuts, starts)) % cuts.size
    return np.asarray(np.diff(edges)[np.searchsorted(edges, cuts[longest], side="right") - 1])
