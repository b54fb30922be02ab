"""Plans of whole blocks: one ring, or a head exchange around several of them."""

from __future__ import annotations

from engine.planning.schedule.allocate import Lane, PlanBuilder, Rows, Span, Value
from engine.planning.schedule.exchange import Exchange, HeadGroup, kv_gradient_kind, return_kv
from engine.planning.schedule.plan import AttentionPlan, HeadPart, Kind
from engine.planning.schedule.ring import Operands, circulate, keeps_last, last_home
from engine.planning.sequence.visibility import Visibility


def plan_whole_blocks(visibility: Visibility, exchange: Exchange, builder: PlanBuilder) -> AttentionPlan:
    """The plan of the builder's direction. Pins of a ring alone, on every rank:

        forward    q, kv -> acc                       backward   qx, kv -> dq, dkv

    and with a head exchange (ring_..., qx, saved: part of the heads, whole block; the others: all heads, own piece):

        forward    q, kv -> ring_q, ring_kv, saved, out      backward   dout, qx, ring_kv, saved -> dq, dkv

    kv_last takes the place of (ring_)kv in backward where the method `keeps_last`, and is left by forward then. Run
    again (`exchange.asking`), acc has only the rows that ask, and `saved` is an input too: the rows that do not ask are
    there, the others are written.
    """
    work = _Blocks(visibility, exchange, builder)
    forward, backward = (work.forward, work.backward) if exchange.grid.heads > 1 else (work.alone, work.alone)
    (forward if builder.direction == "forward" else backward)()
    return builder.build()


class _Blocks:
    """One plan: its head groups, and the rings between them."""

    def __init__(self, visibility: Visibility, exchange: Exchange, builder: PlanBuilder) -> None:
        self.visibility = visibility
        self.builder = builder
        self.exchange = exchange
        self.method = exchange.method
        self.keeps_last = keeps_last(self.method)
        self.query_kind = Kind.QX if self.method.backward_circulates == "q" else Kind.QO  # `out` need not travel
        self.groups = [HeadGroup(exchange, builder, index) for index in range(exchange.grid.ring_size)]

    def alone(self) -> None:
        """A ring, and nothing else."""
        forward = self.builder.direction == "forward"
        last = self._last_blocks() if self.keeps_last else None
        kv = last if last is not None and not forward else self._blocks(Kind.KV, "kv")
        query = self._blocks(Kind.Q, "q") if forward else self._blocks(self.query_kind, "qx")
        if forward:
            self._attend(query, kv, self._blocks(Kind.ACC, "acc"), kv_last=last)
        else:
            self._attend(query, kv, self._blocks(Kind.DQ, "dq"), self._blocks(Kind.DKV, "dkv"))

    def forward(self) -> None:
        """q, k and v come, out goes."""
        query, sums = self._blocks(Kind.Q, "ring_q"), self._blocks(Kind.ACC)
        kv = self._blocks(Kind.KV, None if self.keeps_last else "ring_kv")
        for group, ring_q, ring_kv in zip(self.groups, query, kv, strict=True):
            group.gather(Span(0, 0), group.homes(Kind.Q, "q"), ring_q)
            group.gather(Span(0, 0), group.homes(Kind.KV, "kv"), ring_kv)
        last = self._attend(query, kv, sums, kv_last=self._last_blocks() if self.keeps_last else None)
        for group, acc, saved in zip(self.groups, sums, self._blocks(Kind.SAVED, "saved"), strict=True):
            group.each(last, "copy", saved, acc, acc[0].rows)
            out = group.block(Kind.OUT)
            group.each(last, "copy", out, saved)
            group.scatter(Span(last, last), out, group.homes(Kind.OUT, "out"), "copy")

    def backward(self) -> None:
        """dout comes, the gradients go."""
        query = self._blocks(self.query_kind, "qx")
        kv = self._last_blocks() if self.keeps_last else self._blocks(Kind.KV, "ring_kv")
        for group, ring_q, saved in zip(self.groups, query, self._blocks(Kind.SAVED, "saved"), strict=True):
            group.gather(Span(0, 0), group.homes(Kind.DOUT, "dout"), ring_q, copied=(0, "after"))
            if self.query_kind == Kind.QX:
                group.each(1, "stats", ring_q, saved)
        sums, kv_sums = self._blocks(Kind.DQ), self._blocks(Kind.DKV)
        last = self._attend(query, kv, sums, kv_sums)
        for group, ring_dq, ring_dkv in zip(self.groups, sums, kv_sums, strict=True):
            dq = group.block(Kind.DQ_CAST)
            group.each(last, "copy", dq, ring_dq)
            group.scatter(Span(last, last), dq, group.homes(Kind.DQ_CAST, "dq"), "copy")
            return_kv(group, Span(last, last), ring_dkv, group.homes(kv_gradient_kind(self.exchange), "dkv"))

    def _blocks(self, kind: Kind, pin: str | None = None) -> list[list[Value]]:
        """One value per [ring index][head], of the whole block and part of the heads."""
        return [group.block(kind, pin=pin) for group in self.groups]

    def _last_blocks(self) -> list[list[Value]]:
        """K,V of the block that every ring member holds last, for a reversed backward."""
        homes = [last_home(self.method, index) for index in range(len(self.groups))]
        return [
            group.parts(Kind.KV, Rows(0, self.exchange.rows(home)), pin="kv_last")
            for group, home in zip(self.groups, homes, strict=True)
        ]

    def _attend(
        self,
        query: list[list[Value]],
        kv: list[list[Value]],
        sums: list[list[Value]],
        kv_sums: list[list[Value]] | None = None,
        kv_last: list[list[Value]] | None = None,
    ) -> int:
        """Attention of every ring, from step 1 on around an exchange; the first step after it."""
        grid, last = self.exchange.grid, 1
        blocks = (query, kv, sums, kv_sums, kv_last)
        for head in range(grid.heads):
            part = HeadPart(head, grid.heads)
            lane = Lane(self.builder, grid.ring(head), part, first_step=int(grid.heads > 1))
            given = Operands(*(_ring_of(of_ring or [], head) if lane.ranks else [] for of_ring in blocks))
            circulate(self.visibility, self.method, lane, given)
            last = max(last, lane.last_step)
        return last + 1


def _ring_of(blocks: list[list[Value]], head: int) -> list[Value]:
    """One part of the heads of every block, each with its index in the ring as rank."""
    return [values[head].on(index) for index, values in enumerate(blocks)]
