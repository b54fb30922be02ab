"""The facts without which a figure means nothing: machine, load, versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Date, device, cores, threads of this process, load, platform and versions, as plain values; of a GPU its driver,
    clocks and libraries, too.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(gpu_facts(device) if device.type == "cuda" else {}),
    }


# What nvidia-smi is asked for, and what it is called here.
_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock",
    "clocks.max.sm": "sm_clock_max",
    "clocks.mem": "memory_clock",
    "power.limit": "power_limit",
    "temperature.gpu": "temperature",
}


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Memory, compute capability, versions of what the kernels come from, and what nvidia-smi says about the GPU."""
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "triton": _installed("triton"),
        "flash_attn": _installed("flash-attn"),
        **parse_smi(_ask_smi(device)),
    }


def parse_smi(line: str) -> dict[str, str]:
    """The facts in one line of nvidia-smi's CSV, in the order of the query; nothing for an answer of another shape."""
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(_SMI_FIELDS):
        return {}
    return {name: value for name, value in zip(_SMI_FIELDS.values(), values, strict=True) if "N/A" not in value}


def _ask_smi(device: torch.device) -> str:
    """nvidia-smi's line about a device; empty without it. Its numbers ignore CUDA_VISIBLE_DEVICES, UUIDs do not lie."""
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader", f"--id={uuid}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name, and the instruction set that torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"
