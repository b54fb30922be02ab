"""Peak memory of a training step on ranks that need not exist: the real step, run on tensors without values.

Model, sharding, layers, attention, loss and optimizer are those of a run, under FakeTensorMode and a process group
whose messages go nowhere, as one rank of the world. A LiveTensorTracker counts what is alive. What is shortened does
not change the peak: attention plans (`engine.memory.rehearsal`), walks over rows (`engine.row_blocks`), the initial
weights, which are not drawn, and the first step, of which only what it leaves is made.

Not seen: what a kernel allocates inside one operation (`StandInFlashKernel` stands for CUDA attention), the allocator's
fragmentation, CUDA's and NCCL's own memory (`reserve_bytes`), anything that `train.compile` saves, and on CUDA with
memory.optimizer_store=host the fp32 shards of one FSDP unit on their way to or from the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.attention.api import ParallelAttention
from engine.attention.context import AttentionGroup
from engine.attention.kernels import choose_kernel
from engine.attention.runtime import run_attention
from engine.attention.transport import SilentTransport
from engine.config.settings import RunConfig
from engine.data.sampler import Batch
from engine.memory.components import FrameClassifier, StepObserver, by_component
from engine.memory.rehearsal import StandInFlashKernel, rehearsed_runtime
from engine.memory.reserve import reserve_bytes
from engine.memory.tracker import LiveTensorTracker
from engine.memory.worst_rank import worst_ranks
from engine.model.llama import LlamaModel
from engine.model.parallelize import parallelize
from engine.parallel.mesh import Mesh, parameter_meshes
from engine.planning.methods.auto import machine_of, settle_auto
from engine.planning.methods.degrees import Degrees, resolve_degrees
from engine.planning.methods.presets import AttentionMethod, resolve_attention
from engine.planning.methods.topology import Topology
from engine.row_blocks import Rehearsal, rehearse
from engine.training.optim import build_optimizer
from engine.training.train_step import RankBatch, TrainStep, rank_batch

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class MemoryPrediction:
    """Peak memory of the rank that needs most, in bytes; on a CPU `device` is what tensors take outside of stores.

    rank             that rank; `host` figures are of one rank too: those of a node are local ranks times as much
    phase            in which the device peak comes: forward, loss, backward or optimizer
    components       {"device": {name: bytes}, "host": {...}} at the two peaks (see `engine.memory.components`)
    phase_peaks      device bytes of every phase
    reserve_bytes    on CUDA, besides: context, communicators, fragmentation
    seconds          that the prediction took
    """

    device: DeviceKind
    world_size: int
    rank: int
    device_peak_bytes: int
    host_peak_bytes: int
    phase: str
    components: Mapping[str, Mapping[str, int]]
    phase_peaks: Mapping[str, int]
    reserve_bytes: int
    seconds: float

    @property
    def needed_bytes(self) -> int:
        """Device memory that a GPU must have free."""
        return self.device_peak_bytes + self.reserve_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "needed_bytes": self.needed_bytes}


def predict_memory(
    config: RunConfig, topology: Topology, world_size: int, *, device: DeviceKind | None = None
) -> MemoryPrediction:
    """The prediction for `world_size` ranks that lie as `topology` says; needs no GPU, sends nothing.

    device   what the ranks compute on; None: the CPU under cluster.backend=gloo, else CUDA

    Makes a default process group of its own for a while, so none may exist: call it in a process that is no rank.
    Raises RuntimeError if one does, ConfigError where the configuration cannot run on so many ranks.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "predict_memory: this process belongs to a process group already; predict before ranks start, or in a "
            "process of its own"
        )
    if topology.size != world_size:
        raise ValueError(f"predict_memory: topology {topology} has {topology.size} ranks, world_size is {world_size}")
    started = time.perf_counter()
    kind = device or ("cpu" if config.cluster.backend == "gloo" else "cuda")
    # Without a limit: what does not fit is to be predicted, too.
    config = replace(config, train=replace(config.train, compile=False), memory=replace(config.memory, host_bytes=None))
    scene = _Scene(config, topology, kind)
    found = [scene.predict(rank) for rank in scene.candidates()]
    largest = max(found, key=lambda prediction: prediction.device_peak_bytes)
    host = max(found, key=lambda prediction: prediction.host_peak_bytes)
    return replace(
        largest,
        host_peak_bytes=host.host_peak_bytes,
        components={**largest.components, "host": host.components["host"]},
        seconds=time.perf_counter() - started,
    )


class _Scene:
    """A configuration on ranks that are imagined."""

    def __init__(self, config: RunConfig, topology: Topology, kind: DeviceKind) -> None:
        self._topology = topology
        self._kind = kind
        self._degrees = resolve_degrees(config.parallel, topology.size)
        cp_topology = self._degrees.cp_topology(topology)
        choice = settle_auto(config, cp_topology, machine_of(config, "cpu" if kind == "cpu" else None))
        self._config: RunConfig = choice.config
        self._method: AttentionMethod = resolve_attention(choice.config, cp_topology)
        self._cp_topology = cp_topology

    def candidates(self) -> list[int]:
        """Ranks of which one needs most."""
        return worst_ranks(self._config, self._method)

    def predict(self, rank: int) -> MemoryPrediction:
        """The prediction of one rank."""
        started = time.perf_counter()
        with fake_ranks(rank, self._topology.size):
            tracker = self._run(imagined_mesh(rank, self._degrees, self._topology))
        return MemoryPrediction(
            device=self._kind,
            world_size=self._topology.size,
            rank=rank,
            device_peak_bytes=tracker.peak_bytes,
            host_peak_bytes=tracker.peak_host_bytes,
            phase=tracker.peak.phase,
            components={
                "device": by_component(tracker.peak.components),
                "host": by_component(tracker.host_peak.components),
            },
            phase_peaks={name: peak.total_bytes for name, peak in tracker.phase_peaks.items()},
            reserve_bytes=self._reserve(tracker.peak_bytes),
            seconds=time.perf_counter() - started,
        )

    def _run(self, mesh: Mesh) -> LiveTensorTracker:
        """One step, of a run that has made its first: optimizer state and attention's reusable buffers exist."""
        config = self._config
        attention = self._attention(mesh.cp_rank)
        with torch.device("meta"):
            model = LlamaModel(config.model, config.loss)
        parallelize(model, config, mesh, attention)  # FSDP makes meshes, which hold real tensors
        _fill_library_caches(config)
        offloaded = self._kind == "cuda" and config.memory.optimizer_store == "host"
        classifier = FrameClassifier(("parameters", "gradients", "optimizer") if offloaded else ())
        tracker = LiveTensorTracker(classifier)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, rehearse(Rehearsal(self._kind == "cuda")):
            model.to_empty(device=mesh.device)
            step = TrainStep(config, mesh, model, attention)
            batches = [
                _as_fake(mode, rank_batch(_batch(config), model, attention, mesh))
                for _ in range(config.train.grad_accum_steps)
            ]
            with tracker:
                StepObserver(tracker, classifier).attach(model, model.layers, model.head)
                _make_optimizer_state(step)
                for _ in range(2):  # the first run of a plan learns how much memory it takes, the next has it in one
                    self._make_buffers(attention, batches[0].rows.positions.shape[0])
                tracker.reset_peak()
                step.accumulate(batches, label_tokens=1)
                tracker.enter("optimizer")
                step.update()
        return tracker

    def _make_buffers(self, attention: ParallelAttention, rows: int) -> None:
        """Runs every layer's plans once."""
        config, tp_size = self._config, self._degrees.tp_size
        model, dtype = config.model, getattr(torch, config.train.compute_dtype)
        heads = (model.num_heads // tp_size, *[model.num_kv_heads // tp_size] * 2)
        for runtime in {id(runtime): runtime for runtime in attention.context().runtimes}.values():
            batch = (config.train.micro_batch_size, rows)
            q, k, v = (torch.empty(*batch, n, model.head_dim, dtype=dtype, requires_grad=True) for n in heads)
            out = run_attention(q, k, v, runtime)
            torch.autograd.backward([out], [torch.empty_like(out)])

    def _attention(self, cp_rank: int) -> ParallelAttention:
        group = AttentionGroup(cp_rank, self._cp_topology, SilentTransport(), self._kernel())
        return ParallelAttention(self._config, group, self._method).with_runtimes(rehearsed_runtime)

    def _kernel(self) -> Any:
        if self._kind == "cuda":
            return StandInFlashKernel()
        dtype = getattr(torch, self._config.train.compute_dtype)
        return choose_kernel(self._config.attention.kernel, torch.device("cpu"), dtype, self._config.model.head_dim)

    def _reserve(self, peak_bytes: int) -> int:
        if self._kind == "cpu":
            return 0
        return reserve_bytes(self._config.parallel, self._method, self._topology.size, peak_bytes)


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Inside the body this process is `rank` of a world whose messages go nowhere; nothing of it remains after."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def imagined_mesh(rank: int, degrees: Degrees, topology: Topology) -> Mesh:
    """The mesh of a rank of `fake_ranks`; its device is the CPU. Not under FakeTensorMode: meshes hold real tensors."""
    sizes = (degrees.dp_replicate_size, degrees.dp_shard_size, degrees.cp_size, degrees.tp_size)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    device = torch.device("cpu")
    fsdp_mesh, tp_mesh = parameter_meshes(degrees, device)
    return Mesh(rank, degrees, device, topology, device_mesh, fsdp_mesh, tp_mesh)


def _fill_library_caches(config: RunConfig) -> None:
    """torchao computes tables at first use and keeps them, which fails on tensors without values."""
    layer = nn.Linear(64, 64)
    layer.weight.grad = torch.zeros_like(layer.weight)
    build_optimizer(layer, config.optimizer, config.memory.moments_dtype).step()


def _make_optimizer_state(step: TrainStep) -> None:
    """An update without a backward pass."""
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step.optimizer.step()
    step.optimizer.zero_grad(set_to_none=True)


def _batch(config: RunConfig) -> Batch:
    """A batch of one micro-step, all zeros: every position has a label, and no document ends."""
    tokens = np.zeros((config.train.micro_batch_size, config.train.seq_len), dtype=np.int64)
    start = np.zeros(1, dtype=np.int64)
    rows = config.train.micro_batch_size
    return Batch(tokens, tokens, (start,) * rows, tuple(range(rows)))


def _as_fake(mode: FakeTensorMode, batch: RankBatch) -> RankBatch:
    """The batch with tensors without values."""
    rows = batch.rows
    tensors = (mode.from_tensor(x) for x in (rows.tokens, rows.labels, rows.positions))
    return replace(batch, rows=type(rows)(*tensors))
