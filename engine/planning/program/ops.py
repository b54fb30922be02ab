"""The attention plan: tiles and transfers, step by step, for every rank. Plain values, no torch.

Every step runs in the same order on every rank:

    pre (local ops) -> post (transfers start) -> tiles (compute) -> wait (transfers end) -> after (local ops)

A message is one object with two ends: both ends post it at one step and wait for it at one later-or-equal step, so no
schedule made of messages can deadlock. On every channel waits come in post order (a channel is a FIFO: one
communicator, one stream). A buffer is reused only strictly after its last use; see `engine.planning.program.buffers`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from engine.config.settings import Store
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Band

Direction = Literal["forward", "backward"]
OpName = Literal["init", "add", "merge", "copy", "finish", "stats"]


class Kind(StrEnum):
    """The content of one row (token) of a buffer."""

    Q = "q"  # query
    KV = "kv"  # key and value
    PARTIAL = "partial"  # running out and lse, fp32: of the keys that were merged so far
    Q_DOUT_STATS = "q_dout_stats"  # query, dout and (lse, surrogate scale): of moving queries
    Q_DOUT_OUT = "q_dout_out"  # query, dout, out and lse: of queries that stay, and take `out` itself
    DQ = "dq"  # gradient of q, fp32
    DKV = "dkv"  # gradients of k and v, fp32
    DQ_WIRE = "dq_wire"  # gradient of q in the wire's dtype
    DKV_WIRE = "dkv_wire"  # gradients of k and v in the wire's dtype
    OUT_LSE = "out_lse"  # out in the compute dtype and lse: saved by forward for backward
    OUT = "out"  # out in the compute dtype
    DOUT = "dout"  # gradient of out, compute dtype
    DQ_CAST = "dq_cast"  # complete gradient of q in the compute dtype
    DKV_CAST = "dkv_cast"  # complete gradients of k and v in the compute dtype


@dataclass(frozen=True)
class LatentShape:
    """What one token leaves of its keys and values in multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    A latent of `rank` numbers, of which a linear layer makes k (all but its last `rope_dim` channels) and v of every
    head, and the key of `rope_dim` numbers with the position in it, which all heads share.
    """

    rank: int
    rope_dim: int

    @property
    def dim(self) -> int:
        """Numbers per token."""
        return self.rank + self.rope_dim


class Field(NamedTuple):
    """One tensor of a kind: [rows, ...] with query or kv heads, or latents.

    shape          of a row: "heads", "qk_dim" or "v_dim" (widths of a head of q and k, and of v and out), "latents"
                   and "latent_dim" (their number, one per sequence, and width), and numbers
    dtype          that of the model, of sums (fp32) or of gradients on the wire
    is_allocated   whether it takes memory; else it is what forward saved
    """

    name: str
    shape: tuple[str | int, ...] = ("heads", "qk_dim")
    dtype: Literal["element", "sum", "wire"] = "element"
    is_allocated: bool = True

    @property
    def of_keys(self) -> bool:
        """Whether its heads are kv heads."""
        return self.name in ("k", "v", "dk", "dv")

    def row(
        self, heads: tuple[int, int], qk_dim: int, v_dim: int, latents: tuple[int, int] = (0, 0)
    ) -> tuple[int, ...]:
        """Shape of a row with this many query and kv heads; `latents`: number and width."""
        sizes = {"heads": heads[self.of_keys], "qk_dim": qk_dim, "v_dim": v_dim}
        sizes |= {"latents": latents[0], "latent_dim": latents[1]}
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.shape)


_V_SHAPE = ("heads", "v_dim")
_Q, _OUT, _DOUT, _LSE = Field("q"), Field("out", _V_SHAPE), Field("dout", _V_SHAPE), Field("lse", ("heads",), "sum")
_DK, _DV = Field("dk"), Field("dv", _V_SHAPE)
_DLATENT = Field("dlatent", ("latents", "latent_dim"))

# Tensors of a buffer, and of a message, of each kind, in this order.
FIELDS: dict[Kind, tuple[Field, ...]] = {
    Kind.Q: (_Q,),
    Kind.KV: (Field("k"), Field("v", _V_SHAPE)),
    Kind.PARTIAL: (_OUT._replace(dtype="sum"), _LSE),
    Kind.Q_DOUT_STATS: (_Q, _DOUT, Field("stats", ("heads", 2), "sum")),
    Kind.Q_DOUT_OUT: (_Q, _DOUT, _OUT._replace(is_allocated=False), _LSE._replace(is_allocated=False)),
    Kind.DQ: (Field("dq", dtype="sum"),),
    Kind.DKV: (_DK._replace(dtype="sum"), _DV._replace(dtype="sum")),
    Kind.DQ_WIRE: (Field("dq", dtype="wire"),),
    Kind.DKV_WIRE: (_DK._replace(dtype="wire"), _DV._replace(dtype="wire")),
    Kind.OUT_LSE: (_OUT, _LSE),
    Kind.OUT: (_OUT,),
    Kind.DOUT: (_DOUT,),
    Kind.DQ_CAST: (Field("dq"),),
    Kind.DKV_CAST: (_DK, _DV),
}

# The same where the latents of keys and values take their place (`LatentShape`): plans do not differ.
LATENT_FIELDS: dict[Kind, tuple[Field, ...]] = {
    **FIELDS,
    Kind.KV: (Field("latent", ("latents", "latent_dim")),),
    Kind.DKV: (_DLATENT._replace(dtype="sum"),),
    Kind.DKV_WIRE: (_DLATENT._replace(dtype="wire"),),
    Kind.DKV_CAST: (_DLATENT,),
}


class Channel(StrEnum):
    """Independent FIFOs: payload and gradients, inside a ring and between rings; head exchange; host memory."""

    PAYLOAD_INNER = "x.in"
    PAYLOAD_OUTER = "x.out"
    GRADIENT_INNER = "g.in"
    GRADIENT_OUTER = "g.out"
    HEADS = "h"
    TO_DEVICE = "h2d"
    TO_HOST = "d2h"


# Channels whose transfers stay on one rank.
HOST_CHANNELS = frozenset({Channel.TO_DEVICE, Channel.TO_HOST})


@dataclass(frozen=True)
class HeadPart:
    """Part `index` of `count` nearly equal parts of the query heads, with the kv heads that these use; the one of one
    is all of them.
    """

    index: int = 0
    count: int = 1

    def queries(self, num_heads: int) -> tuple[int, int]:
        """[first, last) query heads."""
        return self.index * num_heads // self.count, (self.index + 1) * num_heads // self.count

    def keys(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """[first, last) kv heads; parts overlap when there are more parts than kv heads (replication)."""
        first, last = self.queries(num_heads)
        group = num_heads // num_kv_heads
        return first // group, -(-last // group)

    def part(self, inner: HeadPart) -> HeadPart:
        """A part of this part; of heads that both counts divide."""
        return HeadPart(self.index * inner.count + inner.index, self.count * inner.count)

    def counts(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Numbers of query and of kv heads."""
        (q_first, q_last), (k_first, k_last) = self.queries(num_heads), self.keys(num_heads, num_kv_heads)
        return q_last - q_first, k_last - k_first


ALL_HEADS = HeadPart()


@dataclass(frozen=True)
class Buffer:
    """A buffer of `rows` tokens; `argument` names an input or output of the plan that lives as long as the plan runs.

    `where`: device memory, or host memory (pinned pages, for a GPU).
    """

    kind: Kind
    rows: int
    argument: str | None = None
    heads: HeadPart = ALL_HEADS
    where: Store = "device"


class View(NamedTuple):
    """Rows [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int


class Tile(NamedTuple):
    """One kernel call: `q` against `kv` under the visibility `band`, whose rows count from 0 in both.

    Forward merges into `sums` (kind PARTIAL). Backward adds to `sums` (kind DQ) and `kv_sums` (kind DKV). Where it is
    the first to do so it `stores` instead: these rows hold nothing yet.

    `heads` is the part of its operands' heads that it computes: heads of one layer may have different masks, and then
    every class of heads has separate tiles. Such a tile never stores, since the rows of other heads may have sums.
    """

    q: View
    kv: View
    sums: View
    band: Band
    kv_sums: View | None = None
    stores: bool = False  # to sums
    stores_kv: bool = False  # to kv_sums
    heads: HeadPart = ALL_HEADS


class Transfer(NamedTuple):
    """One end of a message; `tag` is the same number at both ends.

    load (host to device) and store (device to host) have one end: they read `source` and write `view`, and `peer` is
    the rank itself. With a `kind` they move its fields alone, which both buffers have among others.
    """

    tag: int
    op: Literal["send", "recv", "load", "store"]
    channel: Channel
    peer: int
    view: View
    source: View | None = None
    kind: Kind | None = None


class LocalOp(NamedTuple):
    """An operation on one rank's buffers.

    init    dst = 0, lse = -inf
    add     dst += src
    merge   dst (kind PARTIAL) becomes the softmax over the keys of dst and of src, another partial result of these rows
    copy    dst = src, cast; fields that only one side has are left out
    finish  dst (kind OUT_LSE) = src (kind PARTIAL), complete: all keys are merged, and src is not used again
    stats   dst (kind Q_DOUT_STATS) gets lse and the surrogate scale from its dout and src (kind OUT_LSE)

    add, merge and copy between buffers of different heads work on the heads of the narrower one.
    """

    op: OpName
    dst: View
    src: View | None = None


@dataclass(frozen=True)
class Step:
    """The ops of one rank between two points at which all ranks could synchronise."""

    index: int
    pre: tuple[LocalOp, ...] = ()
    post: tuple[Transfer, ...] = ()
    tiles: tuple[Tile, ...] = ()
    wait: tuple[int, ...] = ()  # tags
    after: tuple[LocalOp, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """Buffers and steps of one rank."""

    rank: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def transfers(self) -> Iterator[Transfer]:
        """All transfers in posting order."""
        for step in self.steps:
            yield from step.post

    def tiles(self) -> Iterator[Tile]:
        """All tiles in order."""
        for step in self.steps:
            yield from step.tiles

    @property
    def arguments(self) -> frozenset[str]:
        """Names of the inputs and outputs."""
        return frozenset(buffer.argument for buffer in self.buffers if buffer.argument is not None)

    def argument(self, name: str) -> int:
        """Index of the buffer of argument `name`."""
        return next(index for index, buffer in enumerate(self.buffers) if buffer.argument == name)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that one token of each kind occupies on the wire, and in allocated buffers.

    Heads of q and k are `qk_dim` wide, those of v and out `v_dim`.

    out and lse of a Q_DOUT_OUT are those that forward left, and take none. With `latent` keys and values are
    `num_latents` latents, one per sequence; heads are then not divided.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    element_bytes: int = 2
    gradient_bytes: int = 4  # fp32 accumulators; also on the wire unless a narrower dtype is set
    wire_gradient_bytes: int = 4
    latent: LatentShape | None = None
    num_latents: int = 1

    @functools.cache  # noqa: B019  # instances are few and small
    def of(self, kind: Kind, heads: HeadPart = ALL_HEADS) -> int:
        """Bytes of one token of `kind`, of some heads."""
        counts = heads.counts(self.num_heads, self.num_kv_heads)
        size = {"element": self.element_bytes, "sum": self.gradient_bytes, "wire": self.wire_gradient_bytes}
        fields = FIELDS if self.latent is None else LATENT_FIELDS
        latents = (0, 0) if self.latent is None else (self.num_latents, self.latent.dim)
        rows = [(f.row(counts, self.qk_dim, self.v_dim, latents), f.dtype) for f in fields[kind] if f.is_allocated]
        return sum(math.prod(row) * size[dtype] for row, dtype in rows)


class LinkBytes(NamedTuple):
    """Bytes sent by one rank inside its node and to other nodes, and bytes it moves between host and device."""

    intra_bytes: int = 0
    inter_bytes: int = 0
    host_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes sent to other ranks."""
        return self.intra_bytes + self.inter_bytes


@dataclass(frozen=True)
class AttentionPlan:
    """Plans of some or all ranks of a group of `size` ranks, for one direction.

    `ranks` maps rank -> plan; a training rank builds only its plan, tests and previews build all of them.
    """

    direction: Direction
    size: int
    ranks: Mapping[int, RankPlan] = field(default_factory=dict)

    def bytes_by_link(self, token_bytes: TokenBytes, topology: Topology) -> dict[int, LinkBytes]:
        """Bytes that each planned rank sends in one run of the plan, by kind of link."""
        result = {}
        for rank, plan in self.ranks.items():
            intra = inter = host = 0
            for transfer in plan.transfers():
                view, buffer = transfer.view, plan.buffers[transfer.view.buffer]
                size = (view.stop - view.start) * token_bytes.of(transfer.kind or buffer.kind, buffer.heads)
                if transfer.op in ("load", "store"):
                    host += size
                elif transfer.op == "send":
                    same = topology.same_node(rank, transfer.peer)
                    intra, inter = intra + size * same, inter + size * (not same)
            result[rank] = LinkBytes(intra, inter, host)
        return result
