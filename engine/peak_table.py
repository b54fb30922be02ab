"""Published peak FLOP/s of devices by name: dense figures, each with its document. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config import Dtype


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
