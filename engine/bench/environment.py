"""The facts without which a figure means nothing: machine, load, versions."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

import torch

from engine.runs.provenance import cpu_name, output_of, version_of


def environment(device: torch.device) -> dict[str, Any]:
    """Date, device, cores, threads of this process, load, platform and versions, as plain values; of a GPU its driver,
    clocks and libraries, too.
    """
    cpu = f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(gpu_facts(device) if device.type == "cuda" else {}),
    }


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What torch and nvidia-smi say about the GPU, and versions of what the kernels come from."""
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    # nvidia-smi's numbers ignore CUDA_VISIBLE_DEVICES, UUIDs do not lie.
    query, uuid = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu", properties.uuid
    return {
        "gpu": str(properties),
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "triton": version_of("triton"),
        "flash_attn": version_of("flash-attn"),
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv", f"--id=GPU-{uuid}"),
    }
