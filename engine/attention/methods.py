"""From a method, a mask and a layout to the plans of both passes. No torch: previews and tests plan here too."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
)
from engine.attention.presets import AttentionMethod


@dataclass(frozen=True)
class PlanPair:
    """Forward and backward plans of the same method, mask and layout."""

    forward: AttentionPlan
    backward: AttentionPlan


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
    ring = build_layout(method.layout, seq_len, grid.ring_size, masks=masks, chunks=cyclic)
    if grid.heads == 1:
        return Blocks(grid, ring, ring)
    pieces = split_for_heads(ring, grid.heads, chunks)
    segments = tuple(pieces[index][head] for index, head in map(grid.place, range(grid.size)))
    return Blocks(grid, Layout(ring.name, seq_len, segments), ring)


def padded_length(seq_len: int, cp_size: int, tp_size: int = 1) -> int:
    """seq_len rounded up so that every rank gets two equal chunks, which its tp ranks can divide."""
    multiple = math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * tp_size)
    return -(-seq_len // multiple) * multiple


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


def plan_method(method: AttentionMethod, mask: Mask, blocks: Blocks, rank: int | None = None) -> PlanPair:
    """Both plans of a method, for one rank or (None) for all ranks."""
    visibility = Visibility(mask, blocks.ring)
    only = None if rank is None else (rank,)
    if method.chunk_tokens is not None:
        return _plan_chunked(method, visibility, blocks, only)
    if blocks.grid.heads > 1:
        return _plan_exchanged(method, visibility, blocks, only)
    forward, backward = (_ring(method, mask, backward=backward) for backward in (False, True))
    if method.kv_transport == "all_gather":
        return PlanPair(
            plan_gather_forward(visibility, forward, only), plan_gather_backward(visibility, backward, only)
        )
    return PlanPair(
        plan_forward(visibility, forward, only),
        plan_backward(visibility, backward, method.backward_circulates, only),
    )


def _plan_exchanged(
    method: AttentionMethod, visibility: Visibility, blocks: Blocks, only: Collection[int] | None
) -> PlanPair:
    narrow = method.gradient_wire_dtype != "float32"
    ring = _ring(method, visibility.mask, backward=False)
    last_homes = tuple(map(ring.last_home, range(ring.size))) if ring.keeps_last else ()
    exchange = Exchange(blocks.grid, blocks.ring.row_counts, method.kv_replicated, narrow, last_homes=last_homes)
    return PlanPair(
        plan_exchanged_forward(exchange, _attend(method, visibility, backward=False), only),
        plan_exchanged_backward(exchange, _attend(method, visibility, backward=True), only),
    )


def _plan_chunked(
    method: AttentionMethod, visibility: Visibility, blocks: Blocks, only: Collection[int] | None
) -> PlanPair:
    narrow = method.gradient_wire_dtype != "float32"
    chunks = chunk_count(method, blocks.home.seq_len)
    exchange = Exchange(blocks.grid, blocks.ring.row_counts, method.kv_replicated, narrow, chunks)
    chunking = Chunking(method.chunk_store, method.prefetch_chunks)
    ring = Ring(method.ring_inner_size, method.ring_outer_size)
    return PlanPair(
        plan_chunked_forward(visibility, exchange, chunking, ring, only),
        plan_chunked_backward(visibility, exchange, chunking, ring, only),
    )


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
