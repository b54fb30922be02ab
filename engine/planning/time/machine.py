"""Machines as predictions see them: peaks, memory, rates of kernels, links. Plain numbers, standard library only."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from engine.config.errors import ConfigError
from engine.planning.schedule.plan import Direction, LinkBytes

LinkKind = Literal["intra", "inter", "host"]
# (size, share of the rate that something of this size reaches), sizes ascending; empty: all sizes reach it.
Shares = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Peak:
    """FLOP/s that one device can do at most, None where nobody knows, and where the number came from."""

    flops_per_s: float | None
    source: str


@dataclass(frozen=True)
class Machine:
    """One device with its links: a row of `engine.planning.time.devices`, or what `burst bench machine` measured.

    Rates are per device and per direction; every link carries both directions at once.

    pattern                     of what torch and drivers call it
    source                      the document, or where and when it was measured
    bf16_peak, fp32_peak        dense FLOP/s, without sparsity: bf16 with fp32 accumulation, fp32 outside the tensor
                                cores (torch uses TF32 only when told to)
    memory_bytes                as the driver reports it; of a CPU: None, it is the host's
    host_memory_bytes           of a node; None: not known
    is_cpu                      ranks compute on the cores of their node
    local_ranks                 of a node when the rates were measured, which on cores that they shared are those of one
                                of them; None: not measured, of a rank that has its device to itself
    forward, backward           attention kernels on a large tile, in the FLOPs of `tile_flops`
    matmul                      large products of matrices
    kernel_block_rows           side of the blocks in which a kernel works; half of one is wasted per row along the edge
                                of a causal tile or a band
    tile_overhead_s             added to every tile: launch, and ramp-up of the kernel
    layer_overhead_s            of the host, per layer of a step: operators, and what starts its messages
    step_overhead_s             of the host, per step
    elementwise                 device memory, for merging and local operations
    *_shares                    of these: by rows of a tile, by the smallest side of a product, by bytes of an operand
    update                      bytes of weights, gradients and moments that the optimizer reads and writes
    intra, inter, host          to a rank of the same node, to one of another node, to host memory
    message_compute_share       of the seconds of a message inside a node, what computing loses that runs meanwhile
    shared_nic                  all ranks of a node share one `inter` link; else each has its own
    """

    name: str
    forward_flops_per_s: float
    backward_flops_per_s: float
    matmul_flops_per_s: float
    kernel_block_rows: float
    tile_overhead_s: float
    elementwise_bytes_per_s: float
    update_bytes_per_s: float
    intra_bytes_per_s: float
    intra_latency_s: float
    inter_bytes_per_s: float
    inter_latency_s: float
    host_bytes_per_s: float
    host_latency_s: float
    shared_nic: bool = False
    layer_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    message_compute_share: float = 0.0
    forward_shares: Shares = ()
    backward_shares: Shares = ()
    matmul_shares: Shares = ()
    elementwise_shares: Shares = ()
    is_cpu: bool = False
    local_ranks: int | None = None
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    bf16_peak: float | None = None
    fp32_peak: float | None = None
    source: str = ""
    pattern: str = ""

    def __post_init__(self) -> None:
        problems = []
        for name in machine_fields():
            value = getattr(self, name)
            may_be_0 = not name.endswith("_per_s")
            if not (value >= 0 if may_be_0 else value > 0):
                bound = "0 or more" if may_be_0 else "more than 0 (inf: free)"
                problems.append(f"machine {self.name}: {name} is {value}; expected {bound}")
        for name in ("forward_shares", "backward_shares", "matmul_shares", "elementwise_shares"):
            points = getattr(self, name)
            ascending = all(len(point) == 2 and min(point) > 0 for point in points) and points == tuple(sorted(points))
            if not ascending:
                problems.append(f"machine {self.name}: {name} is {points}; expected (size, share), sizes ascending")
        if problems:
            raise ConfigError(problems)

    def peak(self, dtype: str) -> Peak:
        """What a device can do at most in a number format."""
        flops_per_s = self.bf16_peak if dtype == "bfloat16" else self.fp32_peak
        return Peak(flops_per_s, f"{self.source}, {dtype} dense")

    def tile_flops_per_s(self, direction: Direction, rows: float) -> float:
        """Rate of the attention kernel on a tile of so many rows (the fewer of queries and keys)."""
        if direction == "forward":
            return self.forward_flops_per_s * share_at(self.forward_shares, rows)
        return self.backward_flops_per_s * share_at(self.backward_shares, rows)

    def product_flops_per_s(self, side: float) -> float:
        """Rate of a product of matrices whose smallest side is this."""
        return self.matmul_flops_per_s * share_at(self.matmul_shares, side)

    def moved_bytes_per_s(self, operand_bytes: float) -> float:
        """Rate of elementwise operations on operands of so many bytes."""
        return self.elementwise_bytes_per_s * share_at(self.elementwise_shares, operand_bytes)

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

    def shared_by(self, local_ranks: int, threads: int | None = None, cores: int | None = None) -> Machine:
        """As one of `local_ranks` ranks of a node sees it, each of so many threads; a GPU is nobody else's.

        Where fewer share the cores that were measured each is so much faster; a core of the table is one thread's, and
        more threads than there are cores, where that is known, have a part of one.
        """
        if not self.is_cpu:
            return self
        if self.local_ranks is not None:
            faster = self.local_ranks / local_ranks
        else:
            faster = min(threads or 1, math.inf if cores is None else cores / local_ranks)
        changes = {
            name: getattr(self, name) * (faster if name.endswith("_per_s") else 1 / faster)
            for name in machine_fields()
            if name.endswith(("_per_s", "_overhead_s")) and not name.startswith("inter")
        }
        return replace(self, local_ranks=local_ranks if self.local_ranks else None, **changes)


def share_at(shares: Shares, size: float) -> float:
    """The share that this size reaches: between two points by the logarithm of the size, else that of the end."""
    if not shares:
        return 1.0
    above = bisect.bisect_left(shares, (size,))
    if above in (0, len(shares)):
        return shares[min(above, len(shares) - 1)][1]
    (low, low_share), (high, high_share) = shares[above - 1 : above + 1]
    place = math.log(size / low) / math.log(high / low)
    return low_share + place * (high_share - low_share)


def machine_fields() -> tuple[str, ...]:
    """Names of all rates and latencies."""
    return tuple(field.name for field in fields(Machine) if field.type == "float")
