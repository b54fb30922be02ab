"""Part steps: real training steps of a Llama-8B-shaped model on one device, and their peak against the prediction.

Two depths at one length give the time of a layer, and with it that of the whole model (`extrapolated`). Both run under
the memory policy that `memory=auto` chooses for the WHOLE model at that length on this device.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
import torch
import yaml

from benchmarks.gpu.plan import Measurement, Part, Row
from benchmarks.tensors import local_tensors
from burst_cli.plan.decisions import memory_words
from engine.attention.library import resolve_here
from engine.bench.measure import synchronize
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.schema import to_plain
from engine.config.settings import ModelConfig, OptimizerConfig, RunConfig, TrainConfig, config_from_dict, dump_config
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.device.live_tensors import LiveTensorTracker
from engine.distributed.mesh import build_mesh, choose_device, read_placement, start_process_group
from engine.model.llama import LlamaModel
from engine.parallel.parallelize import build_empty_model
from engine.planning.topology import Topology
from engine.predict.flops import attention_pairs, count_parameters, step_flops
from engine.predict.machine import machine_of
from engine.predict.memory import Hardware, Predict, capacity_of
from engine.predict.policy_cost import policy_cost
from engine.resolve.legality import check_run
from engine.resolve.run import resolve_run
from engine.runs.record import policy_name
from engine.training.metrics import peak_pinned_bytes
from engine.training.train_step import TrainStep
from engine.training.trainer import set_threads

LLAMA_8B = ModelConfig(
    name="llama8b",
    vocab_size=128256,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
)
TINY = ModelConfig(
    name="tiny",
    vocab_size=512,
    hidden_size=64,
    ffn_hidden_size=128,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
ASSUMED_FLOPS = 4e14
SETUP_S = 12.0  # process, weights, prediction
ALONE = Topology(1, 1)
PROFILED = 20
NOISE_NUMBERS = 2**22  # drawn once and repeated where weights lie on the host


@dataclass(frozen=True)
class StepSizes:
    """(layers, tokens) in the order in which they are measured; `model.num_layers` is what is extrapolated to.

    plain      after the points before them also without expandable segments
    profiled   with what took longest in one more step
    """

    points: tuple[tuple[int, int], ...]
    plain: tuple[tuple[int, int], ...] = ()
    profiled: tuple[tuple[int, int], ...] = ()
    model: ModelConfig = LLAMA_8B
    setup_s: float = SETUP_S
    predicted: tuple[int, ...] | None = None  # layers of the points whose peak is predicted; None: of all
    weight: float = 18.0


FULL = StepSizes(
    points=(
        (2, 131072),
        (4, 131072),
        (2, 262144),
        (4, 262144),
        (32, 131072),
        (2, 524288),
        (4, 524288),
        (1, 1048576),
        (2, 1048576),
        (4, 1048576),
        (32, 524288),
    ),
    plain=((4, 131072), (4, 262144)),
    profiled=((4, 131072),),
)
SMALL = StepSizes(((1, 256), (2, 256)), profiled=((1, 256),), model=TINY, setup_s=5.0, predicted=(2,))


@dataclass(frozen=True)
class Policy:
    """The memory policy of the whole model at one length: `config` has it; `fits`: `memory=auto` says that it fits."""

    config: RunConfig
    fits: bool
    reason: str


def plan(sizes: StepSizes, device: str) -> Part:
    """A measurement per point, each in a process of its own, whose memory policy is still to be chosen: `resolved`."""
    measurements = []
    for layers, seq_len in sizes.points:
        measurements.append(_measurement(sizes, layers, run_config(sizes.model, seq_len, device)))
        if (layers, seq_len) in sizes.plain:
            measurements.append(_without_segments(measurements[-1]))
    return Part("steps", "Training steps", sizes.weight, tuple(measurements))


def _without_segments(measurement: Measurement) -> Measurement:
    """The same with blocks of fixed size, as torch's allocator takes them by default."""
    about = {**measurement.settings["about"], "predicts": False}
    settings = {**measurement.settings, "expandable_segments": False, "profiled": False, "about": about}
    return replace(measurement, label=f"{measurement.label} without expandable segments", settings=settings)


def _measurement(sizes: StepSizes, layers: int, whole: RunConfig) -> Measurement:
    seq_len, model = whole.train.seq_len, replace(sizes.model, num_layers=layers)
    flops = step_flops(model, seq_len=seq_len, visible_pairs=layers * attention_pairs("causal", seq_len))
    step_s = flops.model / ASSUMED_FLOPS
    repeats = 2 if step_s < 5 else 1  # after the first steps, which pin memory, compile and make moments
    about: Row = {"whole_layers": sizes.model.num_layers, "predicts": layers in (sizes.predicted or (layers,))}
    settings: Row = {"config": dump_config(whole), "layers": layers, "repeats": repeats, "about": about}
    settings |= {"expandable_segments": True, "profiled": (layers, seq_len) in sizes.profiled}
    return Measurement(
        f"{layers} layers at {seq_len} tokens",
        "benchmarks.gpu.steps:measure",
        settings,
        expected_s=sizes.setup_s + (1 + repeats) * step_s + layers * 0.3,
        fresh=True,
    )


def resolved(measurement: Measurement, policy: Policy) -> Measurement:
    """The measurement under the policy of the whole model."""
    settings = measurement.settings
    about = settings["about"] | {"policy_fits_whole_model": policy.fits, "policy_reason": policy.reason}
    return replace(measurement, settings={**settings, "config": dump_config(policy.config), "about": about})


def run_config(model: ModelConfig, seq_len: int, device: str) -> RunConfig:
    """The configuration under memory=auto, before a policy is chosen."""
    config = RunConfig(
        model=model,
        optimizer=OptimizerConfig(schedule="constant"),
        train=TrainConfig(seq_len=seq_len, compute_dtype="bfloat16"),
        cluster=ClusterConfig(backend="gloo" if device == "cpu" else "nccl"),
    )
    config = replace(config, memory=replace(config.memory, activation_checkpoint="auto"))
    check_run(config)
    return config


def choose_policy(whole: RunConfig, device_name: str, predict: Predict, hardware: Hardware | None = None) -> Policy:
    """What `memory=auto` chooses for the whole model on this device, and where nothing fits, what it chooses with the
    optimizer on the host inside the backward pass, which frees all gradients at once and cannot clip; then with its
    moments in 8 bits as well, where torchao is there.

    Where nothing fits then either: the nearest; fewer layers run with it all the same. `hardware`: None asks this
    machine.
    """
    within = replace(
        whole,
        memory=replace(whole.memory, optimizer_in_backward=True, optimizer_store="host"),
        optimizer=replace(whole.optimizer, max_grad_norm=None),
    )
    configs = [whole, within]
    if importlib.util.find_spec("torchao") is not None:
        configs.append(replace(within, memory=replace(within.memory, moments_dtype="int8")))
    resolved = None
    for config in configs:
        try:
            capacity = capacity_of(config, 1, device=device_name, hardware=hardware)
            machine = machine_of(config, capacity.device_name)
            resolved = resolve_run(config, ALONE, machine, capacity, predict)
        except ConfigError as error:  # a device that nobody knows
            full = replace(whole, memory=replace(whole.memory, activation_checkpoint="full"))
            return Policy(full, fits=False, reason="; ".join(error.problems))
        if resolved.memory_fits:
            break
    assert resolved is not None
    reason = memory_words(resolved.decision("memory.activation_checkpoint"), resolved.capacity)
    return Policy(resolved.config, fits=bool(resolved.memory_fits), reason=reason)


def read_config(text: str) -> RunConfig:
    """The configuration of the whole model that a measurement's settings hold."""
    return config_from_dict(yaml.safe_load(text))


def config_of(measurement: Measurement) -> RunConfig:
    """What it runs: the configuration with its number of layers."""
    return _with_layers(read_config(measurement.settings["config"]), measurement.settings["layers"])


def _with_layers(whole: RunConfig, layers: int) -> RunConfig:
    return replace(whole, model=replace(whole.model, num_layers=layers))


def measure(
    device: torch.device,
    config: str,
    layers: int,
    repeats: int,
    expandable_segments: bool,
    profiled: bool,
    about: Row,
) -> list[Row]:
    """One row: seconds, FLOPs of this depth and of the whole model, measured peaks. `about`: what the plan knows.

    The whole model is tried only where it is to fit: what runs out of host memory may take the machine with it.
    """
    if layers == about["whole_layers"] and not about["policy_fits_whole_model"]:
        return [{"status": "skipped", "error": about["policy_reason"]}]
    if device.type == "cuda" and not expandable_segments:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    whole = read_config(config)
    settings = _with_layers(whole, layers)
    run = _Run(settings, device)
    warm_s = run.step()
    if settings.memory.optimizer_store == "host" and not settings.memory.optimizer_in_backward:
        run.step()  # whose forward pass waits for the first update, which makes the moments
    seconds = [run.step() for _ in range(repeats)]
    row: Row = {"layers": settings.model.num_layers, "seq_len": settings.train.seq_len, **about}
    row |= {"policy": describe_policy(settings), "memory": to_plain(settings.memory)}
    row |= {"warm_up_s": warm_s, "seconds": seconds, "step_s": median(seconds)}
    row |= {"losses": run.losses, "expandable_segments": expandable_segments}
    row |= run.flops(settings, "") | run.flops(whole, "whole_")
    row |= run.peaks() | {"measured_over_predicted": None, "prediction_error": None}
    if profiled:
        row["longest"] = run.profile()
    run.close()
    return [row | {"tokens_per_s": row["seq_len"] / row["step_s"]} | rates(row, row["step_s"])]


def describe_policy(config: RunConfig) -> str:
    """The memory policy in words."""
    return policy_name(config.memory) + (", inside backward" if config.memory.optimizer_in_backward else "")


def rates(row: Row, step_s: float, prefix: str = "") -> Row:
    """TFLOP/s in all three conventions (`engine.predict.flops`). That of full attention counts work
    that is not done, so it is no rate of the device and may exceed its peak.
    """
    return {
        "model_tflops": row[f"{prefix}model_flops"] / step_s / 1e12,
        "hardware_tflops": row[f"{prefix}hardware_flops"] / step_s / 1e12,
        "convention_full_attention": row[f"{prefix}model_full_attention_flops"] / step_s / 1e12,
    }


class _Run:
    """A model with its optimizer on this process alone, and one batch of random tokens."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        placement = read_placement({})
        start_process_group(choose_device(config.cluster, placement), placement)
        set_threads(config, device, placement)
        self._device = device
        mesh = build_mesh(config.parallel, config.cluster)
        model, self.attention = build_empty_model(resolve_here(config, mesh), mesh)
        fill_weights(model)
        self._train_step = TrainStep(config, mesh, model, self.attention)
        self._batch = _batch(config)
        self.losses: list[float] = []

    def step(self) -> float:
        """Seconds of one training step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        synchronize(self._device)
        start = time.perf_counter()
        result = self._train_step(len(self.losses), [self._batch])
        synchronize(self._device)
        self.losses.append(result.loss)
        return time.perf_counter() - start

    def peaks(self) -> Row:
        """Most bytes of the last step on a GPU; on a CPU of one more step, whose tensors are counted."""
        if self._device.type == "cuda":
            return {
                "peak_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
                "peak_host_bytes": peak_pinned_bytes(),
                "peak_source": "CUDA caching allocator, last step",
            }
        with LiveTensorTracker() as tracker:
            tracker.watch(local_tensors(self._train_step.model, self._train_step.optimizer))
            self._train_step(len(self.losses), [self._batch])
        return {
            "peak_bytes": tracker.peak_bytes,
            "peak_reserved_bytes": None,
            "peak_host_bytes": tracker.peak_host_bytes,
            "peak_source": "live tensors of one step that is not timed",
        }

    def profile(self) -> list[tuple[str, float]]:
        """(name, milliseconds) of what took longest in one more step, on the device if it is one of its own."""
        with torch.profiler.profile() as profiler:
            self.step()
        kind = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        longest = sorted(profiler.key_averages(), key=lambda event: -float(getattr(event, kind)))[:PROFILED]
        return [(event.key, getattr(event, kind) / 1e3) for event in longest]

    def flops(self, config: RunConfig, prefix: str) -> Row:
        """Of one step of `config`, whose layers attend as those of this run."""
        flops = policy_cost(config, self.attention.method).flops
        return {f"{prefix}{name}_flops": value for name, value in asdict(flops).items()} | {
            f"{prefix}parameters": count_parameters(config.model).total
        }

    def close(self) -> None:
        """Frees the model."""
        del self._train_step, self.attention
        gc.collect()


def _batch(config: RunConfig) -> Batch:
    """One sequence of random tokens."""
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, config.train.seq_len))
    labels = np.concatenate([tokens[:, 1:], [[IGNORE_INDEX]]], axis=1)
    return Batch(tokens, labels, (np.zeros(1, dtype=np.int64),))


@torch.no_grad()
def fill_weights(model: LlamaModel) -> None:
    """Random weights with the model's standard deviation, drawn where they lie: a run's own, equal on all machines, are
    drawn on the CPU and would take a minute of a GPU's time.

    On the host one block of numbers is repeated.
    """
    model.tie_weights()
    std = model.config.init_std
    noise = torch.randn(NOISE_NUMBERS) * std
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if "norm" in name or name.endswith(".bias"):
            local.fill_(0.0 if name.endswith(".bias") else 1.0)
        elif local.device.type == "cuda":
            local.normal_(0.0, std)
        else:
            for part in local.view(-1).split(NOISE_NUMBERS):
                part.copy_(noise[: part.numel()])


def extrapolated(rows: Sequence[Row]) -> list[Row]:
    """For every length with two depths: the whole model's step by the slope between the least and the deepest."""
    found = []
    for seq_len in sorted({row["seq_len"] for row in rows if row.get("status") == "measured"}):
        same = [r for r in rows if r.get("status") == "measured" and r["seq_len"] == seq_len]
        same = [r for r in same if r["layers"] < r["whole_layers"] and r.get("expandable_segments", True)]
        ends = sorted(same, key=lambda row: row["layers"])[:: max(1, len(same) - 1)]
        if len(ends) == 2 and ends[0]["policy"] == ends[1]["policy"]:
            found.append(_extrapolate(*ends))
    return found


def _extrapolate(few: Row, many: Row) -> Row:
    layer_s = (many["step_s"] - few["step_s"]) / (many["layers"] - few["layers"])
    whole = few["whole_layers"]
    step_s = few["step_s"] + (whole - few["layers"]) * layer_s
    # Noise of short steps can turn the slope around; then there is no figure.
    usable = layer_s > 0
    row: Row = {
        "label": f"{whole} layers by slope at {few['seq_len']} tokens",
        "status": "measured" if usable else "failed",
        "error": None if usable else "the deeper model was no slower: no slope",
        "from": f"slope between {few['layers']} and {many['layers']} layers",
        "layers": whole,
        "seq_len": few["seq_len"],
        "policy": few["policy"],
        "policy_fits_whole_model": few["policy_fits_whole_model"],
        "layer_s": layer_s,
    }
    if not usable:
        return row
    row |= {"step_s": step_s, "tokens_per_s": few["seq_len"] / step_s}
    return row | rates(few, step_s, "whole_")
