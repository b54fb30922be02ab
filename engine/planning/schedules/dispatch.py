"""DistCA (Zhuang et al. 2025): core attention is dispatched to any rank, also to one that owns neither q nor k and v.

    step 0   owners send q (backward: q, dout and row statistics) and k, v to the ranks that compute with them
    step 1   every rank computes the tiles assigned to it, with one partial result per block
    step 2   partial results go to the owner of the rows: out and lse are merged, gradients are added

No preset uses it as yet: it has another interface than the schedules over `RankPass`. Attention has no weights, so
tiles may be balanced over ranks without regard to where tokens are. Only rows that the
tiles of a rank read travel, once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import AttentionPlan, Channel, Direction, Kind, OpName
from engine.planning.program.program import Program, When, plan_ranks
from engine.planning.visibility.visible import Operand, Visibility

PAYLOAD, RESULT = Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER
DISPATCH, COMPUTE, COMBINE = range(3)  # steps

Assignment = Callable[[int, int], int]  # (rank of the queries, rank of the keys) -> rank that computes their tiles


class Task(NamedTuple):
    """Tiles of the queries of `q_rank` and the keys of `kv_rank`, computed by `rank`."""

    q_rank: int
    kv_rank: int
    rank: int


RowsRead = Mapping[tuple[Operand, int, int], Rows]  # (operand, owner of the block, rank that computes) -> rows


def rows_read(visible: Visibility, tasks: Collection[Task]) -> RowsRead:
    """Rows of every block that the tasks of a rank read, where there are any."""
    found: dict[tuple[Operand, int, int], Rows] = {}
    for q_rank, kv_rank, rank in tasks:
        for band in visible.bands(q_rank, kv_rank):
            q, k = Rows(band.q_start, band.q_stop), Rows(band.k_start, band.k_stop)
            reads: tuple[tuple[Operand, int, Rows], ...] = (("q", q_rank, q), ("kv", kv_rank, k))
            for operand, owner, rows in reads:
                known = found.get((operand, owner, rank), rows)
                hull = Rows(min(known.start, rows.start), max(known.stop, rows.stop))
                found[operand, owner, rank] = hull
    return found


@dataclass(frozen=True)
class DispatchPass:
    """One pass of one rank.

    tasks       those of all ranks
    rows_read   what they read
    """

    program: Program
    visible: Visibility
    tasks: Collection[Task]
    rows_read: RowsRead

    @property
    def local_tasks(self) -> list[Task]:
        """Those that this rank computes."""
        return [task for task in self.tasks if task.rank == self.program.rank]

    def argument(self, kind: Kind, name: str) -> Value:
        """An input or output of the plan: the own block."""
        rank = self.program.rank
        return self.program.value(kind, Rows(0, self.visible.layout.row_counts[rank]), name, owner=rank)

    def rows(self, operand: Operand, owner: int, rank: int) -> Rows | None:
        """Rows of the block of `owner` that the tasks of `rank` read; None: none."""
        return self.rows_read.get((operand, owner, rank))

    def others(self) -> list[int]:
        """All other ranks, from the next one on, so that not all send to one rank first."""
        return [(self.program.rank + n) % self.program.size for n in range(1, self.program.size)]


def forward(me: DispatchPass) -> None:
    """q, k and v go to the ranks that compute; the owner of the queries merges partial out and lse."""
    q, kv, partial = me.argument(Kind.Q, "q"), me.argument(Kind.KV, "kv"), me.argument(Kind.PARTIAL, "partial")
    out_lse = me.argument(Kind.OUT_LSE, "out_lse")
    queries, keys = dispatch(me, "q", q), dispatch(me, "kv", kv)
    partials = partial_results(me, "q", partial)
    for task in me.local_tasks:
        for band in me.visible.bands(task.q_rank, task.kv_rank):
            me.program.tile(COMPUTE, band, queries[task.q_rank], keys[task.kv_rank], partials[task.q_rank])
    combine(me, "q", partials, "merge")
    me.program.after(COMBINE, "finish", out_lse, partial)


def backward(me: DispatchPass) -> None:
    """q, dout and row statistics go where k and v go; owners add partial dq, dk and dv."""
    q_dout, kv = me.argument(Kind.Q_DOUT_STATS, "q_dout"), me.argument(Kind.KV, "kv")
    dq, dkv = me.argument(Kind.DQ, "dq"), me.argument(Kind.DKV, "dkv")
    queries, keys = dispatch(me, "q", q_dout), dispatch(me, "kv", kv)
    dqs, dkvs = partial_results(me, "q", dq), partial_results(me, "kv", dkv)
    for task in me.local_tasks:
        i, j = task.q_rank, task.kv_rank
        for band in me.visible.bands(i, j):
            me.program.tile(COMPUTE, band, queries[i], keys[j], dqs[i], dkvs[j])
    combine(me, "q", dqs, "add")
    combine(me, "kv", dkvs, "add")


def dispatch(me: DispatchPass, operand: Operand, local: Value) -> dict[int, Value]:
    """Send rows of the own block to the ranks that compute with them, and receive those that this rank computes with.

    Returns:
        Blocks of the operand by owner.
    """
    rank, blocks = me.program.rank, {me.program.rank: local}
    for other in me.others():
        if rows := me.rows(operand, rank, other):
            me.program.send(local, rows, other, PAYLOAD, When.at(DISPATCH))
        if rows := me.rows(operand, other, rank):
            blocks[other] = me.program.value(local.kind, rows, owner=other)
            me.program.recv(blocks[other], rows, other, PAYLOAD, When.at(DISPATCH))
    return blocks


def partial_results(me: DispatchPass, operand: Operand, total: Value) -> dict[int, Value]:
    """What the tasks of this rank merge or add into, by owner of the rows: `total` for its own."""
    partials = {me.program.rank: total}
    for other in me.others():
        if rows := me.rows(operand, other, me.program.rank):
            partials[other] = me.program.value(total.kind, rows, owner=other)
    return partials


def combine(me: DispatchPass, operand: Operand, partials: dict[int, Value], op: OpName) -> None:
    """Send partial results to the owners of their rows, and merge or add those of the own rows."""
    rank, total = me.program.rank, partials[me.program.rank]
    for other in me.others():
        if other in partials:
            partial = partials[other]
            me.program.send(partial, partial.rows, other, RESULT, When.at(COMBINE))
        if rows := me.rows(operand, rank, other):
            arrived = me.program.value(total.kind, rows, owner=rank)
            me.program.recv(arrived, rows, other, RESULT, When.at(COMBINE))
            me.program.after(COMBINE, op, total, arrived)


def plan_dispatch(
    visible: Visibility, assign: Assignment, direction: Direction, only: Collection[int] | None = None
) -> AttentionPlan:
    """Plans of one pass, for some ranks or (None) for all.

    Args:
        assign: the rank that computes the tiles of a pair of blocks; asked only for pairs that see each other.
    """
    ranks = range(visible.layout.size)
    tasks = [Task(i, j, assign(i, j)) for i in ranks for j in ranks if visible.bands(i, j)]
    rows = rows_read(visible, tasks)

    def write(program: Program) -> None:
        me = DispatchPass(program, visible, tasks, rows)
        if direction == "forward":
            forward(me)
        else:
            backward(me)

    return plan_ranks(direction, len(ranks), only, write)
