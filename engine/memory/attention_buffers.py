"""Memory of one layer's attention in closed form, by method; what the plans in `engine.attention` would allocate.

C is the block of keys and values, or what else travels, of one rank. A flat ring needs two blocks beside its own: one
that is computed with, one that arrives. A double ring needs more, which the outer ring brings meanwhile. Partial
gradients travel too: one that is added to, one that arrives, one that leaves. A head exchange holds every operand
twice, as sent and as received. A pipeline of chunks does all this with a chunk instead of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.shapes import LSE_BYTES, WIDE_BYTES, RankShape
from engine.planning.methods.presets import AttentionMethod

# Blocks beside the rank's own, as the plans count them: payloads forward, payloads backward, fp32 gradients.
_RING_OF_TWO = (1.0, 1.0, 1.5)
_FLAT_RING = (2.0, 2.0, 3.0)
_DOUBLE_RING_OF_TWO = (3.0, 3.0, 4.5)
_DOUBLE_RING = (4.0, 5.0, 7.0)


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes of one layer's attention on one rank.

    working       buffers that one pass uses and the next uses again; the larger of both passes
    accumulated   out and lse in fp32 while forward runs, if they are no working buffers
    inputs        q, k, v as backward starts from them
    gradients     dout with its statistics, and dq, dk, dv as backward leaves them
    inputs_where  device, or host under attention.chunk_store=host
    """

    working: int
    accumulated: int
    inputs: int
    gradients: int
    on_host: bool


def attention_bytes(shape: RankShape, method: AttentionMethod) -> AttentionBytes:
    """What attention of one layer takes; inputs and gradients lie where the chunk store is."""
    widths = _Widths(shape)
    rows, exchanged = shape.rows, method.head_parallel_size > 1
    if method.chunk_tokens is not None:
        working = shape.chunk_rows * _chunk_working(widths, exchanged=exchanged)
        dq_bytes = WIDE_BYTES * shape.q_width  # accumulated over the chunks
        gradients = rows * (widths.qx - widths.q + widths.cast + dq_bytes)
        return AttentionBytes(round(working), 0, rows * (widths.q + widths.kv), gradients, method.chunk_store == "host")
    forward, backward = _ring_working(widths, method)
    if exchanged:
        sent = (method.head_parallel_size - 1) / method.head_parallel_size  # the own part stays
        forward += widths.q + widths.kv + widths.acc + sent * (2 * widths.out + widths.kv + widths.q)
        backward += widths.wide + sent * 2 * (widths.out + widths.cast)
        gradients = widths.out + widths.qx - widths.q + widths.cast
    else:
        gradients = widths.qx - widths.q + widths.wide
    # q and dout of qx are the tensors themselves; the last block held after a reversed ring takes the place of k, v.
    return AttentionBytes(
        working=round(rows * max(forward, backward)),
        accumulated=0 if exchanged else rows * widths.acc,
        inputs=rows * (widths.q + widths.kv),
        gradients=round(rows * gradients),
        on_host=False,
    )


class _Widths:
    """Bytes per token of what attention works on."""

    def __init__(self, shape: RankShape) -> None:
        element = shape.element_bytes
        self.q = self.out = shape.q_width * element
        self.kv = 2 * shape.kv_width * element
        self.acc = WIDE_BYTES * shape.q_width + LSE_BYTES * shape.heads
        self.qx = 2 * self.q + 2 * LSE_BYTES * shape.heads  # q, dout, lse and the surrogate scale
        self.saved = self.out + LSE_BYTES * shape.heads
        self.dq, self.dkv = WIDE_BYTES * shape.q_width, 2 * WIDE_BYTES * shape.kv_width
        self.wide = self.dq + self.dkv
        self.cast = self.q + self.kv


def _ring_working(widths: _Widths, method: AttentionMethod) -> tuple[float, float]:
    """Bytes per token of the blocks that travel, forward and backward."""
    inner, outer = method.ring_inner_size, method.ring_outer_size
    size = inner * outer
    if size == 1:
        return 0.0, 0.0
    blocks = _FLAT_RING if min(inner, outer) == 1 else _DOUBLE_RING_OF_TWO if outer == 2 else _DOUBLE_RING
    ahead, payloads, gradients = _RING_OF_TWO if size == 2 else blocks
    if method.kv_transport == "all_gather":
        # Every block, but one that is done with makes room for the next.
        ahead = payloads = (size - 1) * 0.9
    if method.backward_circulates == "q":
        return ahead * widths.kv, payloads * widths.qx + gradients * widths.dq
    return ahead * widths.kv, payloads * widths.kv + gradients * widths.dkv


def _chunk_working(widths: _Widths, *, exchanged: bool) -> float:
    """Bytes per token of a chunk: operands of this chunk, of the one fetched ahead and of the one on its way out.

    A head exchange has them as sent beside as received.
    """
    sent = 1 if exchanged else 0
    forward = (3 + sent) * (widths.q + widths.kv) + 2 * widths.acc + widths.saved + (2 + sent) * widths.out
    backward = 2 * (widths.kv + widths.qx) + 1.5 * widths.dkv + 3 * widths.dq + widths.saved
    backward += (2 + 2 * sent) * widths.out + (2 + sent) * widths.cast
    return max(forward, backward)
