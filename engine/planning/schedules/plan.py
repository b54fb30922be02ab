"""From a method, a mask and a layout to the plans of both passes. No torch: previews and tests plan here too."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.config.settings import RunConfig
from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import BYTES_OF, AttentionMethod, local_heads
from engine.planning.program.ops import AttentionPlan, Channel, Direction, RankPlan, TokenBytes
from engine.planning.program.program import Program, plan_ranks
from engine.planning.program.trace import TraceStep, trace_program
from engine.planning.schedules import chunks
from engine.planning.schedules.whole import RowsNeededCache, WholeBlocks
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import Visibility

PassName = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True)
class PlanPair:
    """Forward and backward plans of the same method, mask and layout.

    recompute   forward again, during backward, for queries whose results were not saved; None: all were. Its arguments
                are those of forward, but `partial` and `out_lse` have only the first `recomputed_rows` of a rank's
                ring block. With a head exchange or chunks, `out_lse` has all rows and is given with the saved ones: the
                plan writes the first rows, and exchanges out of all rows

    Causal attention of a share c of the sequence costs c**2 of the whole, and only keys that those queries see are
    sent. Source: Sun et al. 2025 (BurstEngine, sequence-level selective checkpointing: striped, causal, c = 1/2).
    """

    forward: AttentionPlan
    backward: AttentionPlan
    recompute: AttentionPlan | None = None


class _Pass(NamedTuple):
    """query_rows: of every ring rank, how many first rows of its block are computed; None: all."""

    direction: Direction
    visible: Visibility
    query_rows: tuple[int, ...] | None = None


def channels_of(method: AttentionMethod) -> tuple[Channel, ...]:
    """Channels between ranks that some rank's plans may use, whatever the mask.

    A channel is a communicator: on a GPU it costs memory, and under gloo a thread that wakes a hundred times a second.
    """
    channels = [Channel.HEADS] if method.head_parallel_size > 1 else []
    if method.ring_inner_size > 1:
        channels += [Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER]
    if method.ring_outer_size > 1:
        channels += [Channel.PAYLOAD_OUTER, Channel.GRADIENT_OUTER]
    return tuple(channel for channel in Channel if channel in channels)


def plan_method(
    method: AttentionMethod,
    mask: Mask,
    blocks: Blocks,
    rank: int | Collection[int] | None = None,
    *,
    recompute_before: int | None = None,
) -> PlanPair:
    """The plans of a method, for one rank, for some or (None) for all.

    Args:
        recompute_before: plan the recompute pass too, for queries at positions before this one: 0 none of them, the
            length of the layout (padding included) all; None: results are saved, nothing is recomputed.

    A recompute pass without a head exchange and without queries does nothing, but for a reversed ring: its backward
    starts from the final kv of forward, which is sent again. A layer without attention has plans without steps.
    """
    only = (rank,) if isinstance(rank, int) else rank
    if mask.hides_all:
        return _plan_nothing(method.cp_size, only)
    passes = _passes(mask, blocks, recompute_before)
    plans = {name: _plan_pass(one, method, blocks, only) for name, one in passes.items()}
    recompute = plans.get("recompute")
    if recompute_before is not None and recompute is None:  # of all rows: nothing to plan anew
        recompute = plans["forward"]
    return PlanPair(plans["forward"], plans["backward"], recompute)


def _plan_nothing(size: int, ranks: Collection[int] | None) -> PlanPair:
    """Plans without buffers and steps."""
    empty = {rank: RankPlan(rank, (), ()) for rank in (range(size) if ranks is None else ranks)}
    return PlanPair(AttentionPlan("forward", size, empty), AttentionPlan("backward", size, empty))


def trace_method(
    method: AttentionMethod, mask: Mask, blocks: Blocks, rank: int, *, recompute_before: int | None = None
) -> dict[PassName, list[TraceStep]]:
    """What one rank does in every pass, in words; arguments as of `plan_method`.

    A recompute pass of all rows is the trace of forward itself.
    """
    traces: dict[PassName, list[TraceStep]] = {}
    for name, one in _passes(mask, blocks, recompute_before).items():
        program = Program(one.direction, rank, method.cp_size)
        _write_program(program, one, method, blocks, {}, plans_single_rank=True)
        traces[name] = trace_program(program)
        if name == "forward" and recompute_before is not None:
            traces["recompute"] = traces["forward"]  # replaced below where it is of fewer rows
    return traces


def _passes(mask: Mask, blocks: Blocks, recompute_before: int | None) -> dict[PassName, _Pass]:
    """The passes in the order in which they run; a recompute pass of all rows is the forward pass."""
    visible = Visibility(mask, blocks.ring)
    passes: dict[PassName, _Pass] = {"forward": _Pass("forward", visible)}
    if recompute_before is not None:
        ring_ranks = range(blocks.ring.size)
        query_rows = tuple(blocks.ring.rows_before(ring_rank, recompute_before) for ring_rank in ring_ranks)
        if query_rows != blocks.ring.row_counts:
            recomputed = Visibility(mask.queries_before(recompute_before), blocks.ring)
            passes["recompute"] = _Pass("forward", recomputed, query_rows)
    passes["backward"] = _Pass("backward", visible)
    return passes


def plan_backward(method: AttentionMethod, visible: Visibility, blocks: Blocks) -> AttentionPlan:
    """The backward plans of all ranks."""
    return _plan_pass(_Pass("backward", visible), method, blocks, None)


def _plan_pass(
    attn_pass: _Pass, method: AttentionMethod, blocks: Blocks, only: Collection[int] | None
) -> AttentionPlan:
    """Plans of one pass, for some ranks or (None) for all, each written by itself."""
    rows_needed_cache: RowsNeededCache = {}
    plans_single_rank = only is not None and len(only) == 1

    def write(program: Program) -> None:
        _write_program(program, attn_pass, method, blocks, rows_needed_cache, plans_single_rank=plans_single_rank)

    return plan_ranks(attn_pass.direction, method.cp_size, only, write)


def _write_program(
    program: Program,
    attn_pass: _Pass,
    method: AttentionMethod,
    blocks: Blocks,
    rows_needed_cache: RowsNeededCache,
    *,
    plans_single_rank: bool,
) -> None:
    query_rows = attn_pass.query_rows[blocks.grid.coordinates(program.rank)[0]] if attn_pass.query_rows else None
    if method.chunk_tokens is not None:
        chunked = chunks.Forward if attn_pass.direction == "forward" else chunks.Backward
        chunked(program, attn_pass.visible, method, blocks, query_rows).write()
        return
    whole = WholeBlocks(
        program, attn_pass.visible, method, blocks, rows_needed_cache, plans_single_rank=plans_single_rank
    )
    if attn_pass.direction == "forward":
        whole.forward(query_rows)
    else:
        whole.backward()


def token_bytes_of(config: RunConfig, method: AttentionMethod) -> TokenBytes:
    """Bytes per token position; the sequences of a micro-batch are folded into the heads, as attention runs them."""
    model, train = local_heads(config.model, config.parallel.tp_size), config.train
    return TokenBytes(
        num_heads=model.num_heads * train.micro_batch_size,
        num_kv_heads=model.num_kv_heads * train.micro_batch_size,
        qk_dim=model.head_dim,
        v_dim=model.v_head_dim or model.head_dim,
        element_bytes=BYTES_OF[train.compute_dtype],
        wire_gradient_bytes=BYTES_OF[method.gradient_wire_dtype],
    )
