"""`burst launch` with the real trainer on two ranks: rehearsed, run, and reported."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.command_line import Burst
from testkit.process_table import kill_run

from burst_cli.app import main
from engine.runs.folder import RunFolder, list_runs

STEPS = 3
METRICS = {
    *("step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device"),
    *("model_tflops_per_device", "mfu", "mfu_full_attention", "hfu"),
    *("peak_memory_bytes", "peak_memory_reserved_bytes", "comm_intra_bytes", "comm_inter_bytes"),
    *("comm_exposed_s", "comm_exposed_share"),
}


def overrides(folder: Path) -> list[str]:
    """The smallest run that still has two ranks, a ring and validation."""
    model = {"vocab_size": 512, "hidden_size": 32, "ffn_hidden_size": 64, "num_layers": 1}
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    train = {"seq_len": 64, "steps": STEPS, "eval_samples": 1, "grad_accum_steps": 1, "peak_flops_per_device": "1e12"}
    return [
        "exp=tiny",
        *(f"model.{name}={value}" for name, value in {**model, **heads}.items()),
        *(f"train.{name}={value}" for name, value in train.items()),
        *("optimizer.warmup_steps=0", "loss.chunk_tokens=64", "cluster.ranks_per_node=2"),
        *("data=text", f"data.paths=[{folder}/corpus.txt]", "data.tokenizer=bytes", "data.validation_fraction=0.2"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("end_to_end")
    (path / "corpus.txt").write_text(
        "".join(f"line {number} of a text that repeats itself\n" for number in range(1500))
    )
    yield path
    for run in list_runs(path / "runs"):
        kill_run(run.run_id)


def launch(folder: Path, *words: str) -> dict[str, Any]:
    """What `burst launch --json` prints of a run into folder/runs: in this process, which predicts memory once.

    Before, a person is told in whole lines what to expect.
    """
    path = folder / "runs" / "tiny" / "20260101-000000-abcdef"
    assert not path.exists()
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for variable in ("BURST_RUNS_DIR", "BURST_CACHE_DIR", "XDG_CONFIG_HOME"):
            patch.setenv(variable, str(folder / variable))
        patch.setenv("COLUMNS", "40")
        assert main(["launch", "--json", *overrides(folder), "--run-path", str(path), *words]) == 0
    assert re.search(r"^expected: .* 3 steps and the start, by the prediction for cpu$", err.getvalue(), re.MULTILINE)
    return dict(json.loads(out.getvalue()))


@pytest.fixture(scope="module")
def rehearsed(folder: Path) -> dict[str, Any]:
    return launch(folder, "--dry-run")


@pytest.fixture(scope="module")
def document(folder: Path, rehearsed: dict[str, Any]) -> dict[str, Any]:
    return launch(folder)


@pytest.fixture(scope="module")
def run(document: dict[str, Any]) -> RunFolder:
    return RunFolder(Path(document["path"]))


def test_what_was_rehearsed_is_what_was_run(rehearsed: dict[str, Any], run: RunFolder, folder: Path) -> None:
    plan = json.loads((run.path / "launch.json").read_text())
    assert {name: rehearsed[name] for name in plan} == plan
    assert (plan["config"]["train"]["steps"], plan["config"]["cluster"]["backend"]) == (STEPS, "gloo")
    assert (rehearsed["memory"]["fits"], rehearsed["memory"]["device_peak_bytes"] > 0) == (True, True)
    assert (run.path / "overrides.txt").read_text().splitlines() == overrides(folder)


def test_launch_trains_and_prints_its_summary(document: dict[str, Any]) -> None:
    assert (document["status"], document["steps"], document["world_size"]) == ("completed", STEPS, 2)
    assert document["attention_preset"] == "burst"
    assert 0.0 < document["final_validation_bits_per_byte"] < 9.0  # 512 ids, untrained: 9 bits each
    assert document["peak_flops_per_device"] == 1e12
    assert document["step_time_s_n"] == 1  # medians leave three steps out, but never the last


def test_every_step_has_every_metric_of_the_contract_and_every_rank_its_log(run: RunFolder) -> None:
    rows, host = run.read_metrics(), run.read_state()["host"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(set(row) >= METRICS and row["comm_intra_bytes"] > 0 for row in rows)
    assert f"step {STEPS}/{STEPS}" in run.log_path(host, 0).read_text()
    assert run.log_path(host, 1).exists()
    assert "train" in [event.get("phase") for event in run.read_events()]
    assert (run.log_dir(host) / "torchrun.log").read_text() == ""


def test_report_shows_the_run(document: dict[str, Any], folder: Path, burst: Burst) -> None:
    (record,) = burst("report", document["run_id"], "--json", "--runs-dir", str(folder / "runs")).document["runs"]
    both = set(record) & set(document)  # the report adds where the run comes from
    assert {key: record[key] for key in both} == {key: document[key] for key in both}
