"""Machines as a plan's time sees them: kernel rates, links, memory. Plain numbers, standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from engine.config.errors import ConfigError
from engine.config.schema import nearest
from engine.planning.schedule.plan import LinkBytes
from engine.planning.time.devices import Device, find_device, unknown_device

LinkKind = Literal["intra", "inter", "host"]


@dataclass(frozen=True)
class Machine:
    """One device with its links. Rates are per device and per direction; every link carries both directions at once.

    forward_flops_per_s, backward_flops_per_s   attention kernels on a large tile, in the FLOPs of `tile_flops`
    matmul_flops_per_s                          large products of matrices
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
    matmul_flops_per_s: float
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

    def idle_wire_s(self, sent: LinkBytes, local_ranks: int) -> float:
        """Seconds that so many bytes of one rank take when nothing else is on its links, which work at the same time.

        local_ranks   of a node; they send as much, and share the link to other nodes if it is one
        """
        others = local_ranks if self.shared_nic else 1
        return max(sent.intra_bytes / self.intra_bytes_per_s, others * sent.inter_bytes / self.inter_bytes_per_s)

    def latency_s(self, link: LinkKind) -> float:
        """Seconds between the post of a message by both ends and its first byte."""
        return {"intra": self.intra_latency_s, "inter": self.inter_latency_s, "host": self.host_latency_s}[link]


def machine_fields() -> tuple[str, ...]:
    """Names of all rates and latencies."""
    return tuple(field.name for field in fields(Machine) if field.type == "float")


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
    intra_bytes_per_s=2e9,
    intra_latency_s=200e-6,
    inter_bytes_per_s=1.25e9,
    inter_latency_s=300e-6,
    host_bytes_per_s=10e9,
    host_latency_s=1e-6,
)


def find_machine(name: str, changes: Mapping[str, float | bool] | None = None) -> Machine:
    """The machine of `cpu` or of a device of `engine.planning.time.devices`, with some of its fields replaced.

    Raises ConfigError for an unknown name or field and for a rate that cannot be.
    """
    device = find_device(name)
    if name != "cpu" and device is None:
        raise ConfigError(f"device: {unknown_device(name, 'cpu, a number of bytes such as 80e9 for memory alone,')}")
    machine = _CPU if device is None else _of_device(device)
    known = {*machine_fields(), "shared_nic"}
    unknown = [
        f"machine: no such field: {field}{_near(field, known)}; fields are {', '.join(sorted(known))}"
        for field in changes or {}
        if field not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return replace(machine, **dict(changes or {}))  # type: ignore[arg-type]


def _of_device(device: Device) -> Machine:
    """Times are of the order of a kernel's launch and ramp-up, of an NCCL message, of a copy to the host."""
    forward, backward = device.kernel_shares
    return Machine(
        name=device.name,
        forward_flops_per_s=forward * device.bf16_tflops * 1e12,
        backward_flops_per_s=backward * device.bf16_tflops * 1e12,
        matmul_flops_per_s=device.matmul_share * device.bf16_tflops * 1e12,
        kernel_block_rows=128,
        tile_overhead_s=10e-6,
        elementwise_bytes_per_s=device.memory_gbps * 1e9,
        intra_bytes_per_s=device.peer_gbps * 1e9,
        intra_latency_s=8e-6,
        inter_bytes_per_s=device.nic_gbps * 1e9,
        inter_latency_s=15e-6,
        host_bytes_per_s=device.host_gbps * 1e9,
        host_latency_s=10e-6,
    )


def _near(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""
