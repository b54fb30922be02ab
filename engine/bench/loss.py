"""LM head and loss, forward and backward: the fused one against the plain one, time and peak memory at several lengths.

`python -m engine.bench.loss FOLDER` measures the cell in FOLDER on this process alone. Peak bytes are those of tensors
beyond the inputs (hidden, weight, labels); both gradients are among them.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.bench.environment import environment
from engine.bench.measure import measure_in_turn, peak_extra_bytes
from engine.bench.spec import RESULT_FILE, LossCell, read_cell
from engine.loss.fused import linear_cross_entropy
from engine.loss.options import LossOptions
from engine.loss.plain import cross_entropy_plain
from engine.training.rank.process import leave

LOSSES = {"fused": linear_cross_entropy, "plain": cross_entropy_plain}


def main(argv: Sequence[str]) -> int:
    """Measure the cell of the folder."""
    (folder,) = map(Path, argv)
    cell = read_cell(LossCell, folder)
    if cell.threads is not None:
        torch.set_num_threads(cell.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [bench_length(length, cell, device) for length in cell.rows]
    result = {"environment": environment(device), "results": rows, "skipped": {}}
    (folder / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
    return 0


def bench_length(rows: int, cell: LossCell, device: torch.device) -> dict[str, Any]:
    """Both losses at one length."""
    inputs = make_inputs(rows, cell, device)
    options = LossOptions(chunk_tokens=cell.chunk_tokens)
    names = [name for name in LOSSES if name == "fused" or rows <= cell.max_plain_rows]
    variants = {name: functools.partial(run_loss, name, inputs, options) for name in names}
    timings = measure_in_turn(variants, device, cell.rounds)
    row: dict[str, Any] = {"rows": rows, "vocab_size": cell.vocab_size, "hidden_size": cell.hidden_size}
    row |= {"dtype": cell.dtype, "timings": {name: asdict(timing) for name, timing in timings.items()}}
    row["peak_extra_bytes"] = {name: peak_extra_bytes(call, device) for name, call in variants.items()}
    if "plain" in timings:
        row["time_ratio"] = timings["fused"].median_s / timings["plain"].median_s
    return row


def make_inputs(rows: int, cell: LossCell, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [rows, d] and weight [V, d] with gradient, labels [rows]."""
    torch.manual_seed(0)
    place: dict[str, Any] = {"dtype": getattr(torch, cell.dtype), "device": device}
    hidden = torch.randn(rows, cell.hidden_size, **place).requires_grad_()
    weight = (torch.randn(cell.vocab_size, cell.hidden_size, **place) * 0.02).requires_grad_()
    return hidden, weight, torch.randint(0, cell.vocab_size, (rows,), device=device)


def run_loss(name: str, inputs: tuple[Tensor, Tensor, Tensor], options: LossOptions) -> None:
    """One forward and backward pass of the mean loss; gradients are dropped."""
    hidden, weight, labels = inputs
    loss = LOSSES[name](hidden, weight, labels, options=options)
    torch.autograd.grad(loss / labels.numel(), (hidden, weight))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
