"""Rotary position embedding (RoPE, Su et al. 2021) for arbitrary positions, so that a rank may hold any rows.

The convention is that of Hugging Face's Llama ("rotate half"): dimension i is paired with i + head_dim / 2, so its
weights need no permutation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.config.settings import RopeScalingConfig
from engine.device.row_blocks import accumulate_dtype, is_fake_accelerator, row_blocks
from engine.kernels.dispatch import uses_triton

NO_SCALING = RopeScalingConfig()
# The values of every released model. yarn: pairs with more rotations in the original length than FAST are unchanged,
# those with fewer than SLOW are scaled. llama3: the same with HIGH and LOW.
YARN_FAST, YARN_SLOW = 32.0, 1.0
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0


def rope_table(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScalingConfig = NO_SCALING
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, head_dim / 2] fp32, both multiplied by yarn's attention factor.

    Args:
        positions: Global positions, [T] int64.
        head_dim: Size of a head.
        theta: Base of the frequencies.
        scaling: RoPE scaling.
    """
    device = positions.device
    frequencies = rope_frequencies(head_dim, theta, scaling).to(device)
    factor = attention_factor(scaling)
    shape = (positions.shape[0], head_dim // 2)
    cos = torch.empty(shape, dtype=torch.float32, device=device)
    sin = torch.empty(shape, dtype=torch.float32, device=device)
    for rows in row_blocks(shape[0], shape[1], device):
        # float64: at position 4M an fp32 angle is off by up to 0.25 rad in the fastest pair.
        angles = torch.outer(positions[rows].to(torch.float64), frequencies)
        cos[rows] = (angles.cos() * factor).float()
        sin[rows] = (angles.sin() * factor).float()
    return cos, sin


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig = NO_SCALING) -> Tensor:
    """Return the frequency of every pair in radians per position, [head_dim / 2] float64 on the CPU.

    f_i = theta^(-2i / D) without scaling. With factor s and original length L:

        linear   f_i / s
        ntk      base theta s^(D / (D - 2)): the slowest pair rotates s times slower, the fastest is unchanged
        yarn     f_i (1 - r_i) + f_i / s r_i; r_i rises from 0 to 1 between pairs of YARN_FAST and YARN_SLOW
                 rotations in L (Peng et al. 2023, arXiv:2309.00071, section 3.2; bounds rounded outwards, as there)
        llama3   f_i for wavelengths below L / LLAMA3_HIGH, f_i / s above L / LLAMA3_LOW, and in between
                 interpolated linearly in L / wavelength
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    factor = scaling.factor
    if scaling.kind == "ntk":
        theta *= factor ** (head_dim / (head_dim - 2))
    frequencies = torch.pow(torch.tensor(theta, dtype=torch.float64), -exponents)
    if scaling.kind == "linear":
        return frequencies / factor
    if scaling.kind == "yarn":
        share = _yarn_share(head_dim, theta, scaling)
    elif scaling.kind == "llama3":
        share = _llama3_share(frequencies, scaling)
    else:
        return frequencies
    return frequencies * (1 - share) + frequencies / factor * share


def attention_factor(scaling: RopeScalingConfig) -> float:
    """Return yarn's factor for queries and keys, which keeps attention over longer sequences as sharp; else 1."""
    if scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0


def _yarn_share(head_dim: int, theta: float, scaling: RopeScalingConfig) -> Tensor:
    """Return how much of every pair is scaled, [head_dim / 2] in 0 .. 1."""
    length = _original_seq_len(scaling)

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(YARN_FAST)), 0)
    high = min(math.ceil(pair_with(YARN_SLOW)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    return ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)


def _llama3_share(frequencies: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Return how much of every pair is scaled, [head_dim / 2] in 0 .. 1."""
    rotations = _original_seq_len(scaling) * frequencies / (2 * math.pi)  # in the original length
    return 1 - ((rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)


def _original_seq_len(scaling: RopeScalingConfig) -> int:
    assert scaling.original_seq_len is not None, "refused by engine.resolve.rules"
    return scaling.original_seq_len


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True) -> Tensor:
    """Return x rotated by the angles of its rows, [B, T, H, D] in the dtype of x, contiguous.

    Computed in fp32: on a GPU in one pass, on a CPU block by block. Backward rotates by the opposite angle, so nothing
    of x is saved.

    Args:
        x: [B, T, H, D].
        cos, sin: [T, D / 2] fp32.
        values: False returns x unrotated, with the gradient of the rotation.
    """
    out: Tensor = _RoPE.apply(x, cos, sin, values)  # type: ignore[no-untyped-call]
    return out


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, values: bool) -> Tensor:
        """Rotate x by +angle, or return it unrotated."""
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, direction=1) if values else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """Rotate dout by -angle: a rotation's transpose is its inverse."""
        cos, sin = ctx.saved_tensors
        return _rotate(dout, cos, sin, direction=-1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    """(x1, x2) -> (x1 cos - s x2 sin, x2 cos + s x1 sin) for the halves of the last dimension, s = `direction`."""
    if uses_triton(x):
        from engine.kernels import elementwise as kernels

        return kernels.rotate(x, cos, sin, direction=direction)
    batch, tokens, heads, head_dim = x.shape
    half = head_dim // 2
    wide = accumulate_dtype(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if is_fake_accelerator():  # the Triton kernel has no temporaries
        return out
    for rows in row_blocks(tokens, batch * heads * head_dim, x.device):
        block = x[:, rows].to(wide)
        block_cos, block_sin = cos[rows].to(wide).unsqueeze(1), sin[rows].to(wide).unsqueeze(1)
        first, second = block[..., :half], block[..., half:]
        out[:, rows, :, :half].copy_((first * block_cos).addcmul_(second, block_sin, value=-direction))
        out[:, rows, :, half:].copy_((second * block_cos).addcmul_(first, block_sin, value=direction))
    return out
