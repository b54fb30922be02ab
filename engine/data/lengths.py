"""Samples in classes by the length of their documents, so that long documents can be seen more often.

    documents   a a a a a a a a b b c c ...     buckets = (4,): class 0 has documents below 4 tokens, class 1 the others
    samples     |a a a a|a a a a|b b c c|...    class 1, class 1, class 0

A sample belongs to the class of the document that holds most of its tokens; of equal ones, the first. What is left of a
document in another sample counts with its whole length. Upsampling by length within each corpus is the recipe of Fu et
al. 2024, "Data Engineering for Scaling Language Models to 128K Context".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.data.sampler import Samples
from engine.data.shards import TokenShards

Lengths = npt.NDArray[np.int64]

_CHUNK_TOKENS = 1 << 26  # classified at a time, so that memory does not grow with the corpus


@dataclass(frozen=True)
class LengthRule:
    """Classes of documents by length, and their shares of the samples.

    buckets: lengths in tokens, ascending; class i has documents of at least buckets[i - 1] and below buckets[i] tokens.
    weights: one per class, >= 0, of sum 1. Without buckets there is one class, of everything.
    """

    buckets: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buckets)


@dataclass(frozen=True)
class LengthClass:
    """What a corpus has of one class: documents of at least `at_least` tokens and below `below` (null: any length).

    samples: of an epoch, seq_len `tokens` each. share: of all samples. weight: share of those that are trained on.
    """

    at_least: int
    below: int | None
    samples: int
    tokens: int
    share: float
    weight: float

    @property
    def name(self) -> str:
        """Which lengths it has, such as "4,096 to 32,767"."""
        return f"{self.at_least:,} and more" if self.below is None else f"{self.at_least:,} to {self.below - 1:,}"

    @property
    def is_missing(self) -> bool:
        """Whether it should have a share and has no sample."""
        return self.weight > 0 and self.samples == 0


def by_length(corpus: Samples, rule: LengthRule) -> tuple[list[Samples], list[float]]:
    """(samples, weights) of the classes of `corpus` that are wanted at all.

    Raises DataError when a class that should have a share has no sample.
    """
    classes = classify(corpus, rule.buckets)
    described = _describe(classes, corpus.seq_len, rule)
    for one in described:
        if one.is_missing:
            found = "; ".join(f"{other.name}: {other.samples:,}" for other in described)
            raise DataError(
                f"{corpus.shards.folder}: no sample of {corpus.seq_len:,} tokens lies mostly in a document of "
                f"{one.name} tokens, but data.length_weights gives such samples {one.weight:g}. Samples by length of "
                f"document: {found}. Set other data.length_buckets or a weight of 0, or give such documents."
            )
    wanted = [index for index, weight in enumerate(rule.weights) if weight > 0]
    chosen = [np.flatnonzero(classes == index) for index in wanted]
    return [Samples(corpus.shards, corpus.seq_len, corpus.seed, one) for one in chosen], [
        rule.weights[index] for index in wanted
    ]


def length_classes(shards: TokenShards, seq_len: int, rule: LengthRule) -> list[LengthClass]:
    """What `shards` have of each class. Raises DataError without an index of documents or a whole sample."""
    return _describe(classify(Samples(shards, seq_len, 0), rule.buckets), seq_len, rule)


def _describe(classes: Lengths, seq_len: int, rule: LengthRule) -> list[LengthClass]:
    counts = np.bincount(classes, minlength=len(rule.weights)).tolist()
    edges = (1, *rule.buckets, None)
    return [
        LengthClass(low or 1, high, count, count * seq_len, count / classes.size, weight)
        for low, high, count, weight in zip(edges, edges[1:], counts, rule.weights, strict=False)
    ]


def classify(corpus: Samples, buckets: Sequence[int], *, chunk_tokens: int = _CHUNK_TOKENS) -> Lengths:
    """The class of every sample of an epoch, int64 [samples_per_epoch]. DataError without an index of documents."""
    step = max(1, chunk_tokens // corpus.seq_len)
    lengths = [
        _document_lengths(corpus.shards, first, min(step, corpus.per_epoch - first), corpus.seq_len)
        for first in range(0, corpus.per_epoch, step)
    ]
    return np.searchsorted(np.asarray(buckets, dtype=np.int64), np.concatenate(lengths), side="right")


def _document_lengths(shards: TokenShards, first: int, samples: int, seq_len: int) -> Lengths:
    """Tokens of the document that holds most of each of `samples` samples from `first` on, int64 [samples]."""
    begin, end = first * seq_len, (first + samples) * seq_len
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
