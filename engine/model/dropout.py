"""Residual dropout without random state: whether an element is dropped is a function of its coordinates.

    kept(sample, position, layer, branch, feature) = hash(seed, sample, position, layer, branch, feature) >= rate

`sample` is the number of the sequence in the endless training stream and occurs once. So the same elements are dropped
for any sharding, layout, tiling, recomputation and micro-batch size, and a resumed run continues as if it had not
stopped. No mask is saved for backward: it is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.data.sampler import splitmix64
from engine.device.row_blocks import row_blocks

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads adjacent features over the hash's input
_MASK_32 = 2**32 - 1


class Dropout(NamedTuple):
    """Dropout of some rows: `rate` of the elements that a branch adds to them, chosen by `keys` [B, T] int32."""

    rate: float
    keys: Tensor

    def of(self, rows: slice) -> Dropout:
        """Return the dropout of a slice of the rows."""
        return Dropout(self.rate, self.keys[:, rows])


def row_keys(seed: int, samples: Sequence[int], positions: Tensor) -> Tensor:
    """Return the keys of rows, [B, T] int32 on the device of `positions`.

    Args:
        seed: Of the run.
        samples: Number of each of the B sequences in the training stream.
        positions: Global positions of the rows, [T] int64.
    """
    streams = [_signed(splitmix64(splitmix64(seed) ^ sample), 64) for sample in samples]
    mixed = positions ^ torch.tensor(streams, dtype=torch.int64, device=positions.device).unsqueeze(1)
    mixed = (mixed ^ _shift(mixed, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    mixed = (mixed ^ _shift(mixed, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return (mixed ^ _shift(mixed, 31, 64)).to(torch.int32)


def dropped(x: Tensor, dropout: Dropout, branch: int) -> Tensor:
    """Return x [B, T, d] with elements dropped and the others divided by 1 - rate; a new tensor.

    branch: number of the residual branch in the model, 2i for attention and 2i + 1 for the MLP of layer i.
    """
    out: Tensor = _Dropped.apply(x, dropout.keys, dropout.rate, branch)  # type: ignore[no-untyped-call]
    return out


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float, branch: int) -> Tensor:
        """Apply the mask; saves the keys alone."""
        ctx.save_for_backward(keys)
        ctx.rate, ctx.branch = rate, branch
        return _masked(x, keys, rate, branch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """Apply the same mask to the gradient."""
        (keys,) = ctx.saved_tensors
        return _masked(dout, keys, ctx.rate, ctx.branch), None, None, None


def _masked(x: Tensor, keys: Tensor, rate: float, branch: int) -> Tensor:
    """Return x [B, T, d] times its scaled mask, a new tensor, by blocks of rows: hashes are int32, wider than bf16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    salt = _signed(splitmix64(branch) & _MASK_32, 32)
    branch_keys = _mix_32(keys.reshape(-1, 1) ^ salt)  # [B * T, 1]
    features = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) * _signed(_GOLDEN, 32)
    # Hashes are uniform over int32, so a fraction `rate` of them is below this threshold.
    threshold = round(rate * 2**32) - 2**31
    for block in row_blocks(rows.shape[0], rows.shape[1], x.device):
        mask = _mix_32(branch_keys[block] + features) >= threshold  # [rows, d] bool
        out_rows[block] = rows[block].mul(1.0 / (1.0 - rate)).mul_(mask)
    return out


def _mix_32(x: Tensor) -> Tensor:
    """Hash every int32, by the 32-bit mixer with the least known bias (C. Wellons, hash-prospector, 2018)."""
    x = (x ^ _shift(x, 16, 32)) * _signed(0x7FEB352D, 32)
    x = (x ^ _shift(x, 15, 32)) * _signed(0x846CA68B, 32)
    return x ^ _shift(x, 16, 32)


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Shift right logically; torch's >> is arithmetic."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _signed(value: int, width: int) -> int:
    """Reinterpret an unsigned number as two's complement."""
    return value - (1 << width) if value >> (width - 1) else value
