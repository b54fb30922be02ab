"""Residual dropout without a random state: whether a number is dropped is a function of where it stands.

    kept(sample, position, layer, branch, feature) = hash(seed, sample, position, layer, branch, feature) >= rate

`sample` is the number of the sequence in the endless stream that training reads, which never comes twice. So the same
numbers are dropped however sequences are divided among ranks, rows laid out and tiled, layers computed again in
backward or micro-batches cut, and a run that resumes goes on as if it had never stopped. No mask is kept for backward:
it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.data.sampler import splitmix64
from engine.device.row_blocks import row_blocks

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: features far apart in the hash's input
_MASK_32 = 2**32 - 1


class Dropout(NamedTuple):
    """What is dropped of some rows: the share `rate` of what a branch adds to them, chosen by keys [B, T] int32."""

    rate: float
    keys: Tensor

    def of(self, rows: slice) -> Dropout:
        """The same for some of the rows."""
        return Dropout(self.rate, self.keys[:, rows])


def row_keys(seed: int, samples: Sequence[int], positions: Tensor) -> Tensor:
    """Keys [B, T] int32 of the rows at `positions` [T] int64 of the sequences `samples`, on the device of positions."""
    streams = [_signed(splitmix64(splitmix64(seed) ^ sample), 64) for sample in samples]
    mixed = positions ^ torch.tensor(streams, dtype=torch.int64, device=positions.device).unsqueeze(1)
    mixed = (mixed ^ _shift(mixed, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    mixed = (mixed ^ _shift(mixed, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return (mixed ^ _shift(mixed, 31, 64)).to(torch.int32)


def dropped(x: Tensor, dropout: Dropout, branch: int) -> Tensor:
    """x [B, T, d] with a share of its numbers 0 and the others larger by as much, so that its expectation stays.

    branch: which of all branches of the model x is. A new tensor, free to be changed in place.
    """
    out: Tensor = _Dropped.apply(x, dropout.keys, dropout.rate, branch)  # type: ignore[no-untyped-call]
    return out


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float, branch: int) -> Tensor:
        """Saves the keys alone."""
        ctx.save_for_backward(keys)
        ctx.rate, ctx.branch = rate, branch
        return _masked(x, keys, rate, branch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """What was dropped has no gradient."""
        (keys,) = ctx.saved_tensors
        return _masked(dout, keys, ctx.rate, ctx.branch), None, None, None


def _masked(x: Tensor, keys: Tensor, rate: float, branch: int) -> Tensor:
    """x [B, T, d] times its mask, a new tensor; a block of rows at a time, since the hash is wider than x may be."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    salt = _signed(splitmix64(branch) & _MASK_32, 32)
    own_keys = _mix_32(keys.reshape(-1, 1) ^ salt)
    features = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) * _signed(_GOLDEN, 32)
    # Hashes are spread evenly over all int32: so many of them lie below.
    threshold = round(rate * 2**32) - 2**31
    for block in row_blocks(rows.shape[0], rows.shape[1], x.device):
        kept = _mix_32(own_keys[block] + features) >= threshold
        out_rows[block] = rows[block].mul(1.0 / (1.0 - rate)).mul_(kept)
    return out


def _mix_32(x: Tensor) -> Tensor:
    """A hash of every int32: the 32-bit mixer with the least bias known (C. Wellons, hash-prospector, 2018)."""
    x = (x ^ _shift(x, 16, 32)) * _signed(0x7FEB352D, 32)
    x = (x ^ _shift(x, 15, 32)) * _signed(0x846CA68B, 32)
    return x ^ _shift(x, 16, 32)


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical shift to the right: torch's brings the sign along."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _signed(value: int, width: int) -> int:
    """The two's complement of an unsigned number."""
    return value - (1 << width) if value >> (width - 1) else value
