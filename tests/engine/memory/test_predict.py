"""Predicted peaks are those that a tracker measures on a real run; a prediction leaves nothing behind."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from testkit.ranks import Pools
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config

from benchmarks.gpu import steps
from engine.config.settings import AttentionConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.memory.predict import fake_ranks, predict_memory, shortened
from engine.memory.tracker import LiveTensorTracker
from engine.planning.memory.predictor import MemoryPrediction
from engine.planning.methods.resolve import resolve_attention
from engine.planning.methods.topology import Topology
from engine.planning.time.flops import count_parameters

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
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


def small_config(seq_len: int = 512, **changes: Any) -> RunConfig:
    """A model whose activations outweigh its weights."""
    train = {"seq_len": seq_len, **changes.pop("train", {})}
    return tiny_config(model=MODEL, loss={"chunk_tokens": 64}, train=train, **changes)


# (world size, configuration). A row per way to train; every one is measured.
CASES: dict[str, tuple[int, RunConfig]] = {
    "none": (1, small_config(memory={"activation_checkpoint": "none"})),
    "bfloat16, tiles": (
        1,
        small_config(memory={"activation_checkpoint": "full", "tile_tokens": 64}, train={"compute_dtype": "bfloat16"}),
    ),
    "two micro-steps of two sequences": (1, small_config(train={"grad_accum_steps": 2, "micro_batch_size": 2})),
    "4 ranks, two micro-steps": (4, small_config(1024, attention={"preset": "burst"}, train={"grad_accum_steps": 2})),
    "host store of two layers": (
        1,
        small_config(memory={"activation_checkpoint": "attn_out", "activation_store": "host", "host_layers": 2}),
    ),
    "4 ranks, ring": (4, small_config(1024, attention={"preset": "ring"}, memory={"activation_checkpoint": "full"})),
    "4 ranks, two of them slicing matrices": (
        4,
        small_config(1024, attention={"preset": "ring"}, parallel={"tp_size": 2}),
    ),
    "attn_out_every": (1, small_config(768, memory={"activation_checkpoint": "attn_out_every", "every_layers": 2})),
    "updates in backward": (
        1,
        small_config(memory={"optimizer_in_backward": True}, optimizer={"max_grad_norm": None}),
    ),
    "4 ranks, half of the sequence, burst": (
        4,
        small_config(1024, attention={"preset": "burst"}, memory={"activation_checkpoint": "seq_fraction"}),
    ),
    "4 ranks, half of the sequence, contiguous": (
        4,
        small_config(
            1024,
            attention={"preset": "ring", "layout": "contiguous"},
            memory={"activation_checkpoint": "seq_fraction", "kept_fraction": 0.25},
        ),
    ),
    "4 ranks, heads": (
        4,
        small_config(
            1024,
            attention={"preset": "usp", "head_parallel_size": 2},
            memory={"activation_checkpoint": "attn_out_every", "every_layers": 4, "activation_store": "host"},
        ),
    ),
    "4 ranks, window and two sequences": (
        4,
        small_config(
            1024,
            attention={"preset": "ring", "mask": "window", "window_tokens": 100},
            parallel={"dp_shard_size": 2},
            memory={"activation_checkpoint": "attn_out"},
        ),
    ),
    "4 ranks, chunks in host memory": (
        4,
        small_config(
            1024,
            attention={"preset": "fpdt", "chunk_tokens": 128, "head_parallel_size": 2},
            memory={"activation_checkpoint": "attn_out"},
        ),
    ),
}


def measured_peaks(config: RunConfig) -> tuple[int, int]:
    """(device, host) peak of this rank over its second step."""
    run = start_run(config)
    train = config.train
    micro = train.grad_accum_steps
    sequences = run.mesh.dp_size * train.micro_batch_size * micro
    batches = own_part(
        random_batches(0, sequences=sequences, seq_len=train.seq_len, vocab_size=config.model.vocab_size),
        run.mesh,
        micro_steps=micro,
    )
    run.train_step(0, batches)
    with LiveTensorTracker() as tracker:
        tracker.watch(run.model.parameters())
        tracker.watch(x for state in run.train_step.optimizer.state.values() for x in state.values())
        run.train_step(1, batches)
    return tracker.peak_bytes, tracker.peak_host_bytes


def predicted(config: RunConfig, world_size: int = 1) -> MemoryPrediction:
    return predict_memory(config, Topology(1, world_size))


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
    world_size, config = CASES[name]
    found = ranks(world_size).run(measured_peaks, config)
    prediction = predicted(config, world_size)
    assert prediction.device_peak_bytes == pytest.approx(max(device for device, _ in found), rel=TOLERANCE)
    assert prediction.host_peak_bytes == pytest.approx(max(host for _, host in found), rel=TOLERANCE)


@pytest.mark.thorough
def test_a_second_micro_step_adds_the_gradients_of_one_ranks_shard(ranks: Pools) -> None:
    """What rank 0 measures: 4 bytes for each of its own parameters, not for those that three others hold."""
    two = CASES["4 ranks, two micro-steps"][1]
    one = replace(two, train=replace(two.train, grad_accum_steps=1))
    found = [ranks(4).run(measured_peaks, config)[0][0] for config in (one, two)]
    assert 0 < found[1] - found[0] <= 4 * count_parameters(MODEL).total / 4


# (ranks, layers, configuration, layers of each run instead and how often it counts): stretches and turns of layers.
DEEP: dict[str, tuple[int, int, RunConfig, list[tuple[int, int]]]] = {
    "policies in turn": (1, 13, small_config(256, memory={"checkpoint_layers": ("full", "none")}), [(7, 4), (5, -3)]),
    "masks in turn": (
        1,
        13,
        small_config(256, attention={"mask_layers": ("window", "causal"), "window_tokens": 64}),
        [(7, 4), (5, -3)],
    ),
    "groups": (
        1,
        14,
        small_config(256, memory={"activation_checkpoint": "attn_out_every", "every_layers": 3}),
        [(8, 3), (5, -2)],
    ),
    "both stores": (
        1,
        15,
        small_config(256, memory={"activation_store": "host", "host_layers": 4}),
        [(7, 9), (6, -8)],
    ),
    "weights outweigh activations": (
        4,
        9,
        small_config(16, attention={"preset": "burst"}, train={"grad_accum_steps": 2}),
        [(4, 6), (3, -5)],
    ),
    "whole weights stay": (
        4,
        9,
        small_config(64, attention={"preset": "ring"}),
        [(4, 6), (3, -5)],
    ),
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.thorough
def test_few_layers_say_what_all_of_them_would(name: str) -> None:
    world_size, num_layers, config, _ = DEEP[name]
    config = replace(config, model=replace(config.model, num_layers=num_layers))
    few, whole = (predict_memory(config, Topology(1, world_size), whole=whole) for whole in (False, True))
    assert replace(few, seconds=0.0) == replace(whole, seconds=0.0)


def test_few_layers_say_so_of_a_gpu_whose_copies_to_the_host_are_still_under_way() -> None:
    config = small_config(256, memory={"activation_store": "host"}, cluster={"backend": "nccl"})
    config = replace(
        config, model=replace(config.model, num_layers=7), train=replace(config.train, compute_dtype="bfloat16")
    )
    few, whole = (predict_memory(config, Topology(1, 1), whole=whole) for whole in (False, True))
    assert replace(few, seconds=0.0) == replace(whole, seconds=0.0)


def test_copies_to_the_host_hold_no_memory_while_later_layers_keep_on_the_device() -> None:
    config = small_config(2048, memory={"activation_checkpoint": "full"}, cluster={"backend": "nccl"})
    config = replace(config, train=replace(config.train, compute_dtype="bfloat16"))
    memory = replace(config.memory, activation_store="host", host_layers=3, host_bytes=1)  # no limit stops a prediction
    on_host = replace(config, memory=memory)
    peaks = [predict_memory(one, Topology(1, 1)).phase_peaks["loss"] for one in (config, on_host)]
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
    assert predict_memory(config, Topology(1, 1)).device_peak_bytes == pytest.approx(row["peak_bytes"], rel=0.005)


@pytest.mark.parametrize(
    ("world_size", "num_layers", "config", "expected"),
    [*DEEP.values(), (1, 1000, small_config(), [(4, 997), (3, -996)])],
    ids=[*DEEP, "a thousand layers"],
)
def test_of_many_layers_few_are_run(
    world_size: int, num_layers: int, config: RunConfig, expected: list[tuple[int, int]]
) -> None:
    config = replace(config, model=replace(config.model, num_layers=num_layers))
    runs = shortened(config, resolve_attention(config, Topology(1, world_size)))
    assert [(run.model.num_layers, times) for run, times in runs] == expected


def test_components_and_phases_add_up_and_a_second_prediction_is_the_same() -> None:
    prediction, again = (predicted(small_config(64, attention={"preset": "burst"}), 2) for _ in range(2))
    assert replace(prediction, seconds=0.0) == replace(again, seconds=0.0)
    assert not dist.is_initialized()
    device = prediction.components["device"]
    assert sum(device.values()) == prediction.device_peak_bytes
    assert max(prediction.phase_peaks.values()) == prediction.device_peak_bytes
    assert prediction.phase_peaks[prediction.phase] == prediction.device_peak_bytes
    assert list(prediction.phase_peaks) == ["forward", "loss", "backward", "optimizer"]
    assert json.loads(json.dumps(prediction.to_dict()))["needed_bytes"] == prediction.device_peak_bytes


def test_on_cuda_weights_that_lie_on_the_host_count_there() -> None:
    config = small_config(64, train={"compute_dtype": "bfloat16"}, cluster={"backend": "nccl"})
    on_device = predicted(config)
    moved = replace(config, memory=replace(config.memory, optimizer_store="host"))
    on_host = predicted(moved)
    for component in ("parameters", "optimizer"):
        assert on_host.components["device"][component] == 0
        # The two peaks are moments apart: the norm of the gradients may be there or not.
        expected = on_device.components["device"][component]
        assert on_host.components["host"][component] == pytest.approx(expected, rel=0.001)
    assert on_host.device_peak_bytes < on_device.device_peak_bytes
    assert on_host.reserve_bytes > 0


def test_the_rank_that_sees_most_is_found() -> None:
    config = small_config(128, attention={"preset": "ring", "layout": "contiguous"})
    assert predicted(config, 4).rank > 0


def test_a_process_of_a_group_is_refused() -> None:
    with fake_ranks(0, 2), pytest.raises(RuntimeError, match="process of its own"):
        predicted(small_config())


@pytest.mark.thorough
def test_70b_with_a_million_tokens_on_1024_ranks_takes_about_a_minute() -> None:
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
    before = time.process_time()  # what else the machine does is not counted
    prediction = predict_memory(config, Topology(128, 8))
    assert time.process_time() - before < 120  # 40 s on a core of 2024
    layer_inputs = 80 * 1024 * 8192 * 2  # bytes, bf16
    assert prediction.components["device"]["checkpoints"] == pytest.approx(layer_inputs, rel=0.05)
