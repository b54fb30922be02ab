"""`burst launch` with the real trainer on two ranks: from text to a report, and a clean stop."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.command_line import Burst
from testkit.process_table import kill_run

from burst_cli.app import main
from engine.config.settings import load_config
from engine.runs.folder import RunFolder, list_runs

STEPS = 3
METRICS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device"),
    *("model_tflops_per_device", "mfu", "mfu_full_attention", "hfu"),
    *(
        "peak_memory_bytes",
        "peak_memory_reserved_bytes",
        "comm_intra_bytes",
        "comm_inter_bytes",
        "comm_exposed_s",
        "comm_exposed_share",
    ),
]


def overrides(folder: Path, steps: int) -> list[str]:
    """The smallest run that still has two ranks, a ring and validation."""
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"line {number} of a text that repeats itself\n" for number in range(1500)))
    model = {"vocab_size": 512, "hidden_size": 32, "ffn_hidden_size": 64, "num_layers": 1}
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    train = {"seq_len": 64, "steps": steps, "eval_samples": 1, "grad_accum_steps": 1}
    return [
        "exp=tiny",
        *(f"model.{name}={value}" for name, value in {**model, **heads}.items()),
        *(f"train.{name}={value}" for name, value in train.items()),
        "train.peak_flops_per_device=1e12",
        "optimizer.warmup_steps=0",
        "loss.chunk_tokens=64",
        "data=text",
        f"data.paths=[{corpus}]",
        "data.tokenizer=bytes",
        "data.validation_fraction=0.2",
        "cluster.ranks_per_node=2",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("end_to_end")
    yield path
    for run in list_runs(path / "runs"):
        kill_run(run.run_id)


@pytest.fixture(scope="module")
def launch(folder: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """The document of `burst launch --json WORDS`: in this process, which predicts memory once."""
    path = folder / "runs" / "tiny" / "20260101-000000-abcdef"

    def run(*words: str) -> dict[str, Any]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main(["launch", "--json", *overrides(folder, STEPS), "--run-path", str(path), *words]) == 0
        document: dict[str, Any] = json.loads(said.getvalue())
        return document

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("BURST_RUNS_DIR", "BURST_CACHE_DIR", "XDG_CONFIG_HOME"):
            patch.setenv(variable, str(folder / variable))
        yield run


@pytest.fixture(scope="module")
def rehearsed(launch: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return launch("--dry-run")


@pytest.fixture(scope="module")
def document(launch: Callable[..., dict[str, Any]], rehearsed: dict[str, Any]) -> dict[str, Any]:
    """Of a launch that completed."""
    return launch()


def test_a_rehearsal_predicts_memory_and_leaves_no_trace(rehearsed: dict[str, Any]) -> None:
    assert (rehearsed["memory"]["fits"], rehearsed["memory"]["device_peak_bytes"] > 0) == (True, True)
    assert not Path(rehearsed["path"]).exists()


def test_what_was_rehearsed_is_what_was_run(rehearsed: dict[str, Any], document: dict[str, Any]) -> None:
    run = json.loads((Path(document["path"]) / "launch.json").read_text())
    assert {name: rehearsed[name] for name in run} == run


def test_launch_trains_and_prints_its_summary(document: dict[str, Any]) -> None:
    assert (document["status"], document["steps"], document["world_size"]) == ("completed", STEPS, 2)
    assert document["attention_preset"] == "burst"
    assert 0.0 < document["final_validation_bits_per_byte"] < 9.0  # 512 ids, untrained: 9 bits each
    assert document["peak_flops_per_device"] == 1e12
    assert document["step_time_s_n"] == 1  # medians leave three steps out, but never the last


def test_every_step_has_every_metric_of_the_contract(document: dict[str, Any]) -> None:
    rows = RunFolder(Path(document["path"])).read_metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(set(METRICS) <= set(row) for row in rows)
    assert all(row["comm_intra_bytes"] > 0 for row in rows)


def test_ranks_wrote_their_logs_and_phases(document: dict[str, Any]) -> None:
    run = RunFolder(Path(document["path"]))
    host = run.read_state()["host"]
    assert f"step {STEPS}/{STEPS}" in run.log_path(host, 0).read_text()
    assert run.log_path(host, 1).exists()
    assert "train" in [event.get("phase") for event in run.read_events()]
    assert (run.log_dir(host) / "torchrun.log").read_text() == ""


def test_run_folder_keeps_what_was_asked_and_what_was_run(document: dict[str, Any], folder: Path) -> None:
    path = Path(document["path"])
    assert (path / "overrides.txt").read_text().splitlines() == overrides(folder, STEPS)
    config = load_config(path / "config.yaml")
    assert (config.train.steps, config.cluster.backend) == (STEPS, "gloo")


def test_report_shows_the_run(document: dict[str, Any], folder: Path, burst: Burst) -> None:
    (record,) = burst("report", document["run_id"], "--json", "--runs-dir", str(folder / "runs")).document["runs"]
    # The report adds where the run comes from; what both say is the same.
    assert {key: record[key] for key in record if key in document} == {
        key: value for key, value in document.items() if key in record
    }
