"""The real arithmetic of plans: attention tensors, one kernel per tile, accumulators wider than the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.executor import Fields
from engine.attention.kernels.base import BandSpec, TileGradients, TileKernel
from engine.attention.merge import merge_tile, surrogate_out
from engine.attention.plan import Kind, Slot, Tile, TokenBytes
from engine.attention.transport import poison

WIRE_ORDER = ("q", "dout", "stats", "k", "v", "dq", "dkv")  # `out` never travels


@dataclass(frozen=True)
class AttentionShape:
    """Heads and dtypes of one attention call; `batch` sequences are folded into the heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    wire_gradient_dtype: torch.dtype = torch.float32

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, otherwise float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def token_bytes(self) -> TokenBytes:
        """Bytes per token of each kind, as the transport will count them."""
        return TokenBytes(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            element_bytes=self.dtype.itemsize,
            gradient_bytes=self.accumulator_dtype.itemsize,
            wire_gradient_bytes=self.wire_gradient_dtype.itemsize,
        )


class TensorArithmetic:
    """Tiles by a kernel; out, lse, dq, dk, dv accumulate in fp32 (float64) over all tiles and are cast once at the
    end.
    """

    def __init__(self, shape: AttentionShape, kernel: TileKernel, *, poisoned: bool = False) -> None:
        self.shape = shape
        self.kernel = kernel
        self._poisoned = poisoned

    def allocate(self, slot: Slot) -> Fields:
        """Uninitialised buffers of a slot (poisoned on request)."""
        fields = {
            name: torch.empty(slot.rows, *tail, dtype=dtype, device=self.shape.device)
            for name, (tail, dtype) in self._field_shapes(slot.kind).items()
        }
        return {name: poison(tensor) for name, tensor in fields.items()} if self._poisoned else fields

    def run_tile(self, tile: Tile, fields: Mapping[str, Fields]) -> None:
        """Forward: merge (out, lse). Backward: add dq to acc and (dk, dv) to acc_kv."""
        q, kv, acc = fields["q"], fields["kv"], fields["acc"]
        band = BandSpec(tile.low, tile.high)
        if "acc_kv" not in fields:
            block_out, block_lse = self.kernel.forward(q["q"], kv["k"], kv["v"], band)
            merge_tile(acc["out"], acc["lse"], block_out, block_lse)
            return
        out = q["out"] if "out" in q else surrogate_out(q["dout"], q["stats"])
        grads = TileGradients(q["dout"], out, q["stats"][..., 0])
        dq, dk, dv = self.kernel.backward(grads, q["q"], kv["k"], kv["v"], band)
        acc["dq"].add_(dq)
        fields["acc_kv"]["dkv"][:, 0].add_(dk)
        fields["acc_kv"]["dkv"][:, 1].add_(dv)

    def run_op(self, op: str, dst: Fields, src: Fields | None) -> None:
        """init, add (in dst's dtype, computed in the wider one) or copy."""
        for name, tensor in dst.items():
            if op == "init":
                tensor.fill_(-torch.inf if name == "lse" else 0.0)
            elif op == "add":
                assert src is not None
                tensor.add_(src[name])
            else:
                assert src is not None
                tensor.copy_(src[name])

    def wire_fields(self, fields: Fields) -> tuple[Tensor, ...]:
        """Tensors that travel, in fixed order."""
        return tuple(fields[name] for name in WIRE_ORDER if name in fields)

    def _field_shapes(self, kind: Kind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        shape = self.shape
        q, kv = (shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim)
        wide = shape.accumulator_dtype
        kinds: dict[Kind, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
            Kind.Q: {"q": (q, shape.dtype)},
            Kind.KV: {"k": (kv, shape.dtype), "v": (kv, shape.dtype)},
            Kind.ACC: {"out": (q, wide), "lse": ((shape.num_heads,), wide)},
            Kind.QX: {"q": (q, shape.dtype), "dout": (q, shape.dtype), "stats": ((shape.num_heads, 2), wide)},
            Kind.DQ: {"dq": (q, wide)},
            Kind.DKV: {"dkv": ((2, *kv), wide)},
            Kind.DQ_WIRE: {"dq": (q, shape.wire_gradient_dtype)},
            Kind.DKV_WIRE: {"dkv": ((2, *kv), shape.wire_gradient_dtype)},
        }
        return kinds[kind]
