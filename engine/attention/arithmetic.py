"""The real arithmetic of plans: attention tensors, one kernel per tile, accumulators wider than the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.buffers import Lease, allocate_tensor, buffer_location
from engine.attention.executor import Fields, Operand
from engine.attention.latent import LatentExpansion
from engine.attention.merge import add_kv, backward_stats, finish, merge_tile, surrogate_out
from engine.attention.sinks import SinkGradients
from engine.device.row_blocks import accumulate_dtype, ends
from engine.kernels.attention.base import TileGradients, TileKernel
from engine.kernels.attention.heads import HeadSlices, call_elements, head_slices, split_heads
from engine.planning.program.ops import FIELDS, LATENT_FIELDS, Buffer, Tile

KV_FIELDS = frozenset({field.name for fields in FIELDS.values() for field in fields if field.of_keys})
ACCUMULATED = frozenset({"sums", "kv_sums"})  # operands of a tile that it adds to


@dataclass(frozen=True)
class AttentionShape:
    """Heads and dtypes of one attention call; `batch` sequences are folded into the heads.

    Heads of q and k are `qk_dim` wide, those of v and out `v_dim`.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device
    wire_gradient_dtype: torch.dtype = torch.float32


class TensorArithmetic:
    """Tiles by a kernel; out, lse, dq, dk, dv accumulate in fp32 (float64) over all tiles and are cast once at the
    end.
    """

    def __init__(
        self,
        shape: AttentionShape,
        kernel: TileKernel,
        *,
        lease: Lease | None = None,
        sinks: Tensor | None = None,
        sink_gradients: SinkGradients | None = None,
        expansion: LatentExpansion | None = None,
    ) -> None:
        """Start one run of a plan.

        Args:
            shape: Of the call.
            kernel: Computes its tiles.
            lease: Where buffers come from that are neither input nor output; None: new ones.
            sinks: Learnable sinks [num_heads] of a forward pass, in the dtype of sums (see `merge.finish`).
            sink_gradients: Of a backward pass that forms statistics of its rows: their shares are added there.
            expansion: Buffers hold latents, which it expands in tiles; None: k and v. For undivided heads.
        """
        self.shape = shape
        self._expansion = expansion
        self._fields = FIELDS if expansion is None else LATENT_FIELDS
        self._sinks = sinks
        self._sink_gradients = sink_gradients
        self.kernel = kernel
        self._lease = lease
        self._late: _KvGradients | None = None

    def allocate(self, buffer: Buffer) -> Fields:
        """Uninitialised tensors of a buffer; those of the host in pinned memory for a GPU."""
        location = buffer_location(self.shape.device, buffer.where)
        # Inputs and outputs outlive the run, and so the lease.
        empty = allocate_tensor if self._lease is None or buffer.argument is not None else self._lease.empty
        return {
            name: empty((buffer.rows, *tail), dtype, location)
            for name, (tail, dtype) in self._field_shapes(buffer).items()
        }

    def run_tile(self, tile: Tile, fields: Mapping[str, Fields]) -> None:
        """Forward: merge (out, lse). Backward: add dq to sums and (dk, dv) to kv_sums. In parts of the heads if large.

        dk and dv of the tile are held back until the next op: where that adds received dk and dv to the same rows, one
        pass over memory does both.
        """
        if self._expansion is not None:
            self._run_on_latents(tile, fields, self._expansion)
            return
        run: Callable[[Tile, Mapping[str, Fields]], object] = (
            self._run_forward if "kv_sums" not in fields else self._run_backward
        )
        q, v, limit = fields["q"]["q"], fields["kv"]["v"], self.kernel.capabilities.max_call_elements
        is_large = limit is not None and call_elements(q, v) * q.shape[1] > limit
        if tile.heads.count > 1:
            fields = _part_of(head_slices(tile.heads, q, v), fields, copies=is_large)
            q, v = fields["q"]["q"], fields["kv"]["v"]
        if limit is None or call_elements(q, v) * q.shape[1] <= limit:
            run(tile, fields)
            return
        shared = set()  # kv heads that an earlier part has written: query heads of two parts may share one
        for part in ends(split_heads(q, v, limit)):
            operands = _part_of(part, fields, copies=True)
            run(tile._replace(stores_kv=tile.stores_kv and part.keys.start not in shared), operands)
            shared.add(part.keys.start)

    def _run_on_latents(self, tile: Tile, fields: Mapping[str, Fields], expansion: LatentExpansion) -> None:
        """As `run_tile`, of latents: k and v, dk and dv live for this tile, or for a part of its heads if it is large.

        The gradients of one tile are never held beside those of another, so none waits for those that arrive.
        """
        assert tile.heads.count == 1, "latents belong to all heads"
        latents, q = fields["kv"]["latent"], fields["q"]["q"]
        limit = self.kernel.capabilities.max_call_elements
        heads = expansion.heads
        v_like = torch.empty(len(latents), expansion.num_heads, heads.v_dim, device="meta")
        if limit is None or call_elements(q, v_like) * q.shape[1] <= limit:
            parts = [HeadSlices(slice(0, q.shape[1]), slice(0, expansion.num_heads))]
        else:
            parts = split_heads(q, v_like, limit)
        if tile.stores_kv:
            fields["kv_sums"]["dlatent"].zero_()
        for part in ends(parts):
            operands = _part_of(part, {name: fields[name] for name in ("q", "sums")}, copies=len(parts) > 1)
            operands["kv"] = expansion.expand(latents, part.keys)
            if "kv_sums" not in fields:
                self._run_forward(tile, operands)
                continue
            gradients = self._run_backward(tile, operands)
            expansion.add_gradients(fields["kv_sums"]["dlatent"], latents, gradients["dk"], gradients["dv"], part.keys)

    def _run_forward(self, tile: Tile, fields: Mapping[str, Fields]) -> None:
        q, kv, partial = fields["q"], fields["kv"], fields["sums"]
        # q [n, H, qk_dim], k [m, K, qk_dim], v [m, K, v_dim] -> out [n, H, v_dim], lse [n, H] over this tile's keys
        block_out, block_lse = self.kernel.forward(q["q"], kv["k"], kv["v"], tile.band)
        if tile.stores:  # the first tile of these rows: nothing to merge with
            partial["out"].copy_(block_out)
            partial["lse"].copy_(block_lse)
        else:
            merge_tile(partial["out"], partial["lse"], block_out, block_lse)

    def _run_backward(self, tile: Tile, fields: Mapping[str, Fields]) -> Fields:
        """dk and dv of a tile, held back as `_late` but for latents; its dq is added to the sums."""
        q, kv, sums = fields["q"], fields["kv"], fields["sums"]["dq"]
        dout = q["dout"]
        # lse is over ALL keys of a row, not over those of this tile: so p = exp(scores - lse) is its share of the whole
        # softmax, and gradients of tiles simply add up.
        if "out" in q:  # queries that stay with their owner, which has out
            grads = TileGradients(dout, q["out"], q["lse"])
        else:  # queries that moved: kernels need rowsum(dout * out) alone, which a multiple of dout gives as well
            grads = TileGradients(dout, surrogate_out(dout, q["stats"]), q["stats"][..., 0])
        if self._late is not None:  # the gradients of two tiles are never held at once
            self.finish_step()
        dq, dk, dv = self.kernel.backward(grads, q["q"], kv["k"], kv["v"], tile.band)
        if tile.stores:
            sums.copy_(dq)
        else:
            sums.add_(dq)
        gradients = {"dk": dk, "dv": dv}
        if self._expansion is None:
            self._late = _KvGradients(fields["kv_sums"], gradients, tile.stores_kv)
        return gradients

    def finish_step(self) -> None:
        """Add the dk and dv of the last tile to their sums."""
        if self._late is not None:
            late, self._late = self._late, None
            add_kv(late.sums, late.gradients, stores=late.stores)

    def run_op(self, op: str, dst: Operand, src: Operand | None) -> None:
        """init, add (in dst's dtype, computed in the wider one), merge, copy, finish or stats."""
        late = self._late
        if late is not None:
            if op == "add" and src and late.adds_to(dst) and dst.buffer.heads == src.buffer.heads:
                self._late = None
                add_kv(late.sums, late.gradients, src.fields, stores=late.stores)
                return
            self.finish_step()
        if op == "init":
            for name, tensor in dst.fields.items():
                tensor.fill_(-torch.inf if name == "lse" else 0.0)
            return
        assert src is not None
        if op == "stats":
            rows = (dst.fields["dout"], src.fields["out"], src.fields["lse"])
            dst.fields["stats"].copy_(backward_stats(*rows))
            if self._sink_gradients is not None:  # chunks of dout on the device are not seen again
                self._sink_gradients.add(src.buffer.heads, *rows)
            return
        if op in ("merge", "finish"):
            (out, partial_out), (lse, partial_lse) = (self._same_heads(name, dst, src) for name in ("out", "lse"))
            if op == "merge":
                merge_tile(out, lse, partial_out, partial_lse)
            else:
                finish(out, lse, partial_out, partial_lse, self._sinks_of(src.buffer))
            return
        for name in dst.fields.keys() & src.fields.keys():
            target, source = self._same_heads(name, dst, src)
            if op == "add":
                target.add_(source)
            else:
                target.copy_(source)

    def _sinks_of(self, buffer: Buffer) -> Tensor | None:
        return None if self._sinks is None else self._sinks[slice(*buffer.heads.queries(self.shape.num_heads))]

    def release(self) -> None:
        """Give back the buffers that are neither input nor output."""
        if self._lease is not None:
            self._lease.close()

    def wire_fields(self, buffer: Buffer, fields: Fields) -> tuple[Tensor, ...]:
        """Tensors that travel, in fixed order."""
        return tuple(fields[field.name] for field in self._fields[buffer.kind])

    def _same_heads(self, name: str, dst: Operand, src: Operand) -> tuple[Tensor, Tensor]:
        """The two tensors, the one with more heads cut to the heads of the other."""
        target, source = dst.fields[name], src.fields[name]
        if dst.buffer.heads == src.buffer.heads:
            return target, source
        wide, narrow = (dst, src) if dst.buffer.heads.count == 1 else (src, dst)
        assert wide.buffer.heads.count == 1, "of two different parts of the heads, neither holds the other"
        part, shape = narrow.buffer.heads, self.shape
        if name in KV_FIELDS:
            first, last = part.keys(shape.num_heads, shape.num_kv_heads)
        else:
            first, last = part.queries(shape.num_heads)
        if wide is dst:
            return target[:, first:last], source
        return target, source[:, first:last]

    def _field_shapes(self, buffer: Buffer) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        shape, fields = self.shape, self._fields[buffer.kind]
        counts = buffer.heads.counts(shape.num_heads, shape.num_kv_heads)
        dtypes = {"element": shape.dtype, "sum": accumulate_dtype(shape.dtype), "wire": shape.wire_gradient_dtype}
        latents = (0, 0)
        if self._expansion is not None:
            assert buffer.heads.count == 1, "latents belong to all heads"
            latents = (self._expansion.sequences, self._expansion.heads.latent.dim)
        return {f.name: (f.row(counts, shape.qk_dim, shape.v_dim, latents), dtypes[f.dtype]) for f in fields}


class _KvGradients(NamedTuple):
    """dk and dv of the last tile, which are not in `sums` (a DKV buffer's fields) yet.

    They are added, or stored, before any other tile or op and at the end of the step. Only an op that adds to the very
    same rows takes them along, so that memory is passed over once.
    """

    sums: Fields
    gradients: Fields
    stores: bool

    def adds_to(self, dst: Operand) -> bool:
        """Whether `dst` is known to be the same rows; by identity, so not if the view was cut again meanwhile."""
        return self.sums is dst.fields


def _part_of(part: HeadSlices, fields: Mapping[str, Fields], *, copies: bool) -> dict[str, Fields]:
    """Operands of a tile cut to a part of its heads: accumulators as views, to be added to, and the others too unless
    `copies`: rows of a view are as far apart as those of a large whole, and kernels count in 32 bits.
    """
    cut: dict[str, Fields] = {}
    for name, tensors in fields.items():
        views = {key: x[:, part.keys if key in KV_FIELDS else part.queries] for key, x in tensors.items()}
        cut[name] = views if name in ACCUMULATED or not copies else {key: x.contiguous() for key, x in views.items()}
    return cut
