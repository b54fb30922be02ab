"""Predicts the peak memory of a training step by running the real step as one rank on tensors without values.

Model, sharding, layers, attention, loss and optimizer are those of a run, under FakeTensorMode and a fake process
group, as one rank of the world. A LiveTensorTracker counts live bytes. Some parts are shortened without a change of the
peak: attention plans (`engine.training.fake_run.stand_ins`), loops over rows (`engine.device.row_blocks`), the
initial weights, which are not drawn, and the first step, of which only the state after it is created.

Not seen: what a kernel allocates inside one operation (`StandInFlashKernel` replaces CUDA attention), the allocator's
fragmentation, CUDA's and NCCL's own memory (`reserve_bytes`), anything that `train.compile` saves, and on CUDA with
memory.optimizer_store=host the fp32 shards of one FSDP unit on their way to or from the host.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.activations.store import COPIES_IN_FLIGHT
from engine.attention.context import AttentionGroup
from engine.attention.library import ContextParallel
from engine.attention.runtime import run_attention
from engine.attention.transport import SilentTransport
from engine.checkpoint.state import training_tensors
from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass
from engine.config.settings import RunConfig, config_from_dict
from engine.data.sampler import Batch
from engine.device.live_tensors import LiveTensorTracker, Peak
from engine.device.row_blocks import FakeRun, use_fake_run
from engine.distributed.mesh import open_mesh
from engine.kernels.attention import select_kernel
from engine.optim.adamw import build_optimizer
from engine.parallel.parallelize import build_decoder, parallelize
from engine.planning.checkpoint_policy import checkpoint_kinds
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Degrees, Topology
from engine.predict.memory import IDLE_S, DeviceKind, MemoryPrediction
from engine.predict.memory_ranks import reserve_bytes, worst_ranks
from engine.predict.policy_cost import layers_on_host
from engine.pretrained.decoder_shape import repeating_layers, with_num_layers
from engine.training.fake_run.components import FrameClassifier, StepObserver, by_component
from engine.training.fake_run.stand_ins import StandInFlashKernel, StandInGroupedProducts, sampled_runtime
from engine.training.train_step import RankBatch, TrainStep

PHASES = ("forward", "loss", "backward", "optimizer")


def predict_memory(
    config: RunConfig, method: AttentionMethod, world: Topology, *, whole: bool = False
) -> MemoryPrediction:
    """Predict the memory of the ranks of `world`, on CPUs with cluster.backend=gloo, else CUDA. Not collective.

    whole   runs all layers, where a few layers say the same (`shortened`)

    Makes a default process group of its own for a while, so none may exist: call it in a process that is no rank.
    Raises RuntimeError if one does, ConfigError where the configuration cannot run on so many ranks.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "predict_memory: this process belongs to a process group already; predict before ranks start, or in a "
            "process of its own"
        )
    started = time.perf_counter()
    scene = _Scene(config, method, world)
    found = [scene.predict(rank, whole=whole) for rank in worst_ranks(scene.config, scene.method)]
    largest = max(found, key=lambda prediction: prediction.device_peak_bytes)
    host = max(found, key=lambda prediction: prediction.host_peak_bytes)
    return replace(
        largest,
        host_peak_bytes=host.host_peak_bytes,
        components={**largest.components, "host": host.components["host"]},
        seconds=time.perf_counter() - started,
    )


class _Scene:
    """A configuration and its attention on fake ranks."""

    def __init__(self, config: RunConfig, method: AttentionMethod, topology: Topology) -> None:
        # Without a limit: what does not fit is to be predicted, too.
        memory, train = replace(config.memory, host_bytes=None), replace(config.train, compile=False)
        self._topology = topology
        self._kind: DeviceKind = "cpu" if config.cluster.backend == "gloo" else "cuda"
        parallel = config.parallel
        self._degrees = Degrees(parallel.dp_replicate_size, parallel.dp_shard_size, method.cp_size, parallel.tp_size)
        self._cp_topology = self._degrees.cp_topology(topology)
        self.config, self.method = replace(config, memory=memory, train=train), method

    def predict(self, rank: int, *, whole: bool) -> MemoryPrediction:
        """Predict one rank."""
        depths = [(self.config, 1)] if whole else shortened(self.config, self.method)
        steps = [(self._step(rank, config), times) for config, times in depths]
        device = _total([(step.device.phase_peaks, times) for step, times in steps])
        host = _total([(step.host.phase_peaks, times) for step, times in steps])
        peak, host_peak = (max(peaks, key=lambda peak: peak.total_bytes) for peaks in (device, host))
        reserve = 0
        if self._kind == "cuda":
            reserve = reserve_bytes(self.config.parallel, self.method, self._topology.size, peak.total_bytes)
        return MemoryPrediction(
            device=self._kind,
            world_size=self._topology.size,
            rank=rank,
            device_peak_bytes=peak.total_bytes,
            host_peak_bytes=host_peak.total_bytes,
            phase=peak.phase,
            components={"device": by_component(peak.components), "host": by_component(host_peak.components)},
            phase_peaks={phase: max(peak.total_bytes for peak in device if peak.phase == phase) for phase in PHASES},
            reserve_bytes=reserve,
            seconds=0.0,
        )

    def _step(self, rank: int, config: RunConfig) -> LiveTensorTracker:
        """Run a step that is not the first: optimizer states and attention's reusable buffers exist."""
        with fake_ranks(rank, self._topology.size):
            mesh = open_mesh(rank, self._degrees, torch.device("cpu"), self._topology)
            attention, on_gpu = self._attention(mesh.cp_rank), self._kind == "cuda"
            model = build_decoder(config)
            with use_fake_run(FakeRun(on_gpu)):  # a store in host memory is a GPU's
                parallelize(model, config, mesh, attention)  # FSDP makes meshes, which hold real tensors
            _fill_library_caches(config)
            offloads = on_gpu and config.memory.optimizer_store == "host"
            classifier = FrameClassifier(("parameters", "gradients", "optimizer") if offloads else ())
            tracker = LiveTensorTracker(classifier)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, use_fake_run(FakeRun(on_gpu)):
                model.to_empty(device=mesh.device)
                model.fill_buffers(mesh.device)
                step = TrainStep(config, mesh, model, attention)
                batches = [_batch(mode, config, step.prepare) for _ in range(config.train.grad_accum_steps)]
                with tracker:
                    observer = StepObserver(tracker, classifier, layers_on_host(config, self.method))
                    observer.attach(model, list(model.layers), model.head)
                    training_tensors(model, step.optimizer)
                    for _ in range(2):  # the first run of a plan learns how much memory it takes
                        self._make_buffers(attention, batches[0].rows.positions.shape[0])
                    tracker.enter("forward")
                    tracker.reset_peak()
                    with StandInGroupedProducts():  # type: ignore[no-untyped-call]
                        step.accumulate(batches, label_tokens=1)
                    tracker.enter("optimizer")
                    step.update()
        return tracker

    def _make_buffers(self, attention: ContextParallel, rows: int) -> None:
        """Run every layer's plans once, to allocate attention's reusable buffers."""
        config, tp_size = self.config, self._degrees.tp_size
        model, dtype = config.model, getattr(torch, config.train.compute_dtype)
        heads = (model.num_heads // tp_size, *[model.num_kv_heads // tp_size] * 2)
        context = attention.run_context()
        attending = [runtime for runtime, layer in zip(context.runtimes, context.layers, strict=True) if layer.attends]
        for runtime in {id(runtime): runtime for runtime in attending}.values():
            batch = (config.train.micro_batch_size, rows)
            widths = (model.head_dim, model.head_dim, model.v_head_dim or model.head_dim)
            q, k, v = (
                torch.empty(*batch, n, width, dtype=dtype, requires_grad=True)
                for n, width in zip(heads, widths, strict=True)
            )
            out = run_attention(q, k, v, runtime)
            torch.autograd.backward([out], [torch.empty_like(out)])

    def _attention(self, cp_rank: int) -> ContextParallel:
        config = self.config
        kernel: Any = StandInFlashKernel()
        if self._kind == "cpu":
            dtype = getattr(torch, config.train.compute_dtype)
            model = config.model
            kernel = select_kernel(
                config.attention.kernel,
                torch.device("cpu"),
                dtype,
                model.head_dim,
                v_dim=model.v_head_dim or model.head_dim,
            ).kernel
        group = AttentionGroup(cp_rank, self._cp_topology, SilentTransport(), kernel)
        return ContextParallel.of_group(config, group, self.method).with_runtimes(sampled_runtime)


def shortened(config: RunConfig, method: AttentionMethod) -> list[tuple[RunConfig, int]]:
    """Return runs of few layers with factors, whose weighted sum is the memory of all layers, per position.

    Layers beyond the first and the last of a kind add the same bytes each, or each turn of policies and masks does.
    Those that keep on the host are one stretch of layers, those that keep on the device another.
    """
    on_host = layers_on_host(config, method)
    stretches = (on_host, config.model.num_layers - on_host)
    prefix, period = repeating_layers(config.model)
    layer_pattern = math.lcm(len(attention_layers(config, method)), period)
    if set(checkpoint_kinds(config.memory)) == {"attn_out_every"}:
        layer_pattern = math.lcm(layer_pattern, config.memory.every_layers)
    # The first and the last may need more than those in between, of which one turn of each stretch is run at least.
    least = layer_pattern + (1 if all(stretches) else 2)
    before = -(-prefix // layer_pattern) * layer_pattern
    leasts = (least + COPIES_IN_FLIGHT + before, least + (0 if on_host else before))
    short = [
        few + (count - few) % layer_pattern if count > few else count
        for few, count in zip(leasts, stretches, strict=True)
    ]
    times = [(count - few) // layer_pattern for few, count in zip(short, stretches, strict=True)]
    longer = ((short[0] + layer_pattern, short[1]), (short[0], short[1] + layer_pattern))
    runs = [(_with_layers(config, *layers), count) for layers, count in zip(longer, times, strict=True) if count]
    runs.append((_with_layers(config, *short), 1 - sum(times)))
    saves = sum(shorter.model.num_layers for shorter, _ in runs) < config.model.num_layers
    return runs if saves else [(config, 1)]


def _with_layers(config: RunConfig, on_host: int, on_device: int) -> RunConfig:
    memory = config.memory if 0 in (on_host, on_device) else replace(config.memory, host_layers=on_host)
    return replace(config, model=with_num_layers(config.model, on_host + on_device), memory=memory)


def _total(parts: Sequence[tuple[Mapping[str, Peak], int]]) -> list[Peak]:
    """Return the weighted sum of the parts' peaks for every position; `phase` without the position."""
    found = []
    for place in parts[0][0]:
        components: Counter[str] = Counter()
        for peaks, times in parts:
            components.update({name: times * size for name, size in peaks[place].components.items()})
        total = sum(times * peaks[place].total_bytes for peaks, times in parts)
        found.append(Peak(total, place.partition("/")[0], components))
    return found


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Make this process `rank` of a fake process group inside the body."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fill_library_caches(config: RunConfig) -> None:
    """Make torchao compute its cached tables, which it cannot do on tensors without values."""
    layer = nn.Linear(64, 64)
    layer.weight.grad = torch.zeros_like(layer.weight)
    build_optimizer(layer, config.optimizer, config.memory.moments_dtype).step()


def _batch(mode: FakeTensorMode, config: RunConfig, prepare: Callable[[Batch], RankBatch]) -> RankBatch:
    """Build a batch of one micro-step without values: every position has a label, in a single document."""
    size, start = config.train.micro_batch_size, np.zeros(1, dtype=np.int64)
    tokens = np.zeros((size, config.train.seq_len), dtype=np.int64)
    batch = prepare(Batch(tokens, tokens, (start,) * size, tuple(range(size))))
    rows = batch.rows
    return replace(batch, rows=type(rows)(*map(mode.from_tensor, (rows.tokens, rows.labels, rows.positions))))


def main() -> None:
    """Answer requests of `engine.predict.memory`, one line of JSON each, until none arrives for IDLE_S."""
    # Libraries may print; stdout is for the answers alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answers:
        while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
            request = json.loads(line)
            try:
                config, world = config_from_dict(request["config"]), Topology(**request["world"])
                method, _ = read_dataclass(AttentionMethod, request["method"])
                answer = asdict(predict_memory(config, method, world))
            except ConfigError as error:
                answer = {"problems": list(error.problems)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
