"""Part loss: LM head and loss, forward and backward, against the time of its three products alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.plan import Measurement, Part, Row
from benchmarks.gpu.timing import measured_matmul_flops, time_call
from benchmarks.plain_loss import cross_entropy_plain
from benchmarks.turns import peak_extra_bytes
from engine.config.settings import LossConfig
from engine.loss.fused import linear_cross_entropy

LOSSES = {"fused": linear_cross_entropy, "plain": cross_entropy_plain}
PRODUCTS = 3  # logits, gradient of hidden, gradient of the weight
# Logits in bf16 and fp32, softmax and gradient of them: what the plain loss holds per logit, in bytes.
PLAIN_BYTES_PER_LOGIT = 14
ASSUMED_FLOPS = 4e14


@dataclass(frozen=True)
class LossSizes:
    """Vocabularies, rows, and the size of the product that the roofline is measured with."""

    vocab_sizes: tuple[int, ...] = (32768, 128256)
    rows: tuple[int, ...] = (8192, 32768, 131072)
    hidden_size: int = 4096
    chunk_tokens: int = 2048
    matmul_size: int = 8192
    weight: float = 1.5


SMALL = LossSizes(vocab_sizes=(512,), rows=(64, 128), hidden_size=32, chunk_tokens=32, matmul_size=256)


def plan(sizes: LossSizes) -> Part:
    """A measurement per vocabulary, number of rows and loss, the fused ones first."""
    found = [
        _measurement(kind, vocab, rows, sizes)
        for kind in ("fused", "plain")
        for rows in sizes.rows
        for vocab in sizes.vocab_sizes
    ]
    return Part("loss", "Fused loss", sizes.weight, tuple(found))


def _measurement(kind: str, vocab_size: int, rows: int, sizes: LossSizes) -> Measurement:
    flops = 2.0 * PRODUCTS * rows * vocab_size * sizes.hidden_size
    settings: Row = {"kind": kind, "rows": rows, "vocab_size": vocab_size, "hidden_size": sizes.hidden_size}
    settings |= {"chunk_tokens": sizes.chunk_tokens, "matmul_size": sizes.matmul_size}
    return Measurement(
        f"{kind} with {rows} rows and a vocabulary of {vocab_size}",
        "benchmarks.gpu.loss:measure",
        settings,
        expected_s=1.0 + 6 * flops / ASSUMED_FLOPS,
        fresh=False,
    )


def measure(
    device: torch.device, kind: str, rows: int, vocab_size: int, hidden_size: int, chunk_tokens: int, matmul_size: int
) -> list[Row]:
    """One row: measured, or why the plain loss does not fit."""
    about: Row = {"kind": kind, "rows": rows, "vocab_size": vocab_size, "hidden_size": hidden_size}
    needed = PLAIN_BYTES_PER_LOGIT * rows * vocab_size
    if kind == "plain" and needed > free_bytes(device):
        return [about | {"status": "skipped", "error": f"needs about {needed / 1e9:.0f} GB for all its logits"}]
    inputs = make_inputs(rows, hidden_size, vocab_size, device)
    call = functools.partial(run_loss, kind, inputs, LossConfig(chunk_tokens=chunk_tokens))
    flops = 2.0 * PRODUCTS * rows * vocab_size * hidden_size
    return [about | _measure_call(call, flops, inputs[0].nbytes, device, measured_matmul_flops(device, matmul_size))]


def make_inputs(
    rows: int, hidden_size: int, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [rows, d] and weight [V, d] with gradient, labels [rows]."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, hidden_size, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, dtype=dtype, device=device) * 0.02).requires_grad_()
    return hidden, weight, torch.randint(0, vocab_size, (rows,), device=device)


def run_loss(name: str, inputs: tuple[Tensor, Tensor, Tensor], options: LossConfig) -> None:
    """One forward and backward pass of the mean loss; gradients are dropped."""
    hidden, weight, labels = inputs
    loss = LOSSES[name](hidden, weight, labels, options=options)
    torch.autograd.grad(loss / labels.numel(), (hidden, weight))


def _measure_call(
    call: Callable[[], None], flops: float, gradient_bytes: int, device: torch.device, matmul_flops_per_s: float
) -> Row:
    """Seconds, share of the roofline and extra bytes.

    extra_bytes is the peak beyond the inputs without the gradient of hidden, which any loss must leave and which grows
    with the length; the weight's gradient is in it.
    """
    timing = time_call(call, device)
    extra = peak_extra_bytes(call, device)
    return {
        "total_s": timing.median_s,
        "min_s": timing.min_s,
        "max_s": timing.max_s,
        "products_tflops": flops / timing.median_s / 1e12,
        "matmul_flops_per_s": matmul_flops_per_s,
        "of_roofline": flops / matmul_flops_per_s / timing.median_s,
        "peak_extra_bytes": extra,
        "hidden_gradient_bytes": gradient_bytes,
        "extra_bytes": extra - gradient_bytes,
    }


def free_bytes(device: torch.device) -> int:
    """Device memory that is free now; of a CPU a gigabyte, which is enough for a dry run."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 10**9
