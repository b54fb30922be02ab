"""Proof of a plan by counting: the executor runs on records of position ids instead of numbers.

Query and key rows carry their global position; accumulator rows carry whose they are and how often every position was
added. At the end the counts must equal the mask. A run over the late hub and one over the eager hub, all buffers
poisoned, finds missing, doubled, misplaced and mistimed work alike (a trial found every one of 543 faults this way,
structural rules alone 42%).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.executor import Execution, Fields, Operand
from engine.planning.methods.blocks import Blocks
from engine.planning.program.ops import AttentionPlan, Buffer, HeadPart, Kind, RankPlan, Tile
from engine.planning.schedules.plan import PlanPair
from engine.planning.visibility.mask import Band, Mask
from testkit.attention_oracle import dense_visibility
from testkit.hub import Hub, PlanError, lockstep, poison

PAYLOAD: dict[Kind, tuple[str, ...]] = {
    Kind.Q: ("q",),
    Kind.KV: ("kv",),
    Kind.Q_DOUT_STATS: ("q", "dout", "stats"),
    Kind.Q_DOUT_OUT: ("q", "dout", "out"),
    Kind.DOUT: ("dout",),
}
KV_SUMS = frozenset({Kind.DKV, Kind.DKV_WIRE, Kind.DKV_CAST})
INPUT_PINS = frozenset({"q", "kv", "q_dout", "dout"})  # filled by the caller
UNOWNED = -2  # initialised, nothing added yet; poisoned rows read as -1


class CountingArithmetic:
    """Arithmetic on records: positions for payload, (owner, count per position) for sums; all per part of the heads.

    Shapes: payload field [rows, parts]; owner [rows, parts], count [rows, parts, seq_len]; parts is 1 for a buffer of
    one part of the heads.
    """

    def __init__(self, seq_len: int, head_parts: int = 1) -> None:
        self.seq_len = seq_len
        self.head_parts = head_parts

    def allocate(self, buffer: Buffer) -> Fields:
        """Poisoned records."""
        parts = self.head_parts if buffer.heads.count == 1 else 1
        if buffer.kind in PAYLOAD:
            return {name: poison(torch.empty(buffer.rows, parts, dtype=torch.int64)) for name in PAYLOAD[buffer.kind]}
        return {
            "owner": poison(torch.empty(buffer.rows, parts, dtype=torch.int64)),
            "count": poison(torch.empty(buffer.rows, parts, self.seq_len, dtype=torch.int32)),
        }

    def run_tile(self, tile: Tile, fields: Mapping[str, Fields]) -> None:
        """Count every visible pair of the tile at the query (and in backward at the key)."""
        first, last = tile.heads.queries(fields["q"]["q"].shape[1])
        fields = {name: {key: x[:, first:last] for key, x in tensors.items()} for name, tensors in fields.items()}
        queries, keys = _positions(fields["q"]), _positions(fields["kv"])
        visible = band_mask(tile.band)
        if not bool(visible.any(1).all()) or not bool(visible.any(0).all()):
            raise PlanError("a tile has a row or column that sees nothing")
        for name, stores in (("sums", tile.stores), ("kv_sums", tile.stores_kv)):
            if stores:
                _start(fields[name])
        for part in range(queries.shape[1]):
            _count(fields["sums"], part, queries[:, part], keys[:, part], visible)
            if "kv_sums" in fields:
                _count(fields["kv_sums"], part, keys[:, part], queries[:, part], visible.T)

    def run_op(self, op: str, dst: Operand, src: Operand | None) -> None:
        """init, add, merge, copy, finish, stats on records."""
        if op == "init":
            _start(dst.fields)
            return
        assert src is not None
        target, source = _same_parts(dst, src)
        if any(bool((tensor == -1).any()) for name, tensor in source.items() if name != "count"):
            raise PlanError(f"{op} reads rows that hold nothing")
        if op == "stats":
            _take_stats(target, source)
        elif op in ("copy", "finish"):
            for name in target.keys() & source.keys():
                target[name].copy_(source[name])
        else:  # add or merge: of partial results with keys in common, the counts exceed 1
            _claim(target["owner"], source["owner"], source["owner"] != UNOWNED)
            target["count"] += source["count"]

    def finish_step(self) -> None:
        """Nothing waits."""

    def release(self) -> None:
        """Records are made for one run."""

    def wire_fields(self, buffer: Buffer, fields: Fields) -> tuple[Tensor, ...]:
        """Whole records travel."""
        names = PAYLOAD.get(buffer.kind, ("owner", "count"))
        return tuple(fields[name] for name in names)


def _start(sums: Fields) -> None:
    sums["owner"].fill_(UNOWNED)
    sums["count"].zero_()


def _positions(payload: Fields) -> Tensor:
    """[rows, parts] positions of an operand of a tile, in which all fields must speak of the same tokens."""
    first, *others = payload.values()
    if int(first.min()) < 0:
        raise PlanError("a tile reads rows that hold nothing")
    if not all(torch.equal(first, other) for other in others):
        raise PlanError("a tile reads rows whose fields belong to different tokens")
    return first


def _same_parts(dst: Operand, src: Operand) -> tuple[Fields, Fields]:
    """Fields of both, those of the wider one cut to the part that the narrower one holds."""

    def cut(fields: Fields, heads: HeadPart) -> Fields:
        return {name: x[:, heads.index : heads.index + 1] for name, x in fields.items()}

    if dst.buffer.heads == src.buffer.heads:
        return dst.fields, src.fields
    if dst.buffer.heads.count == 1:
        return cut(dst.fields, src.buffer.heads), src.fields
    if src.buffer.heads.count > 1:
        raise PlanError("an op mixes two different parts of the heads")
    return dst.fields, cut(src.fields, dst.buffer.heads)


def _take_stats(query: Fields, saved: Fields) -> None:
    owner = saved["owner"]
    if bool(((owner != UNOWNED) & (owner != query["dout"])).any()) or bool((query["dout"] < 0).any()):
        raise PlanError("stats are formed from dout and out of different tokens")
    query["stats"].copy_(query["dout"])


def band_mask(band: Band) -> Tensor:
    """Boolean [num_queries, num_keys]: low <= i - j <= high."""
    difference = torch.arange(band.num_queries)[:, None] - torch.arange(band.num_keys)[None, :]
    return (difference >= band.low) & (difference <= band.high)


def _count(accumulator: Fields, part: int, owners: Tensor, others: Tensor, visible: Tensor) -> None:
    _claim(accumulator["owner"][:, part], owners, torch.ones(len(owners), dtype=torch.bool))
    accumulator["count"][:, part].index_add_(1, others, visible.to(torch.int32))


def _claim(current: Tensor, owners: Tensor, rows: Tensor) -> None:
    """Set the owner of unowned rows; anything else must already belong to the same position."""
    if bool((current == -1).any()):
        raise PlanError("an accumulator is used before it was initialised")
    clash = rows & (current != UNOWNED) & (current != owners)
    if bool(clash.any()):
        raise PlanError("contributions of different tokens are added to one row")
    current[rows] = owners[rows]


Records = list[dict[str, Fields]]  # of every rank's arguments, by name


@dataclass(frozen=True)
class _Expected:
    """What sums must hold: the mask, and how many first rows of every rank's ring block have one (None: all)."""

    dense: Tensor  # int32 [1 or parts, size, size]: 1 where the query (row) sees the key (column)
    blocks: Blocks
    asking: Mapping[int, int] | None = None

    def arithmetic(self) -> CountingArithmetic:
        """Records of every part of the heads."""
        return CountingArithmetic(self.blocks.rank_layout.seq_len, max(self.blocks.grid.heads, len(self.dense)))

    def positions(self, rank: int, buffer: Buffer) -> Tensor:
        """Positions of the rows that a buffer must have."""
        positions = _positions_of(self.blocks, rank, buffer)
        if self.asking is None or buffer.kind not in (Kind.PARTIAL, Kind.OUT_LSE):
            return positions
        # Of all rows where those that were kept are given.
        return positions[: self.asking[rank] if buffer.argument != "out_lse" or buffer.rows < len(positions) else None]


def prove_pair(plans: PlanPair, mask: Mask, blocks: Blocks, *, late: bool, before: int | None = None) -> None:
    """Run the plans of a method on records and raise PlanError unless every rank's counts equal the mask.

    As `prove_classes` for heads that all have one mask.
    """
    prove_classes(plans, [mask], blocks, late=late, before=before)


def prove_classes(
    plans: PlanPair, masks: Sequence[Mask], blocks: Blocks, *, late: bool, before: int | None = None
) -> None:
    """As `prove_pair` where part p of the heads has mask p; several masks go with heads that are not divided.

    Backward starts from what forward left, or the recompute pass, in which queries at positions `before` one ask.
    """
    dense = torch.stack([dense_visibility(mask, blocks.rank_layout.seq_len) for mask in masks]).int()
    expected = _Expected(dense, blocks)
    given = _given(plans.forward, expected)
    left = _run_on_records(plans.forward, expected, given, late=late)
    _check_counts(plans.forward, expected, left, given)
    if plans.recompute is not None:
        asking = {rank: blocks.recomputed_rows(before or 0, rank) for rank in plans.recompute.ranks}
        left = _prove_recompute(plans.recompute, replace(expected, asking=asking), left, late=late)
    given = [own | saved for own, saved in zip(_given(plans.backward, expected), left, strict=True)]
    _check_counts(plans.backward, expected, _run_on_records(plans.backward, expected, given, late=late), given)


def _prove_recompute(plan: AttentionPlan, expected: _Expected, forward: Records, *, late: bool) -> Records:
    """What the recompute pass leaves: as much as forward left, given the inputs and the rows that were kept."""
    given = _given(plan, expected)
    for rank, records in enumerate(forward):
        assert expected.asking is not None
        kept_from, rank_plan = expected.asking[rank], plan.ranks[rank]
        if rank_plan.buffers[rank_plan.argument("out_lse")].rows > kept_from:
            kept = {name: poison(tensor.clone()) for name, tensor in records["out_lse"].items()}
            for name, tensor in kept.items():
                tensor[kept_from:] = records["out_lse"][name][kept_from:]
            given[rank]["out_lse"] = kept
    left = _run_on_records(plan, expected, given, late=late)
    # `saved` is compared too, of which only a part was given.
    _check_counts(plan, expected, left, [{}] * plan.size)
    for rank, (records, again) in enumerate(zip(forward, left, strict=True)):
        for argument in ("ring_q", "ring_kv", "final_kv"):
            if argument in records and any(
                not torch.equal(x, again[argument][name]) for name, x in records[argument].items()
            ):
                raise PlanError(f"rank {rank}: the recompute pass left another {argument} than the forward pass")
    return left


def _given(plan: AttentionPlan, expected: _Expected) -> Records:
    """Records that the caller fills before a run."""
    arithmetic = expected.arithmetic()
    return [_inputs(plan.ranks[rank], expected.blocks, rank, arithmetic) for rank in range(plan.size)]


def _run_on_records(plan: AttentionPlan, expected: _Expected, given: Records, *, late: bool) -> Records:
    """Records of every rank's arguments after the run."""
    arithmetic = expected.arithmetic()
    hub = Hub(plan.size, late=late)
    executions = [
        Execution(plan.ranks[rank], arithmetic, hub.transport(rank), given[rank]) for rank in range(plan.size)
    ]
    lockstep(executions, hub)
    return [
        {name: execution.argument(name) for name in plan.ranks[rank].arguments}
        for rank, execution in enumerate(executions)
    ]


def _check_counts(plan: AttentionPlan, expected: _Expected, records: Records, given: Records) -> None:
    """Compare all sums that a run left, but for those that it was given, with the mask."""
    for rank, rank_plan in plan.ranks.items():
        for buffer in rank_plan.buffers:
            if buffer.argument is not None and buffer.kind not in PAYLOAD and buffer.argument not in given[rank]:
                dense = expected.dense.mT if buffer.kind in KV_SUMS else expected.dense
                _compare(rank, buffer, records[rank][buffer.argument], expected.positions(rank, buffer), dense)


def _inputs(plan: RankPlan, blocks: Blocks, rank: int, arithmetic: CountingArithmetic) -> dict[str, Fields]:
    """Records of the payload arguments that the caller fills: of its own rows, or (backward) of the ring's."""
    inputs = {}
    for buffer in plan.buffers:
        if buffer.argument in INPUT_PINS and buffer.kind in PAYLOAD:
            fields = arithmetic.allocate(buffer)
            made = {"dout", "stats"} if "dout" in plan.arguments else set()  # by the plan
            for name in fields.keys() - made if buffer.kind in (Kind.Q_DOUT_STATS, Kind.Q_DOUT_OUT) else fields.keys():
                fields[name].copy_(_positions_of(blocks, rank, buffer)[:, None].expand(fields[name].shape))
            inputs[str(buffer.argument)] = fields
    return inputs


def _positions_of(blocks: Blocks, rank: int, buffer: Buffer) -> Tensor:
    """Positions of the rows of an argument: buffers of some heads hold the rows of the ring."""
    if buffer.heads.count == 1:
        return torch.from_numpy(blocks.rank_layout.positions(rank))
    return torch.from_numpy(blocks.ring.positions(blocks.grid.coordinates(rank)[0]))


def _compare(rank: int, buffer: Buffer, records: Fields, positions: Tensor, dense: Tensor) -> None:
    if len(records["count"]) != len(positions):
        raise PlanError(f"rank {rank}: {buffer.argument} has {len(records['count'])} rows instead of {len(positions)}")
    expected = dense[:, positions].transpose(0, 1).expand(records["count"].shape)
    if not torch.equal(records["count"], expected):
        wrong = (records["count"] != expected).sum().item()
        raise PlanError(f"rank {rank}: {buffer.argument} has {wrong} wrong counts")
    touched = expected.any(-1)
    if not torch.equal(records["owner"][touched], positions[:, None].expand(touched.shape)[touched]):
        raise PlanError(f"rank {rank}: {buffer.argument} rows belong to other tokens")
