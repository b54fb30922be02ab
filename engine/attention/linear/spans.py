"""Spans of consecutive positions, and which ranks must exchange something about them: plain integers, no torch.

layout zigzag, 8 positions, 2 ranks      rank 0: 0 1 | 6 7      rank 1: 2 3 4 5
spans                                    [0, 2) of rank 0, [2, 6) of rank 1, [6, 8) of rank 0
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from engine.config.errors import ConfigError
from engine.planning.visibility.layout import Layout


class Span(NamedTuple):
    """Positions [start, stop) of one rank; those before and after are another rank's. `row`: the local row of start."""

    rank: int
    start: int
    stop: int
    row: int


class DocumentPart(NamedTuple):
    """Positions [start, stop) of one span that belong to one document, which begins at `document`."""

    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class Spans:
    """All spans of a sequence in order of their positions, and the first positions of its documents.

    Padding at the end counts as a document.
    """

    spans: tuple[Span, ...]
    documents: tuple[int, ...]

    def local(self, rank: int) -> tuple[int, ...]:
        """Return the indexes of a rank's spans, in order of their positions and so of the rank's rows."""
        return self._of_rank.get(rank, ())

    def document_of(self, position: int) -> int:
        """Return the first position of the document that a position belongs to."""
        return self.documents[bisect_right(self.documents, position) - 1]

    def parts(self, index: int) -> tuple[DocumentPart, ...]:
        """Return a span's parts by document."""
        _, start, stop, _ = self.spans[index]
        inside = self.documents[bisect_right(self.documents, start) : bisect_left(self.documents, stop)]
        edges = (start, *inside, stop)
        return tuple(DocumentPart(a, b, self.document_of(a)) for a, b in itertools.pairwise(edges))

    def resets(self, index: int) -> bool:
        """Return whether a document begins in a span, so that nothing before the span is felt after it."""
        _, start, stop, _ = self.spans[index]
        return bisect_left(self.documents, start) < bisect_left(self.documents, stop)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For every span those whose maps make the state before it, in order; () where a document begins.

        The gradient of the state after span i is made of the maps of the spans that have i among their sources.
        """
        sources: list[tuple[int, ...]] = []
        for index, span in enumerate(self.spans):
            if self.document_of(span.start) == span.start:
                sources.append(())
            elif self.resets(index - 1):
                sources.append((index - 1,))
            else:
                sources.append((*sources[index - 1], index - 1))
        return tuple(sources)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For every span those that have it among their sources, the last one first: `sources` of backward."""
        targets: list[list[int]] = [[] for _ in self.spans]
        for index in reversed(range(len(self.spans))):
            for source in self.sources[index]:
                targets[source].append(index)
        return tuple(map(tuple, targets))

    @cached_property
    def _of_rank(self) -> dict[int, tuple[int, ...]]:
        indexes = defaultdict(list)
        for index, span in enumerate(self.spans):
            indexes[span.rank].append(index)
        return {rank: tuple(of_rank) for rank, of_rank in indexes.items()}

    def locate(self, position: int) -> tuple[int, int]:
        """Return the rank that holds a position, and the local row there."""
        span = self.spans[bisect_right(self._starts, position) - 1]
        return span.rank, span.row + position - span.start

    @cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self.spans]


def build_spans(layout: Layout, documents: Sequence[int], seq_len: int) -> Spans:
    """Return the spans of a layout of at least `seq_len` positions; those past it are padding.

    Raises:
        ConfigError: the layout deals out single positions.
    """
    if any(segment.step > 1 for of_rank in layout.segments for segment in of_rank):
        raise ConfigError(
            "layout: striped deals out single positions, but linear attention needs runs of consecutive ones; choose "
            "contiguous, zigzag, chunk_cyclic, per_document or balanced"
        )
    spans = []
    for rank, segments in enumerate(layout.segments):
        row = 0
        for segment in segments:
            spans.append(Span(rank, segment.start, segment.stop, row))
            row += len(segment)
    starts = [0, *documents] + ([seq_len] if layout.seq_len > seq_len else [])
    return Spans(tuple(sorted(spans, key=lambda span: span.start)), tuple(sorted(set(starts))))


class Messages(NamedTuple):
    """What a rank sends to and receives from other ranks: by rank, spans or positions in ascending order."""

    sends: Mapping[int, tuple[int, ...]]
    receives: Mapping[int, tuple[int, ...]]


def state_messages(
    spans: Spans, rank: int, needed: Sequence[Sequence[int]], needed_by: Sequence[Sequence[int]]
) -> Messages:
    """Return the span indexes whose maps a rank exchanges: a map that several spans of a rank need is sent to it once.

    Args:
        spans: Of all ranks.
        rank: Whose messages.
        needed: By every span: `sources`, and in backward `targets`.
        needed_by: The other of the two.
    """
    sends, receives = defaultdict(set), defaultdict(set)
    for index in spans.local(rank):
        for source in needed[index]:
            receives[spans.spans[source].rank].add(source)
        for target in needed_by[index]:
            sends[spans.spans[target].rank].add(index)
    return Messages(_by_peer(sends, rank), _by_peer(receives, rank))


def halo_messages(spans: Spans, rank: int, rows: int) -> Messages:
    """Return the positions that a rank exchanges so that every row has the `rows` rows of its document before it.

    A span shorter than `rows` leaves the rest to the spans before it.
    """
    sends, receives = defaultdict(set), defaultdict(set)
    for span in spans.spans:
        for position in range(max(spans.document_of(span.start), span.start - rows), span.start):
            owner, _ = spans.locate(position)
            if span.rank == rank:
                receives[owner].add(position)
            elif owner == rank:
                sends[span.rank].add(position)
    return Messages(_by_peer(sends, rank), _by_peer(receives, rank))


def _by_peer(items: Mapping[int, set[int]], rank: int) -> dict[int, tuple[int, ...]]:
    return {peer: tuple(sorted(items[peer])) for peer in sorted(items) if peer != rank}
