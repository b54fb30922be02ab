"""Parts that the engine's own benchmarks measure: elementwise kernels, and host offload.

Either module may be missing from a checkout: then its row says so. They choose sizes by the device, tiny ones on a CPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from benchmarks.gpu.plan import Measurement, Part, Row


@dataclass(frozen=True)
class Other:
    """A module of the engine and its function: device -> rows, those that failed with an `error`."""

    name: str
    title: str
    module: str
    function: str
    weight: float
    expected_s: float


OTHERS = (
    Other("elementwise", "Elementwise kernels", "engine.bench.elementwise", "bench_elementwise", 1.5, 18.0),
    Other("offload", "Host offload", "engine.bench.offload", "bench_offload", 2.5, 18.0),
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
    """What the engine's benchmark gives, or one row that it is not available."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return [{"status": "not available", "error": f"no module {module}"}]
    return [flat(row) for row in getattr(found, function)(device)]


def flat(row: Row) -> Row:
    """The row with {"seconds": {"torch": 1}} as seconds_torch; its label is what it names first."""
    done: Row = {"label": str(row.get("kernel") or row.get("case") or "")}
    for key, value in row.items():
        done |= {f"{key}_{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return done
