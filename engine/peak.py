"""Peak FLOP/s of devices: published dense figures by device name, and for a CPU the best rate that is measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import Dtype, TrainConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Peak:
    """FLOP/s that one device can do at most, None where nobody knows, and where the number came from."""

    flops_per_s: float | None
    source: str


@dataclass(frozen=True)
class _Device:
    """A row of the table: what torch calls the device, dense TFLOP/s without sparsity, the document."""

    pattern: str
    bfloat16: float
    float32: float
    source: str


# float32 is the rate outside the tensor cores: torch uses TF32 only when told to. bfloat16 is with fp32 accumulation.
# Datasheets often print the figure with 2:4 sparsity; dense is half of it. First match wins: variants before families.
_DEVICES = (
    _Device(r"\bGB200\b", 2500.0, 80.0, "NVIDIA GB200 NVL72 datasheet, per GPU"),
    _Device(r"\bB200\b", 2250.0, 75.0, "NVIDIA HGX B200 datasheet, per GPU"),
    _Device(r"\bGH200\b", 989.4, 67.0, "NVIDIA GH200 datasheet"),
    _Device(r"\bH200 NVL\b", 835.5, 60.0, "NVIDIA H200 datasheet, NVL column"),
    _Device(r"\bH200\b", 989.4, 67.0, "NVIDIA H200 datasheet, SXM column"),
    _Device(r"\bH100 NVL\b", 835.5, 60.0, "NVIDIA H100 datasheet, NVL column"),
    _Device(r"\bH[18]00 PCIe\b", 756.5, 51.2, "NVIDIA H100 datasheet, PCIe column"),
    _Device(r"\bH[18]00\b", 989.4, 66.9, "NVIDIA H100 datasheet, SXM column"),
    _Device(r"\bH20\b", 148.0, 44.0, "NVIDIA H20 specification"),
    _Device(r"\bA[18]00\b", 312.0, 19.5, "NVIDIA A100 datasheet"),
    _Device(r"\bA30\b", 165.0, 10.3, "NVIDIA A30 datasheet"),
    _Device(r"\bA40\b", 149.7, 37.4, "NVIDIA A40 datasheet"),
    _Device(r"\bA10\b", 125.0, 31.2, "NVIDIA A10 datasheet"),
    _Device(r"\bRTX A6000\b", 154.8, 38.7, "NVIDIA RTX A6000 datasheet"),
    _Device(r"\bL40S\b", 362.1, 91.6, "NVIDIA L40S datasheet"),
    _Device(r"\bL40\b", 181.0, 90.5, "NVIDIA L40 datasheet"),
    _Device(r"\bL4\b", 121.0, 30.3, "NVIDIA L4 datasheet"),
    _Device(r"\bRTX 6000 Ada\b", 364.2, 91.1, "NVIDIA Ada GPU architecture whitepaper"),
    _Device(r"\bRTX 5090\b", 209.5, 104.8, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    _Device(r"\bRTX 4090\b", 165.2, 82.6, "NVIDIA Ada GPU architecture whitepaper"),
    _Device(r"\bRTX 3090\b", 71.0, 35.6, "NVIDIA GA102 GPU architecture whitepaper"),
    _Device(r"\bMI3(00|25)X\b", 1307.4, 163.4, "AMD Instinct MI300X data sheet"),
    _Device(r"\bMI250X\b", 191.5, 47.9, "AMD Instinct MI250X data sheet, one of two dies"),
)
_MEASURE_SIZES = (512, 1024, 2048)
_MEASURE_S = 0.2  # per size


def peak_flops(device_name: str, dtype: Dtype) -> Peak | None:
    """The published dense peak of a device as torch names it; None when it is not in the table.

    A MIG slice is part of a device, of a size that its name does not give as a share of the peak: None.
    """
    # Some drivers write "A100-SXM4-80GB" and "A100-PCIE-40GB", others "H100 PCIe".
    words = re.sub(r"[-_]+", " ", device_name)
    if re.search(r"\bMIG\b", words):
        return None
    for device in _DEVICES:
        if re.search(device.pattern, words, re.IGNORECASE):
            tflops = device.bfloat16 if dtype == "bfloat16" else device.float32
            return Peak(tflops * 1e12, f"{device.source}, {dtype} dense")
    return None


def measure_cpu_peak(dtype: Dtype) -> Peak:
    """The best matmul rate of this process with its threads now, labelled as measured; takes about a second."""
    import torch

    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    best = 0.0
    for size in _MEASURE_SIZES:
        seconds = _fastest_matmul_s(size, torch_dtype)
        best = max(best, 2 * size**3 / seconds)
        if seconds > _MEASURE_S:
            break  # no fast kernel for this dtype: a larger product would only take longer
    return Peak(best, f"measured: best {dtype} matmul of this process with {torch.get_num_threads()} threads")


def find_peak(train: TrainConfig, device: torch.device) -> Peak:
    """The peak of `device` for a run: what the config says, else the table, else for a CPU what is measured."""
    if train.peak_flops_per_device is not None:
        return Peak(train.peak_flops_per_device, "config: train.peak_flops_per_device")
    if device.type != "cuda":
        return measure_cpu_peak(train.compute_dtype)
    import torch

    name = torch.cuda.get_device_name(device)
    known = peak_flops(name, train.compute_dtype)
    return known or Peak(None, f"unknown device {name!r}: set train.peak_flops_per_device to its dense FLOP/s")


def above_peak_warning(figure: str, flops_per_s: float, peak: Peak) -> str | None:
    """A sentence for people when a rate per device exceeds the peak: then a count, a clock or the peak is wrong."""
    if peak.flops_per_s is None or flops_per_s <= peak.flops_per_s:
        return None
    return (
        f"{figure} is {flops_per_s / 1e12:.3g} TFLOP/s per device, above the peak of {peak.flops_per_s / 1e12:.3g} "
        f"({peak.source}): do not trust it; check the timing, or set train.peak_flops_per_device"
    )


def _fastest_matmul_s(size: int, dtype: torch.dtype) -> float:
    """Seconds of the fastest product of two [size, size] matrices within _MEASURE_S, at least two tried."""
    import torch

    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(left, right, out=out)
    times: list[float] = []
    while sum(times) < _MEASURE_S or len(times) < 2:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        times.append(time.perf_counter() - start)
    return min(times)
