"""Part tiles: one kernel over one square tile, forward and backward, for every backend that can run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks import skipped_row
from benchmarks.gpu.plan import Measurement, Part, Row
from benchmarks.gpu.timing import time_call
from engine.bench.attention import global_inputs
from engine.bench.spec import HeadShape
from engine.config.errors import ConfigError
from engine.kernels.attention import KERNELS, select_kernel
from engine.kernels.attention.base import TileGradients, TileKernel
from engine.planning.visibility.mask import Band
from engine.predict.flops import attention_pairs

BACKWARD_OVER_FORWARD = 2.5  # five products of the forward's size and shape for its two
BANDS = {"causal": Band(0, 0, 0, 0, low=0), "full": Band(0, 0, 0, 0)}
# FLOP/s that estimates assume; what is measured corrects them.
ASSUMED_FLOPS = 3e14
MAX_REFERENCE_TOKENS = 4096  # its memory is quadratic


@dataclass(frozen=True)
class TileSizes:
    """Lengths, and numbers of heads as (query heads, kv heads)."""

    seq_lens: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    heads: tuple[tuple[int, int], ...] = ((32, 32), (32, 8))
    head_dim: int = 128
    weight: float = 3.0


SMALL = TileSizes(seq_lens=(128,), heads=((4, 4), (4, 2)), head_dim=16)


def kernel_reasons(device: torch.device, head_dim: int) -> dict[str, str | None]:
    """For every kernel of the registry why it cannot run here in bf16; None: it can."""
    reasons: dict[str, str | None] = {}
    for name in KERNELS:
        try:
            select_kernel(name, device, torch.bfloat16, head_dim)
            reasons[name] = None
        except ConfigError as error:
            reasons[name] = " ".join(str(error).split())
        except Exception as error:  # a package that is there and does not load
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def plan(sizes: TileSizes, reasons: Mapping[str, str | None]) -> Part:
    """Short lengths first; at each length every kernel, so that what is cut off is cut off for all."""
    known = tuple(
        {"label": name, "status": "not available", "error": reason} for name, reason in reasons.items() if reason
    )
    usable = [name for name, reason in reasons.items() if reason is None]
    measurements = []
    for seq_len in sizes.seq_lens:
        for heads in sizes.heads:
            for name in usable:
                if name == "reference" and seq_len > MAX_REFERENCE_TOKENS:
                    continue
                measurements += [_measurement(name, mask, seq_len, heads, sizes.head_dim) for mask in BANDS]
    if "reference" in usable and max(sizes.seq_lens) > MAX_REFERENCE_TOKENS:
        reason = f"float64 and memory quadratic in the length: up to {MAX_REFERENCE_TOKENS:,} tokens only"
        known = (*known, skipped_row("reference beyond it", reason))
    title = "Tile kernels"
    return Part("tiles", title, sizes.weight, tuple(measurements), known)


def _measurement(kernel: str, mask: str, seq_len: int, heads: tuple[int, int], head_dim: int) -> Measurement:
    flops = forward_flops(mask, seq_len, heads[0], head_dim) * (1 + BACKWARD_OVER_FORWARD)
    repeats = 4
    slower = 20 if kernel == "reference" else 1
    return Measurement(
        f"{kernel} at {seq_len} tokens with {heads[0]}:{heads[1]} heads {mask}",
        "benchmarks.gpu.tiles:measure",
        {"kernel": kernel, "mask": mask, "seq_len": seq_len, "heads": list(heads), "head_dim": head_dim},
        expected_s=0.4 + slower * repeats * flops / ASSUMED_FLOPS,
    )


def forward_flops(mask: str, seq_len: int, num_heads: int, head_dim: int) -> float:
    """Of one tile: two products of 2 * D FLOPs per visible pair and head."""
    pairs = attention_pairs("causal" if mask == "causal" else "full", seq_len)
    return 4.0 * num_heads * head_dim * pairs


def measure(
    device: torch.device, kernel: str, mask: str, seq_len: int, heads: Sequence[int], head_dim: int
) -> list[Row]:
    """One row."""
    chosen = select_kernel(kernel, device, torch.bfloat16, head_dim).kernel  # type: ignore[arg-type]
    shape = HeadShape(heads[0], heads[1], head_dim)
    q, k, v, dout = device_inputs(shape, seq_len, device)
    return [_measure_band(chosen, mask, (q, k, v, dout), device)]


def device_inputs(shape: HeadShape, rows: int, device: torch.device) -> list[Tensor]:
    """q, k, v, dout [rows, heads, D]: random numbers drawn on the device, which for long ones is a hundred times
    faster.
    """
    if device.type == "cpu":
        return global_inputs(shape, rows)
    generator = torch.Generator(device).manual_seed(0)
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return [torch.randn(rows, n, shape.head_dim, generator=generator, device=device, dtype=dtype) for n in counts]


def _measure_band(kernel: TileKernel, mask: str, inputs: Sequence[Tensor], device: torch.device) -> Row:
    q, k, v, dout = inputs
    band = BANDS[mask]._replace(q_stop=len(q), k_stop=len(k))
    out, lse = kernel.forward(q, k, v, band)
    grads = TileGradients(dout, out, lse)
    forward = time_call(lambda: kernel.forward(q, k, v, band), device)
    backward = time_call(lambda: kernel.backward(grads, q, k, v, band), device)
    flops = forward_flops(mask, q.shape[0], q.shape[1], q.shape[2])
    row: dict[str, Any] = {"kernel": kernel.name, "mask": mask, "seq_len": q.shape[0]}
    row |= {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2]}
    row |= {"forward_s": forward.median_s, "forward_min_s": forward.min_s, "forward_max_s": forward.max_s}
    row |= {"backward_s": backward.median_s, "backward_min_s": backward.min_s, "backward_max_s": backward.max_s}
    row["forward_tflops"] = flops / forward.median_s / 1e12
    row["backward_tflops"] = BACKWARD_OVER_FORWARD * flops / backward.median_s / 1e12
    row["repeats"] = min(forward.repeats, backward.repeats)
    return row
