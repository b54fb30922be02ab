"""Predicted peaks are those that a tracker measures on a real run; a prediction leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from testkit import ROOT
from testkit.hub_models import hub_config
from testkit.ranks import Pools
from testkit.resolved import method_of
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config

from benchmarks.gpu import steps
from engine.config.model_parts import LoraConfig
from engine.config.settings import AttentionConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.planning.topology import Topology
from engine.predict.flops import count_parameters
from engine.predict.memory import MemoryPrediction
from engine.resolve.degrees import sequence_topology
from engine.training.fake_run.memory import fake_ranks, predict_memory, shortened

RESULTS = ROOT / "benchmarks" / "results"
TOLERANCE = 0.05  # target of the project; where nothing but row padding differs, the figures are equal
MODEL = ModelConfig(
    name="test",
    vocab_size=512,
    hidden_size=64,
    ffn_hidden_size=192,
    num_layers=4,  # what many layers take follows from few of them: see DEEP
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


def small_config(seq_len: int = 512, preset: str | None = None, *, policy: str = "", **changes: Any) -> RunConfig:
    """A model whose activations outweigh its weights."""
    train = {"seq_len": seq_len, **changes.pop("train", {})}
    for section, name, value in (("attention", "preset", preset), ("memory", "activation_checkpoint", policy)):
        changes[section] = {**({name: value} if value else {}), **changes.get(section, {})}
    return tiny_config(model=MODEL, loss={"chunk_tokens": 64}, train=train, **changes)


def layered(config: RunConfig, num_layers: int) -> RunConfig:
    return replace(config, model=replace(config.model, num_layers=num_layers))


BF16 = {"compute_dtype": "bfloat16"}
HOST: dict[str, Any] = {"activation_store": "host"}
# A row per way to train; every one is measured. "4 ranks": on so many, else on one.
CASES: dict[str, RunConfig] = {
    "none": small_config(policy="none"),
    "bfloat16, tiles": small_config(policy="full", memory={"tile_tokens": 64}, train=BF16),
    "two micro-steps of two sequences": small_config(train={"grad_accum_steps": 2, "micro_batch_size": 2}),
    "4 ranks, two micro-steps": small_config(1024, "burst", train={"grad_accum_steps": 2}),
    "host store of two layers": small_config(policy="attn_out", memory={**HOST, "host_layers": 2}),
    "4 ranks, ring": small_config(1024, "ring", policy="full"),
    "4 ranks, two of them slicing matrices": small_config(1024, "ring", parallel={"tp_size": 2}),
    "attn_out_every": small_config(768, policy="attn_out_every", memory={"every_layers": 2}),
    "updates in backward": small_config(memory={"optimizer_in_backward": True}, optimizer={"max_grad_norm": None}),
    "4 ranks, half of the sequence, burst": small_config(1024, "burst", policy="seq_fraction"),
    "4 ranks, half of the sequence, contiguous": small_config(
        1024, "ring", policy="seq_fraction", attention={"layout": "contiguous"}, memory={"saved_fraction": 0.25}
    ),
    "4 ranks, heads": small_config(
        1024, "usp", policy="attn_out_every", attention={"head_parallel_size": 2}, memory={**HOST, "every_layers": 4}
    ),
    "4 ranks, window and two sequences": small_config(
        1024,
        "ring",
        policy="attn_out",
        attention={"mask": "window", "window_tokens": 100},
        parallel={"dp_shard_size": 2},
    ),
    "4 ranks, chunks in host memory": small_config(
        1024, "fpdt", policy="attn_out", attention={"chunk_tokens": 128, "head_parallel_size": 2}
    ),
}


def measured_peaks(config: RunConfig) -> tuple[int, int]:
    """(device, host) peak of this rank over its second step."""
    run, train = start_run(config), config.train
    sequences = run.mesh.dp_size * train.micro_batch_size * train.grad_accum_steps
    batch = random_batches(0, sequences=sequences, seq_len=train.seq_len, vocab_size=config.model.vocab_size)
    batches = own_part(batch, run.mesh, micro_steps=train.grad_accum_steps)
    run.train_step(0, batches)
    with LiveTensorTracker() as tracker:
        tracker.watch(run.model.parameters())
        tracker.watch(x for state in run.train_step.optimizer.state.values() for x in state.values())
        run.train_step(1, batches)
    return tracker.peak_bytes, tracker.peak_host_bytes


def predicted(config: RunConfig, world_size: int = 1, *, whole: bool = False) -> MemoryPrediction:
    """But for its seconds."""
    world = Topology(1, world_size)
    method = method_of(config, sequence_topology(config, world))
    return replace(predict_memory(config, method, world, whole=whole), seconds=0.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough_for(
    "two micro-steps of two sequences",
    "4 ranks, two micro-steps",
    "4 ranks, heads",
    "4 ranks, ring",
    "4 ranks, half of the sequence, contiguous",
    "4 ranks, half of the sequence, burst",
    "4 ranks, window and two sequences",
    "4 ranks, two of them slicing matrices",
    "bfloat16, tiles",
)
def test_the_peak_is_that_of_a_measured_run(name: str, ranks: Pools) -> None:
    world_size = 4 if name.startswith("4 ranks") else 1
    found = ranks(world_size).run(measured_peaks, CASES[name])
    prediction = predicted(CASES[name], world_size)
    assert prediction.device_peak_bytes == pytest.approx(max(device for device, _ in found), rel=TOLERANCE)
    assert prediction.host_peak_bytes == pytest.approx(max(host for _, host in found), rel=TOLERANCE)


def test_the_peak_of_adapters_is_that_of_a_measured_run(ranks: Pools) -> None:
    config = hub_config("qwen3", memory={"activation_checkpoint": "full"})
    config = replace(config, model=replace(config.model, lora=LoraConfig(rank=4)))
    ((device, _),) = ranks(1).run(measured_peaks, config)
    assert predicted(config).device_peak_bytes == pytest.approx(device, rel=TOLERANCE)


@pytest.mark.thorough
def test_a_second_micro_step_adds_the_gradients_of_one_ranks_shard(ranks: Pools) -> None:
    """What rank 0 measures: 4 bytes for each of its own parameters, not for those that three others hold."""
    two = CASES["4 ranks, two micro-steps"]
    one = replace(two, train=replace(two.train, grad_accum_steps=1))
    found = [ranks(4).run(measured_peaks, config)[0][0] for config in (one, two)]
    assert 0 < found[1] - found[0] <= 4 * count_parameters(MODEL).total / 4


# (ranks, layers, configuration, layers of each run instead and how often it counts): stretches and turns of layers.
WINDOWS: dict[str, Any] = {"mask_layers": ("window", "causal"), "window_tokens": 64}
DEEP: dict[str, tuple[int, int, RunConfig, list[tuple[int, int]]]] = {
    "policies in turn": (1, 13, small_config(256, memory={"checkpoint_layers": ("full", "none")}), [(7, 4), (5, -3)]),
    "masks in turn": (1, 13, small_config(256, attention=WINDOWS), [(7, 4), (5, -3)]),
    "groups": (1, 14, small_config(256, policy="attn_out_every", memory={"every_layers": 3}), [(8, 3), (5, -2)]),
    "both stores": (1, 15, small_config(256, memory={**HOST, "host_layers": 4}), [(7, 9), (6, -8)]),
    "weights outweigh activations": (4, 9, small_config(16, "burst", train={"grad_accum_steps": 2}), [(4, 6), (3, -5)]),
    "whole weights stay": (4, 9, small_config(64, "ring"), [(4, 6), (3, -5)]),
}


@pytest.mark.parametrize(
    ("world_size", "num_layers", "config", "expected"),
    [*DEEP.values(), (1, 1000, small_config(), [(4, 997), (3, -996)])],
    ids=[*DEEP, "a thousand layers"],
)
def test_of_many_layers_few_are_run(
    world_size: int, num_layers: int, config: RunConfig, expected: list[tuple[int, int]]
) -> None:
    config = layered(config, num_layers)
    runs = shortened(config, method_of(config, Topology(1, world_size)))
    assert [(run.model.num_layers, times) for run, times in runs] == expected


# A GPU's copies to the host are still under way when later layers run.
ON_GPU = (1, 7, small_config(256, memory=HOST, cluster={"backend": "nccl"}, train=BF16), [])


@pytest.mark.parametrize("name", [*DEEP, "on a GPU"])
@pytest.mark.thorough_for(*DEEP)
def test_few_layers_say_what_all_of_them_would(name: str) -> None:
    world_size, num_layers, config, _ = DEEP.get(name, ON_GPU)
    config = layered(config, num_layers)
    assert predicted(config, world_size) == predicted(config, world_size, whole=True)


def test_copies_to_the_host_hold_no_memory_while_later_layers_save_on_the_device() -> None:
    config = small_config(2048, policy="full", cluster={"backend": "nccl"}, train=BF16)
    memory = replace(config.memory, activation_store="host", host_layers=3, host_bytes=1)  # no limit stops a prediction
    peaks = [predicted(one).phase_peaks["loss"] for one in (config, replace(config, memory=memory))]
    assert peaks[0] - peaks[1] == 3 * 2048 * MODEL.hidden_size * 2


def steps_of_gpus() -> list[Any]:
    """Training steps of a Llama-8B shape that were measured on one GPU, with the peak of the allocator."""
    documents = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu_*.json"))]
    parts = [part for document in documents for part in document["parts"] if part["name"] == "steps"]
    rows = [row for part in parts for row in part["rows"] if row["status"] == "measured"]
    least = min((row["layers"], row["seq_len"]) for row in rows)
    marks = [[] if (row["layers"], row["seq_len"]) == least else pytest.mark.thorough for row in rows]
    return [pytest.param(row, marks=mark, id=row["label"]) for row, mark in zip(rows, marks, strict=True)]


@pytest.mark.parametrize("row", steps_of_gpus())
def test_the_peak_is_that_of_a_gpu(row: dict[str, Any]) -> None:
    config = steps.run_config(replace(steps.LLAMA_8B, num_layers=row["layers"]), row["seq_len"], "cuda")
    config = replace(config, memory=MemoryConfig(**row["memory"]))
    assert predicted(config).device_peak_bytes == pytest.approx(row["peak_bytes"], rel=0.005)


def test_components_of_a_peak_add_up() -> None:
    prediction = predicted(small_config(64, "burst"), 2)
    peak = prediction.device_peak_bytes
    assert sum(prediction.components["device"].values()) == peak
    assert max(prediction.phase_peaks.values()) == prediction.phase_peaks[prediction.phase] == peak


def test_prediction_is_repeatable() -> None:
    assert predicted(small_config(64, "burst"), 2) == predicted(small_config(64, "burst"), 2)
    assert not dist.is_initialized(), "the process group of the prediction is still there"


def test_prediction_is_a_json_document() -> None:
    prediction = predicted(small_config(64, "burst"), 2)
    assert json.loads(json.dumps(prediction.to_dict()))["needed_bytes"] == prediction.device_peak_bytes


def test_prediction_beside_a_process_group_is_refused() -> None:
    with fake_ranks(0, 2), pytest.raises(RuntimeError, match="process of its own"):
        predicted(small_config())


def test_on_cuda_weights_on_the_host_count_as_host_memory() -> None:
    on_device, on_host = (
        predicted(small_config(64, memory={"optimizer_store": store}, train=BF16, cluster={"backend": "nccl"}))
        for store in ("device", "host")
    )
    for component in ("parameters", "optimizer"):
        assert on_host.components["device"][component] == 0
        # The two peaks are moments apart: the norm of the gradients may be there or not.
        expected = on_device.components["device"][component]
        assert on_host.components["host"][component] == pytest.approx(expected, rel=0.001)
    assert on_host.components["host"]["gradients"] > 0 == on_device.components["host"]["gradients"]
    assert on_host.device_peak_bytes < on_device.device_peak_bytes
    assert on_host.reserve_bytes > 0


def test_the_rank_that_sees_most_is_found() -> None:
    assert predicted(small_config(128, "ring", attention={"layout": "contiguous"}), 4).rank > 0


@pytest.mark.thorough
def test_70b_with_a_million_tokens_on_1024_ranks_is_predicted() -> None:
    model = ModelConfig(
        name="llama70b",
        vocab_size=128256,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
    )
    config = RunConfig(model=model, attention=AttentionConfig(preset="burst"), train=TrainConfig(seq_len=1 << 20))
    world = Topology(128, 8)
    prediction = predict_memory(config, method_of(config, world), world)
    layer_inputs = 80 * 1024 * 8192 * 2  # bytes, bf16
    assert prediction.components["device"]["checkpoints"] == pytest.approx(layer_inputs, rel=0.05)
