"""LM head and loss, forward and backward: the fused one against the plain one, time and peak memory at several lengths.

    python -m benchmarks.bench_loss --json benchmarks/results/loss_HARDWARE_YYYYMM.json

Peak bytes are those of tensors beyond the inputs (hidden, weight, labels); both gradients are among them.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import DTYPES, make_parser, measure_in_turn, peak_extra_bytes, prepare, write_results
from engine.loss.fused import linear_cross_entropy
from engine.loss.options import LossOptions
from engine.loss.plain import cross_entropy_plain

LOSSES = {"fused": linear_cross_entropy, "plain": cross_entropy_plain}


def run_loss(name: str, inputs: tuple[Tensor, Tensor, Tensor], options: LossOptions) -> None:
    """One forward and backward pass of the mean loss; gradients are dropped."""
    hidden, weight, labels = inputs
    loss = LOSSES[name](hidden, weight, labels, options=options)
    (loss / labels.numel()).backward()  # type: ignore[no-untyped-call]
    hidden.grad = weight.grad = None


def make_inputs(rows: int, args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [rows, d] and weight [V, d] with gradient, labels [rows]."""
    place: dict[str, Any] = {"dtype": DTYPES[args.dtype], "device": device}
    hidden = torch.randn(rows, args.hidden_size, **place).requires_grad_()
    weight = (torch.randn(args.vocab_size, args.hidden_size, **place) * 0.02).requires_grad_()
    return hidden, weight, torch.randint(0, args.vocab_size, (rows,), device=device)


def bench_length(rows: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Both losses at one length."""
    torch.manual_seed(0)
    inputs = make_inputs(rows, args, device)
    options = LossOptions(chunk_tokens=args.chunk_tokens)
    names = [name for name in LOSSES if name == "fused" or rows <= args.max_plain_rows]
    variants = {name: functools.partial(run_loss, name, inputs, options) for name in names}
    timings = measure_in_turn(variants, device, repeats=args.repeats, warmup=args.warmup)
    peaks = {name: peak_extra_bytes(call, device) for name, call in variants.items()}
    row: dict[str, Any] = {"rows": rows, "vocab_size": args.vocab_size, "hidden_size": args.hidden_size}
    row |= {"dtype": args.dtype, "timings": timings, "peak_extra_bytes": peaks}
    if "plain" in timings:
        row["time_ratio"] = timings["fused"].median_s / timings["plain"].median_s
    return row


def print_row(row: dict[str, Any]) -> None:
    """One length on one line."""
    parts = [f"N {row['rows']:>7}"]
    for name, timing in row["timings"].items():
        spread = f"{timing.min_s:.3f}..{timing.max_s:.3f}"
        peak = row["peak_extra_bytes"][name] / 2**20
        parts.append(f"{name} {timing.median_s:.3f} s ({spread}), {peak:,.0f} MiB")
    if "time_ratio" in row:
        parts.append(f"fused / plain {row['time_ratio']:.2f}")
    print("   ".join(parts), flush=True)


def main() -> None:
    """Measures every length, prints a line each, writes the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--chunk-tokens", type=int, default=LossOptions.chunk_tokens)
    parser.add_argument("--max-plain-rows", type=int, default=16384, help="above it the plain loss is left out")
    args = parser.parse_args()
    device, facts = prepare(args)
    rows = []
    for length in args.rows:
        rows.append(bench_length(length, args, device))
        print_row(rows[-1])
    write_results(args.json, facts, rows)


if __name__ == "__main__":
    main()
