"""Machines for predictions: peaks, memory, rates of kernels and links. Plain numbers, standard library only.

The table has one row per device with its source. All predictions read this table, or a profile measured by
`burst bench machine`, which has the same fields.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.config.errors import ConfigError
from engine.config.schema import nearest, read_dataclass, to_plain
from engine.config.settings import RunConfig

if TYPE_CHECKING:  # every verb reads machines, and few of them plans
    from engine.planning.program.ops import Direction, LinkBytes

LinkKind = Literal["intra", "inter", "host"]
# (size, fraction of the rate reached at this size), sizes ascending; empty: the full rate at all sizes.
Shares = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device (None: unknown), and the source of the number."""

    flops_per_s: float | None
    source: str


@dataclass(frozen=True)
class Machine:
    """One device with its links: a row of `DEVICES`, or what `burst bench machine` measured.

    Rates are per device and per direction; every link is full duplex.

    pattern                     of what torch and drivers call it
    source                      the document, or where and when it was measured
    bf16_peak, fp32_peak        dense FLOP/s, without sparsity: bf16 with fp32 accumulation, fp32 outside the tensor
                                cores (torch uses TF32 only if enabled)
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
        """Return the rate of the attention kernel on a tile of `rows` rows, the smaller of queries and keys."""
        if direction == "forward":
            return self.forward_flops_per_s * share_at(self.forward_shares, rows)
        return self.backward_flops_per_s * share_at(self.backward_shares, rows)

    def product_flops_per_s(self, side: float) -> float:
        """Rate of a product of matrices whose smallest side is this."""
        return self.matmul_flops_per_s * share_at(self.matmul_shares, side)

    def moved_bytes_per_s(self, operand_bytes: float) -> float:
        """Return the rate of elementwise operations on operands of this size."""
        return self.elementwise_bytes_per_s * share_at(self.elementwise_shares, operand_bytes)

    def bytes_per_s(self, link: LinkKind) -> float:
        """Rate of one direction of a link."""
        return {"intra": self.intra_bytes_per_s, "inter": self.inter_bytes_per_s, "host": self.host_bytes_per_s}[link]

    def idle_wire_s(self, sent: LinkBytes, local_ranks: int) -> float:
        """Return the seconds that these bytes of one rank take on otherwise idle links, which work concurrently.

        local_ranks   of a node; they send as much, and share the link to other nodes if it is one
        """
        others = local_ranks if self.shared_nic else 1
        return max(sent.intra_bytes / self.intra_bytes_per_s, others * sent.inter_bytes / self.inter_bytes_per_s)

    def latency_s(self, link: LinkKind) -> float:
        """Seconds between the post of a message by both ends and its first byte."""
        return {"intra": self.intra_latency_s, "inter": self.inter_latency_s, "host": self.host_latency_s}[link]

    def shared_by(self, local_ranks: int, threads: int | None = None, cores: int | None = None) -> Machine:
        """Return the machine as one of `local_ranks` ranks of a node has it, of `threads` threads; GPUs are exclusive.

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
    """Return the fraction of the rate at `size`: interpolated in log(size), constant beyond both ends."""
    if not shares:
        return 1.0
    above = bisect.bisect_left(shares, (size,))
    if above in (0, len(shares)):
        return shares[min(above, len(shares) - 1)][1]
    (low, low_share), (high, high_share) = shares[above - 1 : above + 1]
    fraction = math.log(size / low) / math.log(high / low)
    return low_share + fraction * (high_share - low_share)


def machine_fields() -> tuple[str, ...]:
    """Return the names of all rates and latencies."""
    return tuple(field.name for field in fields(Machine) if field.type == "float")


PROFILE_VERSION = 1


_AGAIN = "measure it again with `burst bench machine`"


def profile_document(machine: Machine, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a profile; `measured`: date, hardware, versions, and the measured series."""
    return {"profile_version": PROFILE_VERSION, "machine": to_plain(machine), "measured": dict(measured)}


def read_profile(path: Path) -> Machine:
    """Read the machine of a profile. Raises ConfigError with all problems of the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"device {path}: cannot be read ({error.strerror}); `burst bench machine` writes it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"device {path}: is no JSON ({error}); {_AGAIN}") from error
    if not isinstance(document, dict) or not isinstance(document.get("machine"), dict):
        raise ConfigError(f"device {path}: is no profile of a machine; `burst bench machine` writes one")
    if document.get("profile_version") != PROFILE_VERSION:
        given = document.get("profile_version")
        raise ConfigError(f"device {path}: is a profile of version {given}, expected {PROFILE_VERSION}; {_AGAIN}")
    return _machine(path, document["machine"])


def _machine(path: Path, values: Mapping[str, Any]) -> Machine:
    figures = [field.name for field in fields(Machine) if field.default is MISSING and field.type == "float"]
    problems = [
        f"{name} is {values.get(name)!r}, expected a number"
        for name in figures
        if not isinstance(values.get(name), int | float)
    ]
    if not problems:
        try:
            machine, found = read_dataclass(Machine, {**values, "name": str(path)})
            problems = [problem.text for problem in found]
        except ConfigError as error:
            problems = list(error.problems)
    if problems:
        raise ConfigError([f"device {path}: {problem}; {_AGAIN}" for problem in problems])
    return machine


DEFAULT_DEVICE = "h100"  # of predictions, unless configured or detected


_TB = 10**12


# Attention at head size 128 in bfloat16, as published, not the datasheet's peak. FlashAttention-2 on A100 (Dao 2023):
# up to 228 and 196 of 312 TFLOP/s, less a twentieth that the clock loses under minutes of load; taken for its
# generation and its cards. FlashAttention-3 on H100 (Shah et al. 2024): forward up to 740 of 989 TFLOP/s without a
# mask, somewhat more than 600 causal, backward about a fifth slower; later devices are taken to do no better.
_FA2 = (0.95 * 228 / 312, 0.95 * 196 / 312)


_FA3 = (600 / 989.4, 480 / 989.4)


# Large bf16 products of cuBLAS, whose clock falls under load: 234 of 312 TFLOP/s on A100, 700 of 989 on H100.
_MATMUL_SHARES = {_FA2: 0.75, _FA3: 0.71}


# SMs that NCCL's channels occupy while messages are in flight: 16 of 108, of 132.
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
    """Build a row of the table. Latencies are orders of magnitude: kernel launch, NCCL message, copy to the host.

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
    _gpu("a10g", r"\bA10G\b", 70.0, 35.0, _FA2, 23028, 600, 32, 32, 12.5, None, "A10G datasheet"),
    _gpu("a10", r"\bA10\b", 125.0, 31.2, _FA2, 23028, 600, 32, 32, 12.5, None, "A10 datasheet"),
    _gpu("a6000", r"\bRTX A6000\b", 154.8, 38.7, _FA2, 49140, 768, 32, 32, 12.5, None, "RTX A6000 datasheet"),
    _gpu("l40s", r"\bL40S\b", 362.1, 91.6, _FA2, 46068, 864, 32, 32, 12.5, None, "L40S datasheet"),
    _gpu("l40", r"\bL40\b", 181.0, 90.5, _FA2, 46068, 864, 32, 32, 12.5, None, "L40 datasheet"),
    _gpu("l4", r"\bL4\b", 121.0, 30.3, _FA2, 23034, 300, 32, 32, 12.5, None, "L4 datasheet"),
    _gpu("rtx6000-ada", r"\bRTX 6000 Ada\b", 364.2, 91.1, _FA2, 49140, 960, 32, 32, 12.5, None, "Ada whitepaper"),
    _gpu("rtx5090", r"\b(RTX ?)?5090\b", 209.5, 104.8, _FA2, 32607, 1792, 64, 64, 12.5, None, "Blackwell whitepaper"),
    _gpu("rtx4090", r"\b(RTX ?)?4090\b", 165.2, 82.6, _FA2, 24564, 1008, 32, 32, 12.5, None, "Ada whitepaper"),
    _gpu("rtx3090", r"\b(RTX ?)?3090\b", 71.0, 35.6, _FA2, 24576, 936, 32, 32, 12.5, None, "GA102 whitepaper"),
    _gpu("mi325x", r"\bMI325X\b", 1307.4, 163.4, _FA3, None, 6000, 448, 64, 50, None, "MI325X data sheet"),
    _gpu("mi300x", r"\bMI300X\b", 1307.4, 163.4, _FA3, None, 5300, 448, 64, 50, None, "MI300X data sheet"),
    _gpu("mi250x", r"\bMI250X\b", 191.5, 47.9, _FA2, None, 1600, 200, 36, 25, None, "MI250X data sheet, one die"),
)


def find_device(name: str) -> Machine | None:
    """Find a device by the name that torch, a driver or a user gives it, or read a profile (a .json file).

    Returns None for unknown names and for MIG slices, whose share of the device is not known. Raises ConfigError for
    a profile that cannot be read.
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


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", re.IGNORECASE)


def device_bytes(name: str) -> int | None:
    """Parse a device that is given as a size with its unit, 24GiB or 80GB; return its bytes, None for a name.

    Raises ConfigError for a number without a unit: 4090 is a device, and the unit of 80e9 is unknown.
    """
    if found := _SIZE.fullmatch(name.strip()):
        unit = (1024 if found[3] else 1000) ** ("", "K", "M", "G", "T").index(found[2].upper())
        if (size := int(float(found[1]) * unit)) >= 1:
            return size
    try:
        number = float(name)
    except ValueError:
        return None
    if find_device(name) is not None:
        return None
    meant = f": {number / 1e9:g}GB, if bytes are meant" if math.isfinite(number) and number >= 1e6 else ""
    raise ConfigError(f"device: got {name!r}, expected a name, or a size with its unit such as 24GiB or 80GB{meant}")


def split_device(name: str) -> tuple[str, int | None]:
    """Split `h100x8` into the device and the number per node; None without a number."""
    found = re.fullmatch(r"(.+?)x(\d{1,4})", name)
    is_several = found is not None and int(found[2]) > 0 and find_device(name) is None
    if found is None or not is_several or not (_SIZE.fullmatch(found[1]) or find_device(found[1])):
        return name, None
    return found[1], int(found[2])


def unknown_device(name: str, others: str) -> str:
    """Return the message for a name that is not in the table; `others` describes further legal values."""
    names = [device.name for device in DEVICES]
    near = nearest(name, names)
    return (
        f"got {name!r}, expected {others}, a profile such as machine.json (see `burst bench machine`), or one of "
        f"{', '.join(names)}{f' (did you mean {near}?)' if near else ''}"
    )


def published_peak(device_name: str, dtype: str) -> Peak | None:
    """Return the published dense peak of a device as torch names it; None if unknown."""
    device = find_device(device_name)
    peak = device and device.peak(dtype)
    return peak if peak and peak.flops_per_s else None


def read_rates(changes: Iterable[str]) -> dict[str, float | bool]:
    """Parse figures of a machine, each FIELD=NUMBER. Raises ConfigError for other texts."""
    rates: dict[str, float | bool] = {}
    for change in changes:
        field, _, text = change.partition("=")
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"machine: {change}: expected FIELD=NUMBER, such as inter_bytes_per_s=25e9") from None
        rates[field] = bool(number) if field == "shared_nic" else number
    return rates


def find_machine(name: str, changes: Mapping[str, float | bool] | None = None) -> Machine:
    """Return the machine of `find_device`, with `changes` to its fields.

    Raises ConfigError for an unknown name or field and for an impossible rate.
    """
    machine = find_device(name)
    if machine is None:
        raise ConfigError(f"device: {unknown_device(name, 'a size such as 80GB for memory alone')}")
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


def machine_of(config: RunConfig, device_name: str | None = None) -> Machine:
    """Return the configured machine; if its name is auto, that of the device."""
    name = config.cluster.machine.name
    if name == "auto":
        on_cpu = config.cluster.backend == "gloo" or device_name == "cpu"
        name = "cpu" if on_cpu else device_name if device_name and find_device(device_name) else DEFAULT_DEVICE
    return find_machine(name, read_rates(config.cluster.machine.rates))
