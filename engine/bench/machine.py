"""One rank of a measurement of this machine: `python -m engine.bench.machine FOLDER`, with RANK in the environment.

All ranks run the same operations at the same time, as in training, so each has the same part of shared cores, memory
and links. Overheads of the engine are measured by running it: a layer, the loss, an update, and whole steps of a model
so small that nothing else takes time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.attention.library import ContextParallel, resolve_here
from engine.bench.measure import Series, Stopwatch, environment, exchange, run_rank
from engine.bench.spec import MachineCell, RankSetup
from engine.config.settings import RunConfig
from engine.data.sampler import Batch
from engine.distributed.mesh import build_mesh
from engine.kernels.attention.base import TileGradients, TileKernel
from engine.model.llama import TransformerBlock
from engine.model.rope import rope_table
from engine.parallel.parallelize import build_model
from engine.planning.visibility.mask import Band
from engine.predict.flops import count_parameters
from engine.predict.machine import Machine, find_device, profile_document, share_at
from engine.predict.memory import find_hardware
from engine.predict.plan_costs import layer_numbers, pair_flops
from engine.predict.step_time import UPDATE_BYTES, predict_step
from engine.resolve.run import ResolvedRun
from engine.training.rank.process import leave
from engine.training.train_step import TrainStep

_SIDES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
_ROWS = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)}
_PRODUCT_ROWS = {"cpu": 512, "cuda": 8192}  # at least: with 1,024 a product of that side shows an H200's launches
_LAYER_ROWS = {"cpu": (128, 512, 2048), "cuda": (2048, 8192, 32768)}
_MESSAGES = {"cpu": (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": tuple(1 << b for b in (12, 16, 20, 24, 27))}
_HIDDEN = {"cpu": 256, "cuda": 4096}  # width of the measured layer
_LAYERS = (1, 5)  # of the tiny models whose steps measure the overhead of the host
_WIDE = {"cpu": 512, "cuda": 4096}  # width of the two updated layers, and of products that overlap a message
_SHARED = 1.5  # if a rank that sends alone is faster by this factor, its node has one link
_NO_LINK = (1e-6, 1e10)  # seconds, bytes per second: of a rank without a peer


def measure(cell: MachineCell, device: torch.device) -> dict[str, Any]:
    """Return the profile of this machine. Collective over all ranks."""
    torch.manual_seed(0)
    machine, series = measure_machine(cell, Stopwatch(device, cell.window_s))
    found = {**environment(device), "setup": vars(cell.setup), "shape": vars(cell.shape), "series": series}
    return profile_document(machine, found)


def measure_machine(cell: MachineCell, watch: Stopwatch) -> tuple[Machine, dict[str, Series]]:
    """Return (machine, measured series by name). Collective over all ranks."""
    device = watch.device
    products = _products(watch, cell)
    forward, backward, block_rows = _tiles(watch, cell)
    matmul = _rate("matmul_flops", products)
    layer = _layer(watch, cell, lambda side: matmul["matmul_flops_per_s"] * share_at(matmul["matmul_shares"], side))
    intra, inter = (_messages(watch, cell, kind) for kind in ("intra", "inter"))
    inter_alone = _messages(watch, cell, "inter", one_per_node=True)
    shared_nic = _affine(inter_alone)[1] > _SHARED * _affine(inter)[1]
    inter = inter_alone if shared_nic else inter
    on_gpu = device.type == "cuda"
    known = find_device(torch.cuda.get_device_name(device) if on_gpu else "cpu")
    machine = Machine(
        name="measured",
        **(matmul | _rate("forward_flops", forward) | _rate("backward_flops", backward)),
        kernel_block_rows=block_rows,
        tile_overhead_s=0.0,
        **_rate("elementwise_bytes", layer),
        update_bytes_per_s=_update(watch, cell),
        **(_link("intra", intra or inter) | _link("inter", inter or intra) | _link("host", _host_copies(watch))),
        shared_nic=shared_nic,
        message_compute_share=_message_share(watch, cell),
        is_cpu=not on_gpu,
        local_ranks=cell.setup.local_ranks,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        host_memory_bytes=find_hardware().host_bytes,
        bf16_peak=known.bf16_peak if known else None,
        fp32_peak=known.fp32_peak if known else None,
        source=f"burst bench machine, {cell.setup.ranks} ranks on {cell.setup.nodes} nodes",
    )
    series = {"product_flops_per_s": products, "forward_flops_per_s": forward, "backward_flops_per_s": backward}
    series |= {"elementwise_bytes_per_s": layer, "intra_message_s": intra, "inter_message_s": inter}
    return with_overheads(watch, cell, machine), series


def _products(watch: Stopwatch, cell: MachineCell) -> Series:
    """Return FLOP/s of a linear layer [side, side], forward and both gradients, by its side."""

    def prepare(side: int) -> Callable[[], object]:
        x, weight = _noise(watch.device, cell, max(side, least), side), _noise(watch.device, cell, side, side)
        dy = torch.randn_like(x)
        return lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), dy)

    sides, least = _SIDES[watch.device.type], _PRODUCT_ROWS[watch.device.type]
    return watch.by_size(sides, prepare, lambda side, seconds: 6 * max(side, least) * side * side / seconds)


def _tiles(watch: Stopwatch, cell: MachineCell) -> tuple[Series, Series, float]:
    """Return (forward, backward FLOP/s by rows of a square tile without a mask, rows of a kernel's block)."""
    shape, forward, backward = cell.shape, list[tuple[float, float]](), list[tuple[float, float]]()
    tiny = cell.run_config(layers=1)
    mesh = build_mesh(tiny.parallel, tiny.cluster)
    kernel = ContextParallel.of_run(resolve_here(tiny, mesh), mesh).group.kernel
    for rows in _ROWS[watch.device.type]:
        seconds = _tile_seconds(watch, kernel, cell, Band(0, rows, 0, rows))
        pairs, head_dim = rows * rows * shape.num_heads, shape.head_dim
        forward.append((float(rows), pair_flops("forward", head_dim, head_dim) * pairs / seconds[0]))
        backward.append((float(rows), pair_flops("backward", head_dim, head_dim) * pairs / seconds[1]))
        if watch.is_long(sum(seconds)):
            break
    # Half of the pairs of a causal tile, and half of a block along its edge.
    causal = sum(_tile_seconds(watch, kernel, cell, Band(0, rows, 0, rows, low=0))) / sum(seconds)
    return forward, backward, max(0.0, (2 * causal - 1) * rows)


def _tile_seconds(watch: Stopwatch, kernel: TileKernel, cell: MachineCell, band: Band) -> tuple[float, float]:
    """Return (forward, backward) seconds of a square tile."""
    heads = (cell.shape.num_heads, cell.shape.num_kv_heads, cell.shape.num_kv_heads)
    q, k, v = (_noise(watch.device, cell, band.num_queries, count, cell.shape.head_dim).detach() for count in heads)
    out, lse = kernel.forward(q, k, v, band)
    grads = TileGradients(torch.randn_like(out), out, lse)
    return (
        watch.seconds(lambda: kernel.forward(q, k, v, band)),
        watch.seconds(lambda: kernel.backward(grads, q, k, v, band)),
    )


class _NoAttention(torch.autograd.Function):
    """Attention replaced by its input q; every operand gets a gradient, so that no product is left out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return q."""
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dout as the gradient of all three operands."""
        return dout, dout, dout


def _layer(watch: Stopwatch, cell: MachineCell, rate: Callable[[float], float]) -> Series:
    """Return bytes per second of the elementwise operations of a layer, by the bytes of its input."""
    model = cell.model(_HIDDEN[watch.device.type], layers=1)
    dtype: torch.dtype = getattr(torch, cell.shape.dtype)
    block = TransformerBlock(model).to(device=watch.device, dtype=dtype)
    weights = list(block.parameters())

    def prepare(rows: int) -> Callable[[], object]:
        hidden = _noise(watch.device, cell, 1, rows, model.hidden_size)
        table = rope_table(torch.arange(rows, device=watch.device), model.head_dim, model.rope_theta)
        dout = torch.randn_like(hidden)
        return lambda: torch.autograd.grad(block(hidden, *table, _NoAttention.apply), (hidden, *weights), dout)

    def figure(rows: int, seconds: float) -> float:
        products_s = sum(6 * rows * w.numel() / rate(min(rows, *w.shape)) for w in weights if w.ndim == 2)
        moved = 3 * layer_numbers(model) * rows * dtype.itemsize
        # Because of noise the products alone may seem to take the whole time.
        return moved / max(seconds - products_s, products_s / 20)

    by_rows = watch.by_size(_LAYER_ROWS[watch.device.type], prepare, figure)
    return [(rows * model.hidden_size * dtype.itemsize, moved) for rows, moved in by_rows]


def _messages(watch: Stopwatch, cell: MachineCell, kind: str, *, one_per_node: bool = False) -> Series:
    """Return seconds of a message by its bytes; empty without such a link.

    All ranks send at the same time, or, with `one_per_node`, one rank of each node.
    """
    idles = one_per_node and dist.get_rank() % cell.setup.local_ranks > 0

    def prepare(size: int) -> Callable[[], object]:
        ring = _neighbours(cell.setup, kind, torch.zeros(size, dtype=torch.uint8, device=watch.device))
        return (lambda: None) if idles else ring

    if (cell.setup.local_ranks if kind == "intra" else cell.setup.nodes) == 1:
        return []
    return watch.by_size(_MESSAGES[watch.device.type], prepare)


def _neighbours(setup: RankSetup, kind: str, sent: Tensor) -> Callable[..., None]:
    """Return a call that exchanges messages with the next and the previous rank of the node, or of the next nodes."""
    local_ranks, rank, size = setup.local_ranks, dist.get_rank(), dist.get_world_size()
    place = rank - rank % local_ranks
    after, before = (
        place + (rank + way) % local_ranks if kind == "intra" else (rank + way * local_ranks) % size for way in (1, -1)
    )
    return exchange(sent, after, before)


def _message_share(watch: Stopwatch, cell: MachineCell) -> float:
    """Return the share of a message's seconds that concurrent products lose to its copies (cores or SMs)."""
    if cell.setup.local_ranks == 1:
        return 0.0
    ring = _neighbours(cell.setup, "intra", torch.zeros(1 << 21, dtype=torch.uint8, device=watch.device))
    side = _WIDE[watch.device.type]
    left, right = (_noise(watch.device, cell, side, side).detach() for _ in range(2))
    out = torch.empty_like(left)

    def compute(times: int = 1) -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    alone_s, message_s = watch.seconds(compute), watch.seconds(ring)
    hiding = partial(compute, max(1, round(2 * message_s / alone_s)))  # long enough to hide it
    both_s, computing_s = watch.seconds(lambda: ring(hiding)), watch.seconds(hiding)
    return min(1.0, max(0.0, (both_s - computing_s) / message_s))


def _affine(times: Series) -> tuple[float, float]:
    """Return (latency in seconds, bytes per second), fitted by least squares of relative errors."""
    if not times:
        return _NO_LINK
    sizes, seconds = np.array(times).T
    (latency_s, per_byte), *_ = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], 1), np.ones(len(times)))
    return max(float(latency_s), 0.0), 1 / max(float(per_byte), 1e-15)


def with_overheads(watch: Stopwatch, cell: MachineCell, machine: Machine) -> Machine:
    """Return `machine` with overheads per layer and per step: the seconds of a tiny model beyond its prediction."""
    few, many = (_beyond_prediction(watch, cell.run_config(layers), machine) for layers in _LAYERS)
    layer_s = max(0.0, (many - few) / (_LAYERS[1] - _LAYERS[0]))
    return replace(machine, layer_overhead_s=layer_s, step_overhead_s=max(0.0, few - _LAYERS[0] * layer_s))


def _beyond_prediction(watch: Stopwatch, config: RunConfig, machine: Machine) -> float:
    """Return the seconds of a real step minus the predicted ones."""
    step, resolved = _train_step(config)
    tokens = np.zeros((1, config.train.seq_len), dtype=np.int64)
    batch = Batch(tokens, tokens, (np.zeros(1, dtype=np.int64),))
    predicted = predict_step(resolved.config, resolved.method, resolved.world, machine)
    return watch.seconds(lambda: step(0, [batch])) - predicted.seconds


def _update(watch: Stopwatch, cell: MachineCell) -> float:
    """Return bytes per second of clipping and AdamW over this rank's shards."""
    config = cell.run_config(2, _WIDE[watch.device.type])
    step, _ = _train_step(config)
    weights = [weight for weight in step.model.parameters() if weight.requires_grad]
    gradients = [torch.zeros_like(weight) for weight in weights]

    def update() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        step.update()

    return UPDATE_BYTES * count_parameters(config.model).total / cell.setup.ranks / watch.seconds(update)


def _train_step(config: RunConfig) -> tuple[TrainStep, ResolvedRun]:
    mesh = build_mesh(config.parallel, config.cluster)
    resolved = resolve_here(config, mesh)
    return TrainStep(resolved.config, mesh, *build_model(resolved, mesh)), resolved


def _host_copies(watch: Stopwatch) -> Series:
    """Return seconds of a copy from pinned memory by its bytes; empty on a CPU."""

    def prepare(size: int) -> Callable[[], object]:
        source = torch.zeros(size, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
        target = torch.zeros(size, dtype=torch.uint8, device=watch.device)
        return lambda: target.copy_(source, non_blocking=True)

    return watch.by_size(_MESSAGES[watch.device.type], prepare)


def _rate(name: str, series: Series) -> dict[str, Any]:
    """Return fields of a Machine: the largest rate, and the share of it at each size."""
    largest = max(rate for _, rate in series)
    shares = tuple((size, rate / largest) for size, rate in series)
    return {f"{name}_per_s": largest, f"{name.partition('_')[0]}_shares": shares}


def _link(name: str, times: Series) -> dict[str, Any]:
    """Return fields of a Machine: latency and rate of a link."""
    return dict(zip((f"{name}_latency_s", f"{name}_bytes_per_s"), _affine(times), strict=True))


def _noise(device: torch.device, cell: MachineCell, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, cell.shape.dtype)).requires_grad_()


if __name__ == "__main__":
    leave(run_rank(MachineCell, sys.argv[1:], measure))
