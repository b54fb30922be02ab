"""The program of one rank in one pass: values that are written once, and ops on them by step.

A schedule is an ordinary function that calls `send`, `recv`, `tile`, `before`, `after` for one rank. Both ends of a
message are planned separately with the same steps and channel; `_tag_transfers` gives both the same tag. `finish` maps
values to buffers (`program.buffers`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from engine.config.settings import Store
from engine.planning.program.buffers import BufferClass, Rows, Value, allocate, buffer_of_value
from engine.planning.program.first_writes import store_first
from engine.planning.program.ops import (
    ALL_HEADS,
    AttentionPlan,
    Channel,
    Direction,
    HeadPart,
    Kind,
    LocalOp,
    OpName,
    RankPlan,
    Step,
    Tile,
    Transfer,
)
from engine.planning.visibility.mask import Band

_ORDER = {channel: index for index, channel in enumerate(Channel)}


class When(NamedTuple):
    """Steps at which a message is posted and waited for."""

    post: int
    wait: int

    @classmethod
    def at(cls, step: int) -> When:
        """Both at one step."""
        return cls(step, step)


@dataclass
class ProgramStep:
    """Ops of one step, on views whose `buffer` is the number of a value."""

    pre: list[LocalOp] = field(default_factory=list)
    post: list[Transfer] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    wait: list[int] = field(default_factory=list)
    after: list[LocalOp] = field(default_factory=list)


class ProgramTransfer(NamedTuple):
    """A transfer of the block of `owner`, without a tag as yet."""

    when: When
    owner: int
    transfer: Transfer


@dataclass
class Program:
    """The program of `rank` of a group of `size`.

    spans    first and last step that each step of a schedule takes; None: one
    """

    direction: Direction
    rank: int
    size: int
    spans: Sequence[When] | None = None
    values: list[Value] = field(default_factory=list)
    steps: defaultdict[int, ProgramStep] = field(default_factory=lambda: defaultdict(ProgramStep))
    transfers: list[ProgramTransfer] = field(default_factory=list)

    def stretched(self, spans: Sequence[When]) -> Program:
        """The same program, for a schedule whose steps take these spans."""
        return replace(self, spans=spans)

    def value(
        self,
        kind: Kind,
        rows: Rows,
        argument: str | None = None,
        *,
        owner: int,
        heads: HeadPart = ALL_HEADS,
        where: Store = "device",
        shard_of: int | None = None,
    ) -> Value:
        """A new value for some rows of the block of `owner`."""
        value = Value(len(self.values), BufferClass(kind, heads, where), rows, owner, argument, shard_of)
        self.values.append(value)
        return value

    def send(self, value: Value, rows: Rows, to: int, channel: Channel, when: When) -> None:
        """Send rows of a value."""
        self._transfer("send", value, rows, to, channel, when)

    def recv(self, value: Value, rows: Rows, source: int, channel: Channel, when: When) -> None:
        """Receive rows that another rank sends into a value."""
        self._transfer("recv", value, rows, source, channel, when)

    def move(self, source: Value, target: Value, rows: Rows, when: When, kind: Kind | None = None) -> None:
        """Load (host to device) or store (device to host) rows; `kind`: only the fields of that kind."""
        if rows.start < rows.stop:
            assert {source.buffer_class.where, target.buffer_class.where} == {"device", "host"}, (source, target)
            loads = source.buffer_class.where == "host"
            channel = Channel.TO_DEVICE if loads else Channel.TO_HOST
            op: Literal["load", "store"] = "load" if loads else "store"
            transfer = Transfer(-1, op, channel, self.rank, target.view(rows), source.view(rows), kind)
            self.transfers.append(ProgramTransfer(self._during(when), target.owner, transfer))

    def tile(
        self,
        step: int,
        band: Band,
        q: Value,
        kv: Value,
        sums: Value,
        kv_sums: Value | None = None,
        heads: HeadPart = ALL_HEADS,
    ) -> None:
        """Compute a band between queries and keys, add to their sums; `heads`: of those that the values have."""
        q_rows, k_rows = Rows(band.q_start, band.q_stop), Rows(band.k_start, band.k_stop)
        kv_view = kv_sums.view(k_rows) if kv_sums else None
        tile = Tile(q.view(q_rows), kv.view(k_rows), sums.view(q_rows), band.from_0(), kv_view, heads=heads)
        self.steps[step].tiles.append(tile)

    def before(
        self, step: int, op: OpName, dst: Value, src: Value, rows: Rows | None = None, from_rows: Rows | None = None
    ) -> None:
        """A local op before the posts of a step, on all rows of `dst` by default."""
        self._op(self._during(When.at(step)).post, "pre", op, dst, src, rows or dst.rows, from_rows)

    def after(
        self, step: int, op: OpName, dst: Value, src: Value, rows: Rows | None = None, from_rows: Rows | None = None
    ) -> None:
        """A local op after the waits of a step, on all rows of `src` by default."""
        self._op(self._during(When.at(step)).wait, "after", op, dst, src, rows or src.rows, from_rows)

    def _op(
        self,
        step: int,
        phase: Literal["pre", "after"],
        op: OpName,
        dst: Value,
        src: Value,
        rows: Rows,
        from_rows: Rows | None,
    ) -> None:
        if rows.start < rows.stop:
            getattr(self.steps[step], phase).append(LocalOp(op, dst.view(rows), src.view(from_rows or rows)))

    def _transfer(
        self, op: Literal["send", "recv"], value: Value, rows: Rows, peer: int, channel: Channel, when: When
    ) -> None:
        assert when.post <= when.wait, when
        assert peer != self.rank, peer
        transfer = Transfer(-1, op, channel, peer, value.view(rows))
        self.transfers.append(ProgramTransfer(self._during(when), value.owner, transfer))

    def _during(self, when: When) -> When:
        return When(self.spans[when.post].post, self.spans[when.wait].wait) if self.spans else when

    def _tag_transfers(self) -> None:
        """Give both ends of a message the same tag, although each rank plans for itself.

        Messages between two ranks are counted in the order of post step, channel and owner, which both ends see alike;
        of one step, channel and owner in the order in which both ends name them.
        """
        counts: Counter[tuple[int, int]] = Counter()
        order = sorted(self.transfers, key=lambda end: (end.when.post, _ORDER[end.transfer.channel], end.owner))
        for when, _, transfer in order:
            src, dst = (self.rank, transfer.peer) if transfer.op == "send" else (transfer.peer, self.rank)
            tag = (counts[src, dst] * self.size + src) * self.size + dst
            counts[src, dst] += 1
            self.steps[when.post].post.append(transfer._replace(tag=tag))
            self.steps[when.wait].wait.append(tag)

    @property
    def used_steps(self) -> set[int]:
        """Steps at which the rank does anything."""
        return {*self.steps, *(step for end in self.transfers for step in end.when)}

    def finish(self, index: dict[int, int]) -> RankPlan:
        """The plan of the rank; `index` numbers the steps that are used."""
        self._tag_transfers()
        steps = tuple(
            Step(index[step], tuple(s.pre), tuple(s.post), tuple(s.tiles), tuple(s.wait), tuple(s.after))
            for step, s in sorted(self.steps.items())
        )
        return allocate(self.rank, self.values, store_first(steps, list(map(buffer_of_value, self.values))))


def plan_ranks(
    direction: Direction, size: int, only: Collection[int] | None, write: Callable[[Program], None]
) -> AttentionPlan:
    """Plans of some or all ranks, each written by itself; steps at which none of them does anything are dropped."""
    programs = [Program(direction, rank, size) for rank in sorted(range(size) if only is None else only)]
    for program in programs:
        write(program)
    used = sorted(set[int]().union(*(program.used_steps for program in programs)))
    index = {step: position for position, step in enumerate(used)}
    return AttentionPlan(direction, size, {program.rank: program.finish(index) for program in programs})
