"""A whole run on ranks: the run folder's contents, its end in every way it can end, and the torchrun target."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from testkit import ROOT
from testkit.corpora import write_token_set
from testkit.ranks import Pools
from testkit.tiny_training import tiny_config
from testkit.whole_runs import create_run_of, ended, events_of, trained, whole_config

from engine.attention.library import resolve_here
from engine.config.settings import DataConfig, RunConfig
from engine.distributed.mesh import Placement, build_mesh
from engine.predict.flops import count_parameters
from engine.runs.folder import RunFolder
from engine.runs.record import MAXIMA, MEDIANS, config_facts
from engine.training.rank.lifecycle import run_states
from engine.training.rank.process import RankStatus
from engine.training.rank.recorder import Recorder
from engine.training.trainer import Trainer, run_training, set_threads


def run_config(corpus: DataConfig, **train: Any) -> RunConfig:
    """Six steps with a validation every three, on the corpus."""
    settings = {"steps": 6, "eval_interval_steps": 3, "eval_samples": 2, **train}
    return whole_config(corpus, train=settings, attention={"preset": "burst"})


class RowWatch(Recorder):
    """Counts references to the row of every step before the last, but its own and that of the call that counts."""

    rows: Sequence[dict[str, Any]] = ()
    kept = 0

    def row(self, row: dict[str, Any], total_steps: int | None = None) -> None:
        """As `Recorder`, and looks at the steps before."""
        super().row(row, total_steps)
        for index in range(len(self.rows) - 1):
            self.kept = max(self.kept, sys.getrefcount(self.rows[index]) - 2)
        self.rows = (*self.rows, row)


def rows_kept(path: str, config: RunConfig) -> int:
    """References to steps that are over, at the end of a run on this rank."""
    run, status, mesh = RunFolder(Path(path)), RankStatus(), build_mesh(config.parallel, config.cluster)
    watch = RowWatch(run, status, rank=mesh.rank, tensorboard=False)
    with run_states(run, status, rank=mesh.rank, environment={}):
        Trainer(resolve_here(config, mesh), run, mesh, watch, status).run()
    assert len(watch.rows) == config.train.steps
    return watch.kept


@pytest.fixture(scope="module")
def six_steps(ranks: Pools, corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a completed run on two ranks, which traced its fifth step."""
    config = run_config(corpus, profile="5:6")
    run = create_run_of(config, tmp_path_factory.mktemp("six"))
    assert ranks(2).run(rows_kept, str(run.path), config) == [0, 0], "a rank keeps the rows of steps that are over"
    return run


def test_completed_run_has_a_row_per_step(six_steps: RunFolder) -> None:
    assert [row["step"] for row in six_steps.read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_loss_falls(six_steps: RunFolder) -> None:
    rows = six_steps.read_metrics()
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_rows_have_the_documented_metrics(six_steps: RunFolder) -> None:
    (table,) = re.findall(r"^\| `step` .*?^$", (ROOT / "docs/training.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    documented = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    row = six_steps.read_metrics()[0]
    assert set(row) == {name for name in documented if not name.startswith(("validation_", "needle_", "dropped"))}
    assert {*MEDIANS, *MAXIMA} <= set(row)


def test_validation_runs_every_three_steps(six_steps: RunFolder) -> None:
    assert [row["step"] for row in six_steps.read_metrics() if "validation_loss" in row] == [3, 6]


def test_completed_run_has_passed_through_every_state(six_steps: RunFolder) -> None:
    states = [entry["state"] for entry in six_steps.read_state()["history"]]
    assert states == ["planned", "starting", "running", "completed"]


def test_phases_of_a_run_are_events(six_steps: RunFolder) -> None:
    preparation = ["prepare data", "build model", "measure peak", "first weights"]
    phases = events_of(six_steps, "phase", "phase")
    assert phases == [*preparation, "train", "evaluate", "train", "evaluate", "train"]


def test_chosen_kernel_is_an_event_with_its_reason(six_steps: RunFolder) -> None:
    assert events_of(six_steps, "attention_kernel", "name") == ["cpu_flash"]
    assert events_of(six_steps, "attention_kernel", "reason") == ["auto: the first that can of cpu_flash on cpu"]
    assert events_of(six_steps, "attention_kernel", "others")[0]["aten_cudnn"] == "runs on cuda only"


def test_summary_states_what_ran_on_which_ranks(six_steps: RunFolder, corpus: DataConfig) -> None:
    config, summary = run_config(corpus, profile="5:6"), six_steps.read_summary() or {}
    expected = {
        "status": "completed",
        "steps": 6,
        **config_facts(config),
        "world_size": 2,
        "parameters": count_parameters(config.model).total,
        "topology": {"nodes": 1, "local_ranks": 2},
        "device": "cpu",
        "attention_preset": "burst",
        "attention_kernel": "cpu_flash",
        "peak_flops_per_device": 1e12,
        "peak_flops_source": "config: train.peak_flops_per_device",
        "dropped_steps": 0,
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["attention"]["layout"] == "zigzag"


def test_summary_agrees_with_the_rows(six_steps: RunFolder) -> None:
    rows, summary = six_steps.read_metrics(), six_steps.read_summary() or {}
    expected = {
        "step_time_s_n": 3,
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "final_train_loss": rows[-1]["loss"],
        "final_validation_loss": rows[-1]["validation_loss"],
        "final_validation_bits_per_byte": rows[-1]["validation_bits_per_byte"],
        "tokens_total": 6 * 30,
        "mfu": pytest.approx(summary["model_tflops_per_device"]),
    }
    assert {key: summary[key] for key in expected} == expected


def test_profile_holds_the_requested_step_alone(six_steps: RunFolder) -> None:
    trace = (six_steps.path / "profile" / "rank0001.json").read_text()
    assert [step for step in range(1, 7) if f'"step {step}"' in trace] == [5]


class NotedStatus(RankStatus):
    """Remembers every phase, with the step and micro-step in which it began."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, int, str]] = []
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "phase" and value is not None:
            self.seen.append((self.step, self.micro_step, value))


def phases_of_run(path: str, config: RunConfig) -> list[tuple[int | None, int, str]]:
    status = NotedStatus()
    run_training(config, RunFolder(Path(path)), status)
    return status.seen


def test_a_rank_knows_at_any_time_where_it_is(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = run_config(corpus, steps=2, eval_interval_steps=None, grad_accum_steps=2)
    (seen,) = ranks(1).run(phases_of_run, str(create_run_of(config, tmp_path).path), config)
    before = ("start", "prepare data", "build model", "measure peak", "first weights", "train")
    expected: list[tuple[int | None, int, str]] = [(None, 0, phase) for phase in before]
    for step in (1, 2):
        expected += [(step, 0, "load batch"), (step, 0, "count labels")]
        expected += [(step, index, phase) for index in (0, 1) for phase in ("forward", "loss", "backward")]
        expected += [(step, 1, "optimizer"), (step, 1, "train")]
    assert seen == [*expected, (2, 1, "evaluate"), (2, 1, "train")]


def test_with_separate_documents_their_first_tokens_are_no_labels(ranks: Pools, tmp_path: Path) -> None:
    """Documents of a number and their end: all that can be learned there is the end, which is always the same."""
    tokens = np.full(4000, 63)
    tokens[::2] = np.random.default_rng(0).integers(0, 60, 2000)
    write_token_set(tmp_path, tokens.tolist(), vocab_size=64, eod_id=63)
    config = tiny_config(
        train={"steps": 15, "peak_flops_per_device": 1e12, "deterministic": True},
        optimizer={"learning_rate": 3e-2},
        attention={"preset": "burst", "documents": True},
        data=DataConfig(format="shards", paths=(str(tmp_path),), validation_fraction=0.2),
    )
    run = trained(ranks, 1, config, tmp_path)
    summary = run.read_summary() or {}
    # Half of the labels would be one of 60 numbers: at least log(60) / 2 = 2.05 nats.
    assert max(summary["final_train_loss"], summary["final_validation_loss"]) < 0.5
    assert "deterministic" in events_of(run, "attention_kernel", "reason")[0]


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"head_dim": 7}}, "head_dim"),
        ({}, "model.vocab_size: got 64, .*set model.vocab_size="),
        (
            {"model": {"vocab_size": 256}, "cluster": {"ranks_per_node": 4}},
            "cluster.ranks_per_node 4 = 4 ranks, but 2 ranks were started",
        ),
    ],
)
def test_a_wrong_configuration_ends_every_rank_with_exit_code_2(
    ranks: Pools, corpus: DataConfig, tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    run, codes = ended(ranks, 2, tiny_config(data=corpus, attention={"preset": "burst"}, **sections), tmp_path)
    assert codes == [2, 2], run.rank_errors()
    assert run.read_state()["state"] == "failed"
    assert re.search(problem, run.read_state()["failure"]["message"])


def start(*args: str) -> subprocess.Popen[str]:
    """The target of torchrun, in a process which finds the packages and no launcher."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("BURST_", "TORCHELASTIC"))}
    surroundings = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "engine.train", *args]
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_sigterm_however_often_stops_at_a_step_edge_with_a_summary(corpus: DataConfig, tmp_path: Path) -> None:
    run = create_run_of(run_config(corpus, steps=100_000, eval_interval_steps=None), tmp_path)
    with start(str(run.path / "config.yaml")) as process:
        deadline = time.monotonic() + 200
        while len(run.read_metrics()) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGTERM)  # torchrun's comes after the launcher's, sooner or later
            time.sleep(0.01)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert run.read_state()["state"] == "cancelled"
    summary = run.read_summary() or {}
    assert summary["status"] == "cancelled"
    assert summary["steps"] == len(run.read_metrics())


@pytest.mark.parametrize(
    ("args", "exit_code", "words"), [([], 2, "usage:"), (["/nowhere/config.yaml"], 1, "is no run folder")]
)
def test_the_target_reports_bad_arguments(args: list[str], exit_code: int, words: str) -> None:
    with start(*args) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == exit_code
    assert words in output
    assert "Traceback" not in output


@pytest.fixture
def seven_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("seven_threads")
def test_a_rank_that_computes_or_updates_on_the_cpu_takes_its_share_of_the_cores_it_may_use() -> None:
    def threads(device: str, store: str, ranks: int = 1, asked: int | None = None) -> int:
        config = tiny_config(memory={"optimizer_store": store}, cluster={"threads_per_rank": asked})
        set_threads(config, torch.device(device), Placement(0, ranks, 0, ranks))
        return torch.get_num_threads()

    everything = os.sched_getaffinity(0)
    cores = len(everything)
    assert threads("cuda", "device") == 7  # as it was started
    assert threads("cpu", "device") == cores
    assert threads("cuda", "host") == max(1, cores * 3 // 4)  # the rest feeds the GPU
    assert threads("cuda", "host", ranks=2 * cores) == 1
    assert threads("cuda", "host", asked=3) == 3
    os.sched_setaffinity(0, {min(everything)})
    try:
        assert threads("cpu", "device") == 1
    finally:
        os.sched_setaffinity(0, everything)
