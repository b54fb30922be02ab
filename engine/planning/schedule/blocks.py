"""Plans of whole blocks: one ring, or a head exchange around several of them."""

from __future__ import annotations

from engine.planning.schedule.allocate import PlanBuilder, Rows, Span, Value
from engine.planning.schedule.exchange import Exchange, kv_gradient_kind, planned_groups, return_kv
from engine.planning.schedule.plan import AttentionPlan, Kind
from engine.planning.schedule.ring import Circulation, Operands, keeps_last, lanes, last_home, of_heads, route_of
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


_Values = dict[int, list[Value]]  # by planned ring member, one per part of the heads


class _Blocks:
    """One plan: its head groups, and the rings between them."""

    def __init__(self, visibility: Visibility, exchange: Exchange, builder: PlanBuilder) -> None:
        self.visibility = visibility
        self.builder = builder
        self.exchange = exchange
        self.method = exchange.method
        self.keeps_last = keeps_last(self.method)
        self.query_kind = Kind.QX if self.method.backward_circulates == "q" else Kind.QO  # `out` need not travel
        self.groups = planned_groups(exchange, builder)

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
        for member, group in self.groups.items():
            group.gather(Span(0, 0), group.homes(Kind.Q, "q"), query[member])
            group.gather(Span(0, 0), group.homes(Kind.KV, "kv"), kv[member])
        last = self._attend(query, kv, sums, kv_last=self._last_blocks() if self.keeps_last else None)
        saved = self._blocks(Kind.SAVED, "saved")
        for member, group in self.groups.items():
            group.each(last, "copy", saved[member], sums[member], sums[member][0].rows)
            out = group.block(Kind.OUT)
            group.each(last, "copy", out, saved[member])
            group.scatter(Span(last, last), out, group.homes(Kind.OUT, "out"), "copy")

    def backward(self) -> None:
        """dout comes, the gradients go."""
        query = self._blocks(self.query_kind, "qx")
        kv = self._last_blocks() if self.keeps_last else self._blocks(Kind.KV, "ring_kv")
        saved = self._blocks(Kind.SAVED, "saved")
        for member, group in self.groups.items():
            group.gather(Span(0, 0), group.homes(Kind.DOUT, "dout"), query[member], copied=(0, "after"))
            if self.query_kind == Kind.QX:
                group.each(1, "stats", query[member], saved[member])
        sums, kv_sums = self._blocks(Kind.DQ), self._blocks(Kind.DKV)
        last = self._attend(query, kv, sums, kv_sums)
        for member, group in self.groups.items():
            dq = group.block(Kind.DQ_CAST)
            group.each(last, "copy", dq, sums[member])
            group.scatter(Span(last, last), dq, group.homes(Kind.DQ_CAST, "dq"), "copy")
            return_kv(group, Span(last, last), kv_sums[member], group.homes(kv_gradient_kind(self.method), "dkv"))

    def _blocks(self, kind: Kind, pin: str | None = None) -> _Values:
        """Values of whole blocks."""
        return {member: group.block(kind, pin=pin) for member, group in self.groups.items()}

    def _last_blocks(self) -> _Values:
        """K,V of the block that a ring member holds last, for a reversed backward."""
        rows = {member: self.exchange.rows(last_home(self.method, member)) for member in self.groups}
        return {m: group.parts(Kind.KV, Rows(0, rows[m]), pin="kv_last") for m, group in self.groups.items()}

    def _attend(
        self, query: _Values, kv: _Values, sums: _Values, kv_sums: _Values | None = None, kv_last: _Values | None = None
    ) -> int:
        """Attention of every ring, from step 1 on around an exchange; the first step after it."""
        route, first = route_of(self.method, self.builder.direction), int(self.exchange.grid.heads > 1)
        spans = [Span(step, step) for step in range(first, first + route.size + 2)]
        for lane in lanes(self.method, self.builder, spans):
            blocks = (query, kv, sums, kv_sums, kv_last)
            given = Operands(*(of_heads(values or {}, lane.heads.index) for values in blocks))
            Circulation(self.visibility, self.method, self.builder, lane, given, route).emit()
        return spans[-1].wait + 1
