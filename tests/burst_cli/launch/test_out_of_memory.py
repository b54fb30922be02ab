"""`burst launch` with the real trainer in less memory than a step needs: status oom, and one block that explains it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.process_table import kill_run, run_processes

from engine.runs.folder import RunFolder, list_runs

pytestmark = pytest.mark.thorough  # with fake ranks: the table of faults

ROOT = Path(__file__).parents[3]
END_S = 200.0  # two ranks that import torch on a machine that is busy with other tests
DATA_LIMIT_BYTES = 3 * 2**30  # torch and its threads reserve about 1 GiB of it
SEQ_LEN, VOCABULARY = 16384, 131072  # 4 GiB of fp32 logits on each of two ranks


def overrides(folder: Path) -> list[str]:
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"line {number} of a text that repeats itself\n" for number in range(3000)))
    model = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_hidden_size": 64, "num_layers": 1}
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    train = {"seq_len": SEQ_LEN, "steps": 3, "eval_samples": 1, "grad_accum_steps": 1}
    return [
        "exp=tiny",
        *(f"model.{name}={value}" for name, value in {**model, **heads}.items()),
        *(f"train.{name}={value}" for name, value in train.items()),
        "train.compute_dtype=float32",
        "train.peak_flops_per_device=1e12",
        "optimizer.warmup_steps=0",
        "loss.chunk_tokens=1000000",
        "data=text",
        f"data.paths=[{corpus}]",
        "data.tokenizer=bytes",
        "data.validation_fraction=0.2",
        "cluster.ranks_per_node=2",
        "cluster.threads_per_rank=1",
        f"memory.host_bytes={2**40}",  # the planner is told of more than there is
    ]


def limit_memory() -> None:
    """Allocations beyond the limit fail, in this process and in all that it starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("oom")
    yield folder
    for run in list_runs(folder / "runs"):
        kill_run(run.run_id)


@pytest.fixture(scope="module")
def launched(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BURST_RUNS_DIR": str(folder / "runs"), "COLUMNS": "320"}
    command = [sys.executable, "-m", "burst_cli", "launch", *overrides(folder)]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=END_S, check=False,
        preexec_fn=limit_memory,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(folder: Path, launched: subprocess.CompletedProcess[str]) -> RunFolder:
    (run,) = list_runs(folder / "runs")
    return run


@pytest.mark.thorough
def test_run_ends_in_state_oom_without_a_process_left(
    launched: subprocess.CompletedProcess[str], run: RunFolder
) -> None:
    assert launched.returncode == 1
    assert run.read_state()["state"] == "oom", launched.stderr
    assert run_processes(run.run_id) == []


def test_failure_names_rank_step_phase_and_memory(run: RunFolder) -> None:
    failure = run.read_state()["failure"]
    plan = json.loads((run.path / "memory_plan.json").read_text())
    assert failure["rank"] in (0, 1)
    assert failure["step"] == 1
    assert failure["phase"] in PHASES
    memory = failure["memory"]
    assert memory["asked_bytes"] >= SEQ_LEN // 2 * VOCABULARY * 4
    assert memory["peak_bytes"] > 50 * 2**20
    assert memory["predicted_peak_bytes"] == plan["device_peak_bytes"] > DATA_LIMIT_BYTES


def test_block_says_what_happened_and_what_to_do(launched: subprocess.CompletedProcess[str], run: RunFolder) -> None:
    block = launched.stderr[launched.stderr.index("OOM ") :]
    assert "step 1, phase " in block
    assert "memory: cpu: peak " in block
    assert "more asked for" in block
    assert "predicted peak " in block
    assert "loss.chunk_tokens=2048" in block
    assert run.read_state()["failure"]["advice"] in block


PHASES = ("loss",)
