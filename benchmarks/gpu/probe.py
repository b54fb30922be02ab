"""What is asked of the device before anything is planned."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.plan import Measurement, Row
from benchmarks.gpu.tiles import kernel_reasons
from benchmarks.gpu.timing import measured_matmul_flops
from engine.bench.measure import environment
from engine.config.settings import TrainConfig
from engine.training.peak import find_peak


def plan(head_dim: int, matmul_size: int) -> Measurement:
    """The one measurement whose row the others are planned with."""
    settings = {"head_dim": head_dim, "matmul_size": matmul_size}
    return Measurement("probe", "benchmarks.gpu.probe:measure", settings, expected_s=15.0)


def measure(device: torch.device, head_dim: int, matmul_size: int) -> list[Row]:
    """One row: environment, peak with its source, a measured matmul rate, and why which kernel cannot run."""
    peak = find_peak(TrainConfig(compute_dtype="bfloat16"), device)
    row: dict[str, Any] = {
        "environment": environment(device),
        "peak": {"flops_per_s": peak.flops_per_s, "source": peak.source},
        "kernels": kernel_reasons(device, head_dim),
        "device_bytes": torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
    }
    try:
        row["matmul_flops_per_s"] = measured_matmul_flops(device, matmul_size)
    except Exception as error:
        row["matmul_flops_per_s"], row["matmul_error"] = None, f"{type(error).__name__}: {error}"
    return [row]
