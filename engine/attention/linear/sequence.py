"""What linear layers need to know of sequences that ranks share: spans, documents, and the way to the other ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.linear.spans import DocumentPart, Span, Spans, halo_messages, state_messages
from engine.attention.transport import P2POp, Transport
from engine.planning.program.ops import Channel


class ChunkMasks(NamedTuple):
    """Which rows of every chunk of C rows belong to the same document, where there are several.

    same      [chunks, 1, C, C] two rows of one document
    first     [chunks, 1, C, 1] rows of the document that the row before the chunk belongs to
    last      [chunks, 1, C, 1] rows of the document that the chunk ends with
    unbroken  [chunks, 1, 1, 1] no document begins in the chunk
    """

    same: Tensor
    first: Tensor
    last: Tensor
    unbroken: Tensor


class Halo(NamedTuple):
    """Where the columns of a short convolution come from.

    sends     by rank: local rows that it needs
    receives  by rank: how many rows come from it
    columns   [n] index into local rows, received rows and one column of zeros, in this order: every part of a document
              with the rows before it
    results   [T] index into `columns` of the local rows
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, int]
    columns: Tensor
    results: Tensor


class LinearSequence:
    """Sequences of one length on one rank, for linear layers; made by `SequenceContext.linear`.

    Holds no tensor of a sequence. All ranks that share the sequences must call the functions that take it equally
    often in the same order, and run backward through them.
    """

    def __init__(
        self,
        spans: Spans,
        rank: int,
        transport: Transport,
        channel: Channel | None,
        device: torch.device,
    ) -> None:
        """`channel`: any that the transport has between all ranks; None for a rank alone."""
        self.spans, self.rank, self.device = spans, rank, device
        self.calls = 0  # of functions that take it, on this rank
        self.transport, self._channel = transport, channel
        self.forward_messages = state_messages(spans, rank, spans.sources, spans.targets)
        self.backward_messages = state_messages(spans, rank, spans.targets, spans.sources)
        self.halo = functools.cache(self._build_halo)
        self.chunk_masks = functools.cache(self._build_chunk_masks)

    @property
    def local_spans(self) -> list[Span]:
        """This rank's spans in order of its rows."""
        return [self.spans.spans[index] for index in self.spans.local(self.rank)]

    @property
    def local_parts(self) -> list[list[DocumentPart]]:
        """The parts by document of each of this rank's spans."""
        return [list(self.spans.parts(index)) for index in self.spans.local(self.rank)]

    @property
    def num_rows(self) -> int:
        """Rows T of this rank, padding included."""
        return sum(span.stop - span.start for span in self.local_spans)

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send a contiguous tensor to each peer of `sends`; fill the tensors of `receives` with what its peers send."""
        if not sends and not receives:
            return
        assert self._channel is not None, "a rank alone has no other to exchange with"
        size = max(span.rank for span in self.spans.spans) + 1
        ops = [P2POp(self.rank * size + peer, "send", self._channel, peer, (x,)) for peer, x in sends.items()]
        ops += [P2POp(peer * size + self.rank, "recv", self._channel, peer, (x,)) for peer, x in receives.items()]
        self.transport.post(ops)
        self.transport.wait([op.tag for op in ops])

    def num_chunks(self, chunk_size: int) -> list[int]:
        """Chunks of each of this rank's spans: no chunk has rows of two spans."""
        return [-(-(span.stop - span.start) // chunk_size) for span in self.local_spans]

    def _build_chunk_masks(self, chunk_size: int) -> ChunkMasks | None:
        rows, before = [], []  # the document of every row of every chunk, and that before the chunk
        for span in self.local_spans:
            positions = range(span.start, span.stop)
            for start in positions[::chunk_size]:
                of_chunk = [self.spans.document_of(p) for p in range(start, min(start + chunk_size, span.stop))]
                rows.append(of_chunk + of_chunk[-1:] * (chunk_size - len(of_chunk)))
                before.append(self.spans.document_of(start - 1) if start else 0)
        if not rows or (len({x for of_chunk in rows for x in of_chunk}) == 1 and set(before) == set(rows[0])):
            return None
        document = torch.tensor(rows, device=self.device)[:, None, :, None]
        entering = torch.tensor(before, device=self.device)[:, None, None, None]
        last = document[:, :, -1:]
        return ChunkMasks(
            document == document.transpose(2, 3), document == entering, document == last, entering == last
        )

    def _build_halo(self, rows: int) -> Halo:
        messages = halo_messages(self.spans, self.rank, rows)
        received = [position for peer in messages.receives.values() for position in peer]
        column_of = {position: self.num_rows + index for index, position in enumerate(received)}
        zeros = self.num_rows + len(received)
        columns: list[int] = []
        results: list[int] = []
        for span, parts in zip(self.local_spans, self.local_parts, strict=True):
            for part in parts:
                columns += [
                    zeros if position < part.document else self._column(position, column_of)
                    for position in range(part.start - rows, part.start)
                ]
                first = span.row + part.start - span.start
                results += range(len(columns), len(columns) + part.stop - part.start)
                columns += range(first, first + part.stop - part.start)
        sends = {peer: self._index([self.spans.locate(x)[1] for x in sent]) for peer, sent in messages.sends.items()}
        receives = {peer: len(positions) for peer, positions in messages.receives.items()}
        return Halo(sends, receives, self._index(columns), self._index(results))

    def _column(self, position: int, received: Mapping[int, int]) -> int:
        owner, row = self.spans.locate(position)
        return row if owner == self.rank else received[position]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
