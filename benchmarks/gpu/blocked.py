"""Part blocked: what attention in blocks costs against one kernel over the whole sequence, on one device.

whole ring   all ranks of a small ring one after the other, against the kernel over the same sequence: seconds over
             seconds, and the results' errors against float64
one rank     the work of one rank of a ring of up to 64, whose whole sequence is too long for one call: FLOP/s over the
             FLOP/s of the kernel on a long sequence

Messages cost nothing here, so what is seen is smaller tiles, merging and sums in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.plan import Measurement, Part, Row
from benchmarks.gpu.ring import Gradients, Inputs, NoiseTransport, RingCase, RingRank, run_together
from benchmarks.gpu.tiles import BACKWARD_OVER_FORWARD, device_inputs, forward_flops
from benchmarks.gpu.timing import time_call
from engine.bench.measure import Timing
from engine.bench.spec import HeadShape
from engine.kernels.attention import select_kernel
from engine.kernels.attention.base import TileGradients, TileKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.visibility.mask import Band

CALLS = 4  # some that do not count, and two or three that do
FIRST_RINGS = 4
ASSUMED_FLOPS = 4.5e14  # of the device's fastest kernel
CHECKED_ROWS = 1024  # of the end of the sequence, against float64
FLOPS_OF_BOTH = 1 + BACKWARD_OVER_FORWARD
Point = tuple[str, int, int, int, int, int]  # preset, nodes, ranks, block tokens, heads, kv heads


@dataclass(frozen=True)
class BlockedSizes:
    """Points of both kinds, and the length at which one rank's rate is compared."""

    rings: tuple[Point, ...]
    ranks: tuple[Point, ...]
    whole_tokens: int = 65536
    head_dim: int = 128
    weight: float = 3.0


FULL = BlockedSizes(
    rings=(
        ("burst", 1, 8, 8192, 32, 32),
        ("burst", 1, 8, 16384, 32, 32),
        ("burst", 1, 8, 8192, 32, 8),
        ("burst", 1, 8, 16384, 32, 8),
        ("burst", 1, 4, 32768, 32, 32),
        ("burst", 1, 8, 4096, 32, 32),
        ("ring", 1, 8, 16384, 32, 32),
    ),
    ranks=(
        ("burst", 8, 64, 8192, 32, 32),
        ("burst", 8, 64, 16384, 32, 32),
        ("burst", 1, 8, 32768, 32, 32),
        ("burst", 1, 8, 16384, 32, 32),
        ("burst", 1, 8, 8192, 32, 32),
        ("burst", 1, 8, 4096, 32, 32),
        ("burst", 8, 64, 4096, 32, 32),
        ("burst", 2, 16, 16384, 32, 8),
        ("burst", 4, 32, 16384, 32, 8),
        ("burst", 8, 64, 32768, 32, 8),
    ),
)
SMALL = BlockedSizes(
    rings=(("burst", 1, 4, 32, 4, 2), ("ring", 1, 2, 64, 4, 4)),
    ranks=(("burst", 2, 8, 32, 4, 4),),
    whole_tokens=128,
    head_dim=16,
)


def plan(sizes: BlockedSizes) -> Part:
    """The first whole rings, which compare like with like; then ranks of long rings; then the other whole rings."""
    rings = [_measurement("whole ring", "measure_ring", point, sizes) for point in sizes.rings]
    ranks = [_measurement("one rank", "measure_rank", point, sizes) for point in sizes.ranks]
    measurements = (*rings[:FIRST_RINGS], *ranks, *rings[FIRST_RINGS:])
    return Part("blocked", "Blocked attention", sizes.weight, measurements)


def _measurement(kind: str, function: str, point: Point, sizes: BlockedSizes) -> Measurement:
    preset, nodes, ranks, block, heads, kv_heads = point
    seq_len = ranks * block
    flops = forward_flops("causal", seq_len, heads, sizes.head_dim) * FLOPS_OF_BOTH
    if kind == "one rank":
        whole = forward_flops("causal", sizes.whole_tokens, heads, sizes.head_dim) * FLOPS_OF_BOTH
        flops = flops / ranks + whole
    else:
        flops = 2 * flops
    settings = {"preset": preset, "nodes": nodes, "ranks": ranks, "block_tokens": block}
    settings |= {"heads": [heads, kv_heads], "head_dim": sizes.head_dim}
    if kind == "one rank":
        settings["whole_tokens"] = sizes.whole_tokens
    label = (
        f"{kind} of {preset} with {ranks} ranks on {nodes} nodes at {block} tokens each with {heads}:{kv_heads} heads"
    )
    return Measurement(
        label, f"benchmarks.gpu.blocked:{function}", settings, expected_s=2.0 + CALLS * flops / ASSUMED_FLOPS
    )


def measure_ring(
    device: torch.device, preset: str, nodes: int, ranks: int, block_tokens: int, heads: Sequence[int], head_dim: int
) -> list[Row]:
    """All ranks against one kernel: one row."""
    case, kernel = _case(preset, nodes, ranks, block_tokens, heads, head_dim, device)
    x = Inputs(*device_inputs(case.shape, case.seq_len, device))
    members = [case.rank(rank, kernel, device) for rank in range(ranks)]
    parts = [x.rows(member.index) for member in members]
    whole = _run_whole(kernel, x)
    together = run_together(members, parts)
    row = _errors(x, _gathered(members, together), "blocked") | _errors(x, whole, "whole")
    del together
    row |= _blocked_seconds(members, parts, device)
    row |= _whole_seconds(kernel, x, whole, device)
    for name in ("forward", "backward", "total"):
        row[f"{name}_share"] = row[f"whole_{name}_s"] / row[f"blocked_{name}_s"]
    flops = forward_flops("causal", case.seq_len, heads[0], head_dim)
    return [_about(case, members[0], "whole ring", kernel) | row | _rates(row, flops, flops)]


def measure_rank(
    device: torch.device,
    preset: str,
    nodes: int,
    ranks: int,
    block_tokens: int,
    heads: Sequence[int],
    head_dim: int,
    whole_tokens: int,
) -> list[Row]:
    """One rank of a ring against one kernel on a sequence of another length: one row."""
    case, kernel = _case(preset, nodes, ranks, block_tokens, heads, head_dim, device)
    member = case.rank(ranks // 2, kernel, device)
    x = Inputs(*device_inputs(case.shape, block_tokens, device))
    row = _blocked_seconds([member], [x], device)
    y = Inputs(*device_inputs(case.shape, whole_tokens, device))
    row |= _whole_seconds(kernel, y, _run_whole(kernel, y), device)
    flops = 4.0 * heads[0] * head_dim * member.pairs
    whole_flops = forward_flops("causal", whole_tokens, heads[0], head_dim)
    for name in ("forward", "backward", "total"):
        row[f"{name}_share"] = flops / row[f"blocked_{name}_s"] / (whole_flops / row[f"whole_{name}_s"])
    about = _about(case, member, "one rank", kernel) | {"whole_tokens": whole_tokens}
    return [about | row | _rates(row, flops, whole_flops)]


def _case(
    preset: str, nodes: int, ranks: int, block: int, heads: Sequence[int], head_dim: int, device: torch.device
) -> tuple[RingCase, TileKernel]:
    shape = HeadShape(heads[0], heads[1], head_dim)
    kernel = select_kernel("auto", device, torch.bfloat16, head_dim).kernel
    return RingCase(preset, ranks, nodes, block, shape), kernel  # type: ignore[arg-type]


def _about(case: RingCase, member: RingRank, kind: str, kernel: TileKernel) -> Row:
    return {
        "kind": kind,
        "preset": case.preset,
        "circulates": member.circulates,
        "ranks": case.ranks,
        "nodes": case.nodes,
        "block_tokens": case.block_tokens,
        "heads": case.shape.num_heads,
        "kv_heads": case.shape.num_kv_heads,
        "kernel": kernel.name,
    }


def _rates(row: Row, flops: float, whole_flops: float) -> Row:
    """TFLOP/s of both sides, so that a figure above the peak is seen."""
    rates = {}
    for side, forward in (("blocked", flops), ("whole", whole_flops)):
        rates[f"{side}_forward_tflops"] = forward / row[f"{side}_forward_s"] / 1e12
        rates[f"{side}_backward_tflops"] = BACKWARD_OVER_FORWARD * forward / row[f"{side}_backward_s"] / 1e12
    return rates


def _blocked_seconds(members: Sequence[RingRank], parts: Sequence[Inputs], device: torch.device) -> Row:
    """Seconds of all these ranks one after the other, on received numbers that are random.

    Both passes share one block of memory, so each is filled just before it is timed; twice, because a pool hands out
    its final block from the second run on.
    """
    pairs = list(zip(members, parts, strict=True))
    noise = NoiseTransport()
    for _ in range(2):
        saved = [member.over(noise).forward(x)[1] for member, x in pairs]
    forward = time_call(lambda: [member.forward(x) for member, x in pairs], device)
    for _ in range(2):
        for (member, x), kept in zip(pairs, saved, strict=True):
            member.over(noise).backward(x, kept)
    backward = time_call(
        lambda: [member.backward(x, kept) for (member, x), kept in zip(pairs, saved, strict=True)], device
    )
    return _seconds("blocked", forward, backward)


def _whole_seconds(kernel: TileKernel, x: Inputs, whole: tuple[Tensor, Tensor, Gradients], device: torch.device) -> Row:
    grads = TileGradients(x.dout, whole[0], whole[1])
    forward = time_call(lambda: kernel.forward(x.q, x.k, x.v, _causal(x)), device)
    backward = time_call(lambda: kernel.backward(grads, x.q, x.k, x.v, _causal(x)), device)
    return _seconds("whole", forward, backward)


def _seconds(side: str, forward: Timing, backward: Timing) -> Row:
    return {
        f"{side}_forward_s": forward.median_s,
        f"{side}_backward_s": backward.median_s,
        f"{side}_total_s": forward.median_s + backward.median_s,
    }


def _causal(x: Inputs) -> Band:
    return Band(0, x.q.shape[0], 0, x.q.shape[0], low=0)


def _run_whole(kernel: TileKernel, x: Inputs) -> tuple[Tensor, Tensor, Gradients]:
    """(out, lse, gradients) of one call over the whole sequence."""
    out, lse = kernel.forward(x.q, x.k, x.v, _causal(x))
    return out, lse, Gradients(*kernel.backward(TileGradients(x.dout, out, lse), x.q, x.k, x.v, _causal(x)))


def _gathered(
    members: Sequence[RingRank], results: Sequence[tuple[Tensor, Gradients]]
) -> tuple[Tensor, None, Gradients]:
    """out and gradients in the order of the sequence."""
    index = torch.cat([member.index for member in members])
    order = torch.argsort(index)
    names = zip(*(gradients for _, gradients in results), strict=True)
    return torch.cat([out for out, _ in results])[order], None, Gradients(*(torch.cat(parts)[order] for parts in names))


def _errors(x: Inputs, got: tuple[Tensor, Tensor | None, Gradients], side: str) -> Row:
    """Relative errors of the first kv head's group at the end of the sequence, against float64.

    The last rows see all keys, and the last keys are seen by the last rows only: so everything about them follows from
    a tile of these rows, however long the sequence is.
    """
    rows, group = min(CHECKED_ROWS, x.q.shape[0]), x.q.shape[1] // x.k.shape[1]
    tokens = x.q.shape[0]
    band = Band(0, rows, 0, tokens, low=rows - tokens)
    q, dout = (t[-rows:, :group].double() for t in (x.q, x.dout))
    k, v = (t[:, :1].double() for t in (x.k, x.v))
    reference = ReferenceKernel()
    out, lse = reference.forward(q, k, v, band)
    want = reference.backward(TileGradients(dout, out, lse), q, k, v, band)
    pairs = {
        "out": (got[0][-rows:, :group], out),
        "dq": (got[2].dq[-rows:, :group], want.dq),
        "dk": (got[2].dk[-rows:, :1], want.dk[-rows:]),
        "dv": (got[2].dv[-rows:, :1], want.dv[-rows:]),
    }
    return {
        f"{side}_{name}_error": float((mine.double() - ref).norm() / ref.norm()) for name, (mine, ref) in pairs.items()
    }
