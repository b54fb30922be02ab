"""DeepSpeed-Ulysses (Jacobs et al. 2023): ranks exchange rows for heads before attention, and heads for rows after it.

    2 ranks, each with one shard of the rows     rank 0: rows of both shards, heads of part 0
                               -> exchange ->    rank 1: rows of both shards, heads of part 1

An all-to-all made of messages, so shards and parts of the heads may have unequal sizes. kv heads that several ranks
need go to each of them, and the owner adds up their gradients. Around a ring this is LoongTrain's 2D-Attention (Gu et
al. 2024) and USP (Fang and Zhao 2024). With chunks, every chunk is exchanged by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from engine.config.settings import Store
from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import ALL_HEADS, Channel, HeadPart, Kind, OpName
from engine.planning.program.program import Program, When


@dataclass
class HeadGroup:
    """The ranks that hold the shards [chunk][number] of a ring rank's block; `number` is this rank's.

    Values of all heads have the rows that the rank holds between the layers: its shards of all chunks in order.
    """

    program: Program
    ranks: tuple[int, ...]
    shards: list[list[Rows]]
    number: int
    owner: int  # ring rank
    store: Store = "device"
    lead: int = 1  # steps that an exchange takes
    _arguments: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ends = accumulate((_length(of_chunk[self.number]) for of_chunk in self.shards), initial=0)
        self.local_rows = [Rows(start, stop) for start, stop in pairwise(ends)]

    @property
    def exchanges(self) -> bool:
        """Whether the heads are divided at all."""
        return len(self.ranks) > 1

    def heads(self, number: int) -> HeadPart:
        """Part of the heads that rank `number` of the group works on."""
        return HeadPart(number, len(self.ranks))

    def argument(self, kind: Kind, name: str) -> Value:
        """All heads of the own rows: an input or output of the plan, made once."""
        if name not in self._arguments:
            self._arguments[name] = self._shard_value(kind, Rows(0, self.local_rows[-1].stop), name, where=self.store)
        return self._arguments[name]

    def to_heads(self, chunk: int, step: int, all_heads: Value, target: Value) -> None:
        """Bring all rows of a chunk, own heads, into `target` before a step.

        Through a copy where `target` has more fields than what is exchanged.
        """
        when, copied, local = When(step - self.lead, step - 1), target.kind != all_heads.kind, self.local_rows[chunk]
        if self.store == "host":
            host, all_heads = all_heads, self._shard_value(all_heads.kind, local)
            self.program.move(host, all_heads, local, When(step - 2 * self.lead, step - self.lead - 1))
        if _length(local):
            self.program.before(
                step if copied else when.post, "copy", target, all_heads, self.shards[chunk][self.number], local
            )
        for other in self._others():
            if _length(local):
                packed = self._shard_value(all_heads.kind, local, heads=self.heads(other))
                self.program.before(when.post, "copy", packed, all_heads, local)
                self.program.send(packed, local, self.ranks[other], Channel.HEADS, when)
            if _length(rows := self.shards[chunk][other]):
                arrived = self._block_value(all_heads.kind, rows) if copied else target
                self.program.recv(arrived, rows, self.ranks[other], Channel.HEADS, when)
                if copied:
                    self.program.before(step, "copy", target, arrived, rows)

    def to_rows(self, chunk: int, step: int, kind: Kind, source: Value, all_heads: Value, op: OpName = "copy") -> None:
        """Bring all heads of the own rows of a chunk into `all_heads` after a step: copied, or (op="add") summed."""
        if source.kind != kind:
            cast = self._block_value(kind, self.chunk_rows(chunk))
            self.program.before(step, "copy", cast, source)
            source = cast
        when, local, target = When(step, step + self.lead - 1), self.local_rows[chunk], all_heads
        if self.store == "host":
            target = self._shard_value(all_heads.kind, local)
        if _length(local):
            self.program.after(when.wait, op, target, source, local, self.shards[chunk][self.number])
        for other in self._others():
            if _length(rows := self.shards[chunk][other]):
                self.program.send(source, rows, self.ranks[other], Channel.HEADS, when)
            if _length(local):
                arrived = self._shard_value(kind, local, heads=self.heads(other))
                self.program.recv(arrived, local, self.ranks[other], Channel.HEADS, when)
                self.program.after(when.wait, op, target, arrived, local)
        if self.store == "host":
            self.program.move(target, all_heads, local, When(when.wait + 1, when.wait + 1))

    def chunk_rows(self, chunk: int) -> Rows:
        """Rows of a chunk in the block."""
        return Rows(self.shards[chunk][0].start, self.shards[chunk][-1].stop)

    def _block_value(self, kind: Kind, rows: Rows) -> Value:
        """Rows of the block, this rank's heads."""
        return self.program.value(kind, rows, owner=self.owner, heads=self.heads(self.number))

    def _shard_value(
        self,
        kind: Kind,
        rows: Rows,
        argument: str | None = None,
        heads: HeadPart = ALL_HEADS,
        where: Store = "device",
    ) -> Value:
        return self.program.value(
            kind, rows, argument, owner=self.owner, heads=heads, where=where, shard_of=self.program.rank
        )

    def _others(self) -> Iterator[int]:
        """The other ranks, from the next one on, so that not all send to one rank first."""
        count = len(self.ranks)
        return ((self.number + n) % count for n in range(1, count))


def _length(rows: Rows) -> int:
    return rows.stop - rows.start
