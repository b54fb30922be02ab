"""The trial that a kernel passes before a run takes it: some tiles of 256 rows, both directions, against the reference.

It finds a package that has changed under the same name, a GPU that the library was not compiled for, and numbers that
are wrong without a word. What it compiles or plans, a run would compile or plan anyway.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from engine.device.row_blocks import accumulate_dtype
from engine.kernels.attention.base import KernelRequest, TileGradients, TileKernel
from engine.kernels.attention.padded import build_kernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.visibility.mask import Band

ROWS, NUM_HEADS, NUM_KV_HEADS = 256, 4, 2
# Relative norms. bf16 rounds to 0.004, and probabilities too; fp32 may be made of three TF32 products.
LIMITS = {torch.bfloat16: 0.02, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-10}


@functools.cache
def trial_problem(kind: type[TileKernel], request: KernelRequest, device: torch.device) -> str | None:
    """What is wrong with what a kernel computes on `device`, in words; None: nothing. Tried once per process."""
    full = Band(0, ROWS, 0, ROWS)
    bands = [full._replace(low=0), full, *([full._replace(low=0, high=ROWS // 3)] if request.windows else [])]
    try:
        return next(
            filter(None, (_band_problem(build_kernel(kind, request), band, request, device) for band in bands)), None
        )
    except Exception as error:  # a library may raise anything; what is not a kernel's fault, the run meets again
        return f"failed its trial: {type(error).__name__}: {error}"


def _band_problem(kernel: TileKernel, band: Band, request: KernelRequest, device: torch.device) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def numbers(heads: int, head_dim: int) -> Tensor:
        return torch.randn(ROWS, heads, head_dim, generator=generator, device="cpu").to(device, request.dtype)

    qk_dim, v_dim = request.head_dims
    shapes = ((NUM_HEADS, qk_dim), (NUM_KV_HEADS, qk_dim), (NUM_KV_HEADS, v_dim), (NUM_HEADS, v_dim))
    q, k, v, dout = given = [numbers(*shape) for shape in shapes]
    wide_q, wide_k, wide_v, wide_dout = (x.double() for x in given)
    reference = ReferenceKernel()
    out, lse = reference.forward(wide_q, wide_k, wide_v, band)
    # As in a ring: these are a part of the keys, and another tensor stands in for the whole row's out.
    row_out, row_lse = 0.6 * out, lse + 0.5
    scale = (wide_dout * row_out).sum(-1, keepdim=True) / (wide_dout * wide_dout).sum(-1, keepdim=True)
    exact = TileGradients(wide_dout, row_out, row_lse)
    want = (out, lse, *reference.backward(exact, wide_q, wide_k, wide_v, band))
    grads = TileGradients(dout, (wide_dout * scale).to(q.dtype), row_lse.to(accumulate_dtype(q.dtype)))
    got = (*kernel.forward(q, k, v, band), *kernel.backward(grads, q, k, v, band))
    for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        error = float((mine.double() - theirs).norm() / theirs.norm())
        limit = LIMITS[q.dtype]
        if not error <= limit:  # nan is not
            return f"failed its trial: {name} of a {band.kind} tile is off by {error:.2g}, more than {limit:.2g}"
    return None
