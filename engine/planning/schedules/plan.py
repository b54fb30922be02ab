"""From a method, a mask and a layout to the plans of both passes. No torch: previews and tests plan here too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.config.settings import RunConfig
from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import BYTES_OF, AttentionMethod, local_heads
from engine.planning.program.ops import AttentionPlan, Channel, Direction, TokenBytes
from engine.planning.program.program import Program, plan_ranks
from engine.planning.schedules import chunks
from engine.planning.schedules.whole import RowsNeededCache, WholeBlocks
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import Visibility


@dataclass(frozen=True)
class PlanPair:
    """Forward and backward plans of the same method, mask and layout.

    recompute   between the two, the forward pass again for queries whose results were not kept, if asked for. Arguments
                as in forward, but `partial` and `out_lse` have the first `recomputed_rows` of a rank's ring block only.
                After a head exchange, or in chunks, `out_lse` has all rows and is given with those that were kept: the
                plan writes the first rows, and after an exchange sends out of all rows to their owners

    Causal attention of a share c of the sequence costs c**2 of the whole, and only keys that those queries see travel.
    Source: Sun et al. 2025 (BurstEngine, sequence-level selective checkpointing: striped layout, causal, c = 1/2).
    """

    forward: AttentionPlan
    backward: AttentionPlan
    recompute: AttentionPlan | None = None


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
    visible = Visibility(mask, blocks.ring)
    forward = plan_attention(visible, method, blocks, "forward", only)
    backward = plan_attention(visible, method, blocks, "backward", only)
    again = None
    if recompute_before is not None:
        query_rows = tuple(
            blocks.ring.rows_before(ring_rank, recompute_before) for ring_rank in range(blocks.ring.size)
        )
        again = forward
        if query_rows != blocks.ring.row_counts:
            restricted = Visibility(mask.queries_before(recompute_before), blocks.ring)
            again = plan_attention(restricted, method, blocks, "forward", only, query_rows)
    return PlanPair(forward, backward, again)


def plan_attention(
    visible: Visibility,
    method: AttentionMethod,
    blocks: Blocks,
    direction: Direction,
    only: Collection[int] | None = None,
    query_rows: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plans of one pass, for some ranks or (None) for all, each written by itself.

    Args:
        query_rows: forward again: of every ring rank, how many first rows of its block are computed; out and lse of
            the others were saved.
    """
    rows_needed_cache: RowsNeededCache = {}
    plans_one_rank = only is not None and len(only) == 1

    def write(program: Program) -> None:
        rows = query_rows[blocks.grid.coordinates(program.rank)[0]] if query_rows else None
        if method.chunk_tokens is not None:
            chunked = chunks.Forward if direction == "forward" else chunks.Backward
            chunked(program, visible, method, blocks, rows).write()
            return
        whole = WholeBlocks(program, visible, method, blocks, rows_needed_cache, plans_one_rank=plans_one_rank)
        if direction == "forward":
            whole.forward(rows)
        else:
            whole.backward()

    return plan_ranks(direction, method.cp_size, only, write)


def token_bytes_of(config: RunConfig, method: AttentionMethod) -> TokenBytes:
    """Bytes per token position; the sequences of a micro-batch are folded into the heads, as attention runs them."""
    model, train = local_heads(config.model, config.parallel.tp_size), config.train
    return TokenBytes(
        num_heads=model.num_heads * train.micro_batch_size,
        num_kv_heads=model.num_kv_heads * train.micro_batch_size,
        qk_dim=model.head_dim,
        v_dim=model.head_dim,
        element_bytes=BYTES_OF[train.compute_dtype],
        wire_gradient_bytes=BYTES_OF[method.gradient_wire_dtype],
    )
