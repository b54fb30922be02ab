"""Elementwise kernels and the host link, whose benchmarks choose sizes by the device: tiny ones on a CPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from benchmarks.gpu.plan import Measurement, Part, Row


@dataclass(frozen=True)
class Other:
    """A module and its function: device -> rows, those that failed with an `error`."""

    name: str
    title: str
    module: str
    function: str
    weight: float
    expected_s: float


OTHERS = (
    Other("elementwise", "Elementwise kernels", "benchmarks.gpu.elementwise", "bench_elementwise", 1.5, 18.0),
    Other("offload", "Host offload", "benchmarks.gpu.offload", "bench_offload", 2.5, 18.0),
)


def plan(*, small: bool) -> tuple[Part, ...]:
    """A part with one measurement for each."""
    return tuple(_part(other, small=small) for other in OTHERS)


def _part(other: Other, *, small: bool) -> Part:
    measurement = Measurement(
        other.function,
        "benchmarks.gpu.others:measure",
        {"module": other.module, "function": other.function},
        expected_s=1.0 if small else other.expected_s,
    )
    return Part(other.name, other.title, other.weight, (measurement,))


def measure(device: torch.device, module: str, function: str) -> list[Row]:
    """What the benchmark gives."""
    return [flat(row) for row in getattr(importlib.import_module(module), function)(device)]


def flat(row: Row) -> Row:
    """The row with {"seconds": {"torch": 1}} as seconds_torch; its label is what it names first."""
    done: Row = {"label": str(row.get("kernel") or row.get("case") or "")}
    for key, value in row.items():
        done |= {f"{key}_{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return done
