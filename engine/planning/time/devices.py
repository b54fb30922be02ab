"""What is known of devices by name: peak FLOP/s, memory, kernel rates, links. Standard library only.

One row a device, each with its document; everything that predicts or judges a run reads this table, or a profile that
`burst bench machine` measured, which is such a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from engine.config.errors import ConfigError
from engine.config.schema import nearest
from engine.planning.time.machine import Machine, Peak, machine_fields
from engine.planning.time.profile import read_profile

DEFAULT_DEVICE = "h100"  # predictions are for it where nothing says otherwise

_TB = 10**12
# Attention at head size 128 in bfloat16, as published, not the datasheet's peak. FlashAttention-2 on A100 (Dao 2023):
# up to 228 and 196 of 312 TFLOP/s, less a twentieth that the clock loses under minutes of load; taken for its
# generation and its cards. FlashAttention-3 on H100 (Shah et al. 2024): forward up to 740 of 989 TFLOP/s without a
# mask, somewhat more than 600 causal, backward about a fifth slower; later devices are taken to do no better.
_FA2 = (0.95 * 228 / 312, 0.95 * 196 / 312)
_FA3 = (600 / 989.4, 480 / 989.4)
# Large bf16 products of cuBLAS, whose clock falls under load: 234 of 312 TFLOP/s on A100, 700 of 989 on H100.
_MATMUL_SHARES = {_FA2: 0.75, _FA3: 0.71}
# Multiprocessors that NCCL's channels keep from kernels while messages are on their way: 16 of 108, of 132.
_MESSAGE_SHARES = {_FA2: 16 / 108, _FA3: 16 / 132}


def _gpu(
    name: str,
    pattern: str,
    bf16_tflops: float,
    fp32_tflops: float,
    kernel_shares: tuple[float, float],
    memory_mib: int | None,
    memory_gbps: float,
    peer_gbps: float,
    host_gbps: float,
    nic_gbps: float,
    server_host_bytes: int | None,
    source: str,
) -> Machine:
    """A row of the table. Times are of the order of a kernel's launch and ramp-up, of an NCCL message, of a copy to the
    host.

    kernel_shares      of the bf16 peak that attention kernels reach on large tiles: forward, backward
    memory_mib         what nvidia-smi reports; None: not known to us
    peer_gbps          to a device of the same node, one direction: NVLink, else PCIe
    host_gbps          to host memory, one direction: PCIe, or NVLink-C2C
    nic_gbps           to another node, one direction: the network port of each device in the vendor's server
    server_host_bytes  host memory of the vendor's own server with eight of them; None: there is none
    """
    forward, backward = kernel_shares
    return Machine(
        name=name,
        forward_flops_per_s=forward * bf16_tflops * 1e12,
        backward_flops_per_s=backward * bf16_tflops * 1e12,
        matmul_flops_per_s=_MATMUL_SHARES[kernel_shares] * bf16_tflops * 1e12,
        kernel_block_rows=128,
        tile_overhead_s=10e-6,
        elementwise_bytes_per_s=memory_gbps * 1e9,
        update_bytes_per_s=memory_gbps * 1e9,
        intra_bytes_per_s=peer_gbps * 1e9,
        intra_latency_s=8e-6,
        inter_bytes_per_s=nic_gbps * 1e9,
        inter_latency_s=15e-6,
        host_bytes_per_s=host_gbps * 1e9,
        host_latency_s=10e-6,
        message_compute_share=_MESSAGE_SHARES[kernel_shares],
        memory_bytes=None if memory_mib is None else memory_mib * 2**20,
        host_memory_bytes=server_host_bytes,
        bf16_peak=bf16_tflops * 1e12,
        fp32_peak=fp32_tflops * 1e12,
        source=source,
        pattern=pattern,
    )


# One core per rank, float32 flash kernel of torch, gloo over loopback and over 10 Gbit Ethernet; orders of magnitude,
# since cores differ.
_CPU = Machine(
    name="cpu",
    forward_flops_per_s=80e9,
    backward_flops_per_s=55e9,
    matmul_flops_per_s=80e9,
    kernel_block_rows=512,
    tile_overhead_s=50e-6,
    elementwise_bytes_per_s=10e9,
    update_bytes_per_s=10e9,
    intra_bytes_per_s=2e9,
    intra_latency_s=200e-6,
    inter_bytes_per_s=1.25e9,
    inter_latency_s=300e-6,
    host_bytes_per_s=10e9,
    host_latency_s=1e-6,
    is_cpu=True,
    source="orders of magnitude; `burst bench machine` measures yours",
    pattern=r"^cpu$",
)


# Datasheets print links with both directions counted (NVLink 3, 4, 5: 600, 900, 1,800 GB/s; PCIe 4 and 5 x16: 64 and
# 128) and often FLOP/s with 2:4 sparsity: half of it stands here. Network: HDR 200 Gbit/s in DGX A100, NDR 400 Gbit/s
# in DGX H100, H200 and B200; 100 Gbit/s is assumed where the vendor sells no server. First match wins: variants first.
DEVICES = (
    _CPU,
    _gpu("gb200", r"\bGB200\b", 2500.0, 80.0, _FA3, 189471, 8000, 900, 450, 50, None, "GB200 NVL72 datasheet"),
    _gpu("b200", r"\bB200\b", 2250.0, 75.0, _FA3, 183359, 8000, 900, 64, 50, 2 * _TB, "DGX B200 datasheet"),
    _gpu("gh200", r"\bGH200\b", 989.4, 67.0, _FA3, 97871, 4000, 450, 450, 50, None, "GH200 datasheet"),
    _gpu("h200-nvl", r"\bH200 NVL\b", 835.5, 60.0, _FA3, 143771, 4800, 450, 64, 50, None, "H200 NVL datasheet"),
    _gpu("h200", r"\bH200\b", 989.4, 67.0, _FA3, 143771, 4800, 450, 64, 50, 2 * _TB, "H200 SXM datasheet"),
    _gpu("h100-nvl", r"\bH100 NVL\b", 835.5, 60.0, _FA3, 95830, 3900, 300, 64, 50, None, "H100 NVL datasheet"),
    _gpu("h100-pcie", r"\bH[18]00 PCIe\b", 756.5, 51.2, _FA3, 81559, 2000, 64, 64, 50, None, "H100 PCIe datasheet"),
    _gpu("h800", r"\bH800\b", 989.4, 66.9, _FA3, 81559, 3350, 200, 64, 50, 2 * _TB, "H800 SXM specification"),
    _gpu("h100", r"\bH100\b", 989.4, 66.9, _FA3, 81559, 3350, 450, 64, 50, 2 * _TB, "H100 SXM datasheet"),
    _gpu("h20", r"\bH20\b", 148.0, 44.0, _FA3, 97871, 4000, 450, 64, 50, None, "H20 specification"),
    _gpu("a100-40gb", r"\bA100\b.*\b40 ?GB\b", 312.0, 19.5, _FA2, 40960, 1555, 300, 32, 25, _TB, "A100 datasheet"),
    _gpu("a800", r"\bA800\b", 312.0, 19.5, _FA2, 81920, 2039, 200, 32, 25, 2 * _TB, "A800 specification"),
    _gpu("a100", r"\bA100\b", 312.0, 19.5, _FA2, 81920, 2039, 300, 32, 25, 2 * _TB, "A100 datasheet"),
    _gpu("a30", r"\bA30\b", 165.0, 10.3, _FA2, 24576, 933, 32, 32, 12.5, None, "A30 datasheet"),
    _gpu("a40", r"\bA40\b", 149.7, 37.4, _FA2, 46068, 696, 32, 32, 12.5, None, "A40 datasheet"),
    _gpu("a10", r"\bA10G?\b", 125.0, 31.2, _FA2, 23028, 600, 32, 32, 12.5, None, "A10 datasheet"),
    _gpu("a6000", r"\bRTX A6000\b", 154.8, 38.7, _FA2, 49140, 768, 32, 32, 12.5, None, "RTX A6000 datasheet"),
    _gpu("l40s", r"\bL40S\b", 362.1, 91.6, _FA2, 46068, 864, 32, 32, 12.5, None, "L40S datasheet"),
    _gpu("l40", r"\bL40\b", 181.0, 90.5, _FA2, 46068, 864, 32, 32, 12.5, None, "L40 datasheet"),
    _gpu("l4", r"\bL4\b", 121.0, 30.3, _FA2, 23034, 300, 32, 32, 12.5, None, "L4 datasheet"),
    _gpu("rtx6000-ada", r"\bRTX 6000 Ada\b", 364.2, 91.1, _FA2, 49140, 960, 32, 32, 12.5, None, "Ada whitepaper"),
    _gpu("rtx5090", r"\bRTX ?5090\b", 209.5, 104.8, _FA2, 32607, 1792, 64, 64, 12.5, None, "Blackwell whitepaper"),
    _gpu("rtx4090", r"\bRTX ?4090\b", 165.2, 82.6, _FA2, 24564, 1008, 32, 32, 12.5, None, "Ada whitepaper"),
    _gpu("rtx3090", r"\bRTX ?3090\b", 71.0, 35.6, _FA2, 24576, 936, 32, 32, 12.5, None, "GA102 whitepaper"),
    _gpu("mi325x", r"\bMI325X\b", 1307.4, 163.4, _FA3, None, 6000, 448, 64, 50, None, "MI325X data sheet"),
    _gpu("mi300x", r"\bMI300X\b", 1307.4, 163.4, _FA3, None, 5300, 448, 64, 50, None, "MI300X data sheet"),
    _gpu("mi250x", r"\bMI250X\b", 191.5, 47.9, _FA2, None, 1600, 200, 36, 25, None, "MI250X data sheet, one die"),
)


def find_device(name: str) -> Machine | None:
    """The known device that torch, a driver or a person calls so, or what is in a profile, a file that ends in .json;
    none for a MIG slice, whose share nobody can tell. Raises ConfigError for a profile that cannot be read.
    """
    if name.endswith(".json"):
        return read_profile(Path(name))
    # Some drivers write "A100-SXM4-80GB" and "A100-PCIE-40GB", others "H100 PCIe".
    words = re.sub(r"[-_ ]+", " ", name)
    if re.search(r"\bMIG\b", words, re.IGNORECASE):
        return None
    exact = [device for device in DEVICES if device.name == name.lower()]
    found = [device for device in DEVICES if re.search(device.pattern, words, re.IGNORECASE)]
    return (*exact, *found, None)[0]


def unknown_device(name: str, others: str) -> str:
    """What to say of a name that is not in the table; `others` are further legal values, in words."""
    names = [device.name for device in DEVICES]
    near = nearest(name, names)
    return (
        f"got {name!r}, expected {others}, a profile such as machine.json (see `burst bench machine`), or one of "
        f"{', '.join(names)}{f' (did you mean {near}?)' if near else ''}"
    )


def published_peak(device_name: str, dtype: str) -> Peak | None:
    """The published dense peak of a device as torch names it; None when nobody knows it."""
    device = find_device(device_name)
    peak = device and device.peak(dtype)
    return peak if peak and peak.flops_per_s else None


def read_rates(changes: Iterable[str]) -> dict[str, float | bool]:
    """Figures of a machine by name, each given as FIELD=NUMBER. Raises ConfigError for what is none."""
    found: dict[str, float | bool] = {}
    for change in changes:
        field, _, text = change.partition("=")
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"machine: {change}: expected FIELD=NUMBER, such as inter_bytes_per_s=25e9") from None
        found[field] = bool(number) if field == "shared_nic" else number
    return found


def find_machine(name: str, changes: Mapping[str, float | bool] | None = None) -> Machine:
    """The machine that `find_device` finds, with some of its fields replaced.

    Raises ConfigError for an unknown name or field and for a rate that cannot be.
    """
    machine = find_device(name)
    if machine is None:
        raise ConfigError(f"device: {unknown_device(name, 'a number of bytes such as 80e9 for memory alone')}")
    known = {*machine_fields(), "shared_nic"}
    unknown = [
        f"machine: no such field: {field}{_near(field, known)}; fields are {', '.join(sorted(known))}"
        for field in changes or {}
        if field not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return replace(machine, **dict(changes or {}))  # type: ignore[arg-type]


def _near(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""
