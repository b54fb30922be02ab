"""Machines as a plan's time sees them: kernel rates, links, memory. Plain numbers, standard library only."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from engine.errors import ConfigError

LinkKind = Literal["intra", "inter", "host"]


@dataclass(frozen=True)
class Machine:
    """One device with its links. Rates are per device and per direction; every link carries both directions at once.

    forward_flops_per_s, backward_flops_per_s   attention kernels on a large tile, in the FLOPs of `tile_flops`
    kernel_block_rows                           side of the blocks in which a kernel works; half of one is wasted per
                                                row along the edge of a causal tile or a band
    tile_overhead_s                             added to every tile: launch, and ramp-up of the kernel
    elementwise_bytes_per_s                     device memory, for merging and local operations
    intra, inter, host                          to a rank of the same node, to one of another node, to host memory
    shared_nic                                  all ranks of a node share one `inter` link; else each has its own
    """

    name: str
    forward_flops_per_s: float
    backward_flops_per_s: float
    kernel_block_rows: float
    tile_overhead_s: float
    elementwise_bytes_per_s: float
    intra_bytes_per_s: float
    intra_latency_s: float
    inter_bytes_per_s: float
    inter_latency_s: float
    host_bytes_per_s: float
    host_latency_s: float
    shared_nic: bool = False

    def __post_init__(self) -> None:
        problems = []
        for name in machine_fields():
            value = getattr(self, name)
            may_be_0 = not name.endswith("_per_s")
            if not (value >= 0 if may_be_0 else value > 0):
                bound = "0 or more" if may_be_0 else "more than 0 (inf: free)"
                problems.append(f"machine {self.name}: {name} is {value}; expected {bound}")
        if problems:
            raise ConfigError(problems)

    def bytes_per_s(self, link: LinkKind) -> float:
        """Rate of one direction of a link."""
        return {"intra": self.intra_bytes_per_s, "inter": self.inter_bytes_per_s, "host": self.host_bytes_per_s}[link]

    def latency_s(self, link: LinkKind) -> float:
        """Seconds between the post of a message by both ends and its first byte."""
        return {"intra": self.intra_latency_s, "inter": self.inter_latency_s, "host": self.host_latency_s}[link]


def machine_fields() -> tuple[str, ...]:
    """Names of all rates and latencies."""
    return tuple(field.name for field in fields(Machine) if field.type == "float")


# Kernels: what published kernels reach at head size 128 in bfloat16, not the peak of the datasheet.
#   A100: FlashAttention-2 (Dao 2023): up to 73% (forward) and 63% (backward) of 312 TFLOP/s.
#   H100: FlashAttention-3 (Shah et al. 2024): forward up to 740 TFLOP/s without a mask, somewhat more than 600 causal;
#   its backward is about a fifth slower. H200 has the H100's compute units.
# Memory and links: datasheets of A100 80GB SXM, H100 SXM, H200 SXM. NVLink 3 and 4 carry 600 and 900 GB/s, PCIe 4 and 5
# x16 64 and 128 GB/s, counting both directions; half of it here. One InfiniBand port per GPU, as in DGX nodes: HDR
# 200 Gbit/s (A100), NDR 400 Gbit/s (H100, H200). Latencies are of the order of an NCCL point-to-point message.
# cpu: one core per rank, float32 flash kernel of torch, gloo over loopback and over 10 Gbit Ethernet; orders of
# magnitude, since cores differ.
_A100 = Machine(
    name="a100",
    forward_flops_per_s=228e12,
    backward_flops_per_s=196e12,
    kernel_block_rows=128,
    tile_overhead_s=10e-6,
    elementwise_bytes_per_s=2.04e12,
    intra_bytes_per_s=300e9,
    intra_latency_s=8e-6,
    inter_bytes_per_s=25e9,
    inter_latency_s=15e-6,
    host_bytes_per_s=32e9,
    host_latency_s=10e-6,
)
_H100 = Machine(
    name="h100",
    forward_flops_per_s=600e12,
    backward_flops_per_s=480e12,
    kernel_block_rows=128,
    tile_overhead_s=10e-6,
    elementwise_bytes_per_s=3.35e12,
    intra_bytes_per_s=450e9,
    intra_latency_s=8e-6,
    inter_bytes_per_s=50e9,
    inter_latency_s=15e-6,
    host_bytes_per_s=64e9,
    host_latency_s=10e-6,
)
_H200 = replace(_H100, name="h200", elementwise_bytes_per_s=4.8e12)
_CPU = Machine(
    name="cpu",
    forward_flops_per_s=80e9,
    backward_flops_per_s=55e9,
    kernel_block_rows=512,
    tile_overhead_s=50e-6,
    elementwise_bytes_per_s=10e9,
    intra_bytes_per_s=2e9,
    intra_latency_s=200e-6,
    inter_bytes_per_s=1.25e9,
    inter_latency_s=300e-6,
    host_bytes_per_s=10e9,
    host_latency_s=1e-6,
)
MACHINES: Mapping[str, Machine] = {machine.name: machine for machine in (_A100, _H100, _H200, _CPU)}


def find_machine(name: str, changes: Mapping[str, float | bool] | None = None) -> Machine:
    """The machine of this name with some of its fields replaced.

    Raises ConfigError for an unknown name or field and for a rate that cannot be.
    """
    if name not in MACHINES:
        raise ConfigError(f"machine: got {name!r}, expected one of {', '.join(MACHINES)}{_nearest(name, MACHINES)}")
    known = {*machine_fields(), "shared_nic"}
    unknown = [
        f"machine: no such field: {field}{_nearest(field, known)}; fields are {', '.join(sorted(known))}"
        for field in changes or {}
        if field not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return replace(MACHINES[name], **dict(changes or {}))  # type: ignore[arg-type]


def free_links(machine: Machine) -> Machine:
    """The same machine whose links cost nothing: what a plan takes for its compute alone."""
    changes: dict[str, float] = {}
    for link in ("intra", "inter", "host"):
        changes |= {f"{link}_bytes_per_s": math.inf, f"{link}_latency_s": 0.0}
    return replace(machine, **changes)  # type: ignore[arg-type]


def _nearest(name: str, known: Mapping[str, object] | set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
