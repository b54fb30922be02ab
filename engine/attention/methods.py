"""From a method, a mask and a layout to the plans of both passes. No torch: previews and tests plan here too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from engine.attention.allocate import Lane
from engine.attention.grid import Grid
from engine.attention.layout import Layout, build_layout, split_for_heads
from engine.attention.mask import Mask, Visibility
from engine.attention.plan import AttentionPlan, Channel
from engine.attention.planners.chunk_stays import Chunking
from engine.attention.planners.chunks import plan_chunked_backward, plan_chunked_forward
from engine.attention.planners.exchange import Attend, Exchange, plan_exchanged_backward, plan_exchanged_forward
from engine.attention.planners.gather import gather, plan_gather_backward, plan_gather_forward
from engine.attention.planners.ring import (
    Operands,
    Ring,
    circulate,
    plan_backward,
    plan_forward,
    preferred_direction,
    query_kind,
)
from engine.attention.presets import AttentionMethod


@dataclass(frozen=True)
class PlanPair:
    """Forward and backward plans of the same method, mask and layout.

    recompute   between the two, the forward pass again for queries whose results were not kept, if asked for. Pins as
                in forward, but `acc` has the first `recomputed_rows` of a rank's ring block only, and `saved` (after a
                head exchange, or in chunks) is given with what was kept in all other rows: the plan writes the first
                rows, and after an exchange sends out of all rows home

    Causal attention of a share c of the sequence costs c**2 of the whole, and only keys that those queries see travel.
    Source: Sun et al. 2025 (BurstEngine, sequence-level selective checkpointing: striped layout, causal, c = 1/2).
    """

    forward: AttentionPlan
    backward: AttentionPlan
    recompute: AttentionPlan | None = None


@dataclass(frozen=True)
class Blocks:
    """Who holds what: `home` rows of every rank between the layers, `ring` rows of every ring member inside attention.

    With head parallelism a ring member's block is the concatenation of its head group's pieces.
    """

    grid: Grid
    home: Layout
    ring: Layout


def divide_sequence(method: AttentionMethod, seq_len: int, masks: Sequence[Mask] = ()) -> Blocks:
    """Rows of every rank and ring member under the method's layout; `masks` are those that the layout must balance."""
    grid = grid_of(method)
    chunks = chunk_count(method, seq_len)
    cyclic = chunks if method.layout == "chunk_cyclic" else 1
    split_at = min(method.split_at, seq_len) if method.layout == "split_zigzag" else 0
    ring = build_layout(method.layout, seq_len, grid.ring_size, masks=masks, chunks=cyclic, split_at=split_at)
    if grid.heads == 1:
        return Blocks(grid, ring, ring)
    pieces = split_for_heads(ring, grid.heads, chunks)
    segments = tuple(pieces[index][head] for index, head in map(grid.place, range(grid.size)))
    return Blocks(grid, Layout(ring.name, seq_len, segments), ring)


def chunk_count(method: AttentionMethod, seq_len: int) -> int:
    """Chunks of every rank's rows, equally many on all ranks; 1 without a chunk pipeline."""
    if method.chunk_tokens is None:
        return 1
    rows = -(-seq_len // method.cp_size)
    return -(-rows // method.chunk_tokens)


def grid_of(method: AttentionMethod) -> Grid:
    """The places of a method's ranks."""
    return Grid(method.head_parallel_size, method.ring_inner_size, method.ring_outer_size, method.placement)


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

    recompute_before   plan the recompute pass too, for queries at positions before this one: 0 none of them, the
                       length of the layout (padding included) all; None: results are kept, nothing runs again

    A recompute pass without a head exchange and without queries does nothing, but for a reversed ring: its backward
    starts from the last keys that a rank held, which travel there again.
    """
    only = (rank,) if isinstance(rank, int) else rank
    visibility = Visibility(mask, blocks.ring)
    plans = _plan_passes(method, visibility, blocks, only)
    if recompute_before is None:
        return plans
    asking = _asking_rows(blocks, recompute_before)
    if asking == blocks.ring.row_counts:
        again = plans.forward
    else:
        restricted = Visibility(mask.queries_before(recompute_before), blocks.ring)
        again = _plan_forward(method, restricted, blocks, only, asking)
    return replace(plans, recompute=again)


def recomputed_rows(blocks: Blocks, recompute_before: int, rank: int) -> int:
    """How many first rows of the ring block that `rank` works on are computed again: rows ascend in position.

    cut=8, zigzag on 2 ranks     rank 0: 0 1 2 3 | 12 13 14 15     rank 1: 4 5 6 7 | 8 9 10 11
    again                                0 1 2 3                           4 5 6 7
    """
    return blocks.ring.rows_before(blocks.grid.place(rank)[0], recompute_before)


def _asking_rows(blocks: Blocks, before: int) -> tuple[int, ...]:
    return tuple(blocks.ring.rows_before(member, before) for member in range(blocks.ring.size))


def _plan_passes(
    method: AttentionMethod, visibility: Visibility, blocks: Blocks, only: Collection[int] | None
) -> PlanPair:
    forward = _plan_forward(method, visibility, blocks, only)
    return PlanPair(forward, _plan_backward(method, visibility, blocks, only))


def _plan_forward(
    method: AttentionMethod,
    visibility: Visibility,
    blocks: Blocks,
    only: Collection[int] | None,
    asking: tuple[int, ...] | None = None,
) -> AttentionPlan:
    """The forward pass; with `asking` the recompute pass, in which so many first rows of every ring block ask."""
    if method.chunk_tokens is not None:
        exchange = replace(_chunk_exchange(method, blocks), asking=asking)
        return plan_chunked_forward(visibility, exchange, _chunking(method), _plain_ring(method), only)
    if blocks.grid.heads > 1:
        exchange = replace(_exchange(method, visibility, blocks), asking=asking)
        return plan_exchanged_forward(exchange, _attend(method, visibility, backward=False), only)
    ring = _ring(method, visibility.mask, backward=False)
    plan = plan_gather_forward if method.kv_transport == "all_gather" else plan_forward
    return plan(visibility, ring, only)


def _plan_backward(
    method: AttentionMethod, visibility: Visibility, blocks: Blocks, only: Collection[int] | None
) -> AttentionPlan:
    if method.chunk_tokens is not None:
        exchange = _chunk_exchange(method, blocks)
        return plan_chunked_backward(visibility, exchange, _chunking(method), _plain_ring(method), only)
    if blocks.grid.heads > 1:
        attend = _attend(method, visibility, backward=True)
        circulates = "kv" if method.kv_transport == "all_gather" else method.backward_circulates
        return plan_exchanged_backward(_exchange(method, visibility, blocks), attend, query_kind(circulates), only)
    ring = _ring(method, visibility.mask, backward=True)
    if method.kv_transport == "all_gather":
        return plan_gather_backward(visibility, ring, only)
    return plan_backward(visibility, ring, method.backward_circulates, only)


def _exchange(method: AttentionMethod, visibility: Visibility, blocks: Blocks) -> Exchange:
    narrow = method.gradient_wire_dtype != "float32"
    ring = _ring(method, visibility.mask, backward=False)
    last_homes = tuple(map(ring.last_home, range(ring.size))) if ring.keeps_last else ()
    return Exchange(blocks.grid, blocks.ring.row_counts, method.kv_replicated, narrow, last_homes=last_homes)


def _chunk_exchange(method: AttentionMethod, blocks: Blocks) -> Exchange:
    narrow = method.gradient_wire_dtype != "float32"
    chunks = chunk_count(method, blocks.home.seq_len)
    return Exchange(blocks.grid, blocks.ring.row_counts, method.kv_replicated, narrow, chunks)


def _chunking(method: AttentionMethod) -> Chunking:
    return Chunking(method.chunk_store, method.prefetch_chunks)


def _plain_ring(method: AttentionMethod) -> Ring:
    return Ring(method.ring_inner_size, method.ring_outer_size)


def _attend(method: AttentionMethod, visibility: Visibility, *, backward: bool) -> Attend:
    ring = _ring(method, visibility.mask, backward=backward)

    def attend(lane: Lane, operands: Operands) -> None:
        if method.kv_transport == "all_gather":
            gather(visibility, ring, lane, operands)
        else:
            circulate(visibility, ring, method.backward_circulates if backward else "kv", lane, operands)

    return attend


def _ring(method: AttentionMethod, mask: Mask, *, backward: bool) -> Ring:
    circulates = method.backward_circulates if backward else "kv"
    reverses = method.backward_order == "reversed"
    gathers = method.kv_transport == "all_gather"
    return Ring(
        method.ring_inner_size,
        method.ring_outer_size,
        # A reversed backward turns the forward ring around by itself.
        direction=preferred_direction(circulates, method.ring_outer_size, backward=backward and not reverses),
        narrow_gradients=method.gradient_wire_dtype != "float32",
        backward_order=method.backward_order,
        # Behind a window no step waits for the last hop, and a tail would add one.
        tail_steps=0 if mask.window is not None or gathers else min(method.tail_steps, method.ring_inner_size),
        # One batch of NCCL is one event: posted all at once, the first block would be there with the last.
        prefetch_steps=method.ring_inner_size if gathers else None,
    )
