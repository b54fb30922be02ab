"""From 1K to 8K, as docs/recipes.md has it: the second half goes on from the weights of the first."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from testkit.ranks import Pools
from testkit.tiny_training import full_weights, start_run
from testkit.whole_runs import small_corpus, trained

from burst_cli.compose import compose
from engine.config.settings import RunConfig
from engine.runs.commit import list_checkpoints
from engine.runs.folder import RunFolder, list_runs
from engine.runs.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[3]
ONE_RANK = ("cluster.ranks_per_node=1", "cluster.backend=gloo", "attention=single", "data.tokenizer=bytes")
QUICK = ("train.steps=1", "train.eval_samples=1", "optimizer.warmup_steps=0")
TEXT = re.search(r"## From 1K to 8K on a laptop\n\n```sh\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)


def config_of(*words: str) -> RunConfig:
    return compose([*words, *QUICK, *ONE_RANK, "train.peak_flops_per_device=1e12"], []).config


def first_weights(config: RunConfig) -> dict[str, np.ndarray]:
    """Of a run that begins with this configuration."""
    return {name: weight.numpy() for name, weight in full_weights(start_run(config).model).items()}


def test_the_second_half_begins_with_the_exported_weights_of_the_first(burst, ranks: Pools, tmp_path: Path) -> None:
    first = config_of("exp=toy_1k", "train.seq_len=64", "data.echo_tokens=32")
    first = replace(first, data=replace(small_corpus(tmp_path), validation_fraction=0.2))
    run = trained(ranks, 1, first, tmp_path / "runs")
    result = burst("checkpoint", "export", str(run.path), str(tmp_path / "toy_1k_model"), "--dtype", "float32")
    assert result.code == 0, result.err
    second = config_of("exp=toy_8k", f"model.init_from={tmp_path / 'toy_1k_model'}")
    assert_same(saved_weights(run), ranks(1).run(first_weights, second)[0])


def saved_weights(run: RunFolder) -> dict[str, np.ndarray]:
    """Of the newest checkpoint of a run on one rank."""
    (checkpoint,) = list_checkpoints(run.path / "checkpoints")
    manifest = read_manifest(checkpoint.path)
    found = {}
    for name, facts in manifest.tensors.items():
        (chunk,) = facts.chunks
        if name.startswith("model."):
            found[name.removeprefix("model.")] = load_file(checkpoint.path / chunk.file)[chunk.key]
    return found


def assert_same(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected) != set()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight.reshape(found[name].shape), err_msg=name)


def test_the_second_half_stretches_the_model_of_the_first_to_its_own_length() -> None:
    first, second = (compose([f"exp={name}"], []).config for name in ("toy_1k", "toy_8k"))
    stretch = second.model.rope_scaling
    assert replace(second.model, rope_scaling=first.model.rope_scaling, require_init_from=False) == first.model
    assert second.model.require_init_from
    assert stretch.original_seq_len == first.train.seq_len
    assert second.train.seq_len == stretch.factor * first.train.seq_len
    assert replace(second.data, echo_tokens=first.data.echo_tokens) == first.data
    assert [config.data.echo_tokens for config in (first, second)] == [512, 4096]  # half of a sequence


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_recipe_runs_as_it_is_written(tmp_path: Path) -> None:
    """Few steps and less text; all else as typed."""
    assert TEXT is not None
    less = {"launch": (*QUICK, "data.max_bytes=2000000"), "eval": ("train.eval_samples=1",), "checkpoint": ()}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "BURST_RUNS_DIR": str(tmp_path / "runs"),
        "BURST_CACHE_DIR": str(tmp_path / "cache"),
    }
    for line in TEXT[1].splitlines():
        _, *words = shlex.split(line.replace("$PWD", str(tmp_path)), comments=True)
        command = [sys.executable, "-m", "burst_cli", *words, *less[words[0]]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    runs = {run.exp: run.read_summary() for run in list_runs(tmp_path / "runs")}
    assert {exp: (summary or {})["status"] for exp, summary in runs.items()} == dict.fromkeys(
        ("toy_1k", "toy_8k", "toy_8k-eval"), "completed"
    )
