"""`burst launch` with the real trainer on two ranks: rehearsed, run, and reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from testkit.command_line import Burst
from testkit.process_table import kill_run

from engine.runs.folder import RunFolder

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


def test_a_launch_runs_the_plan_of_its_dry_run(burst: Burst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (f"line {number} of a text that repeats itself\n" for number in range(1500))
    (tmp_path / "corpus.txt").write_text("".join(lines))
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "40")
    run = RunFolder(tmp_path / "runs/tiny/20260101-000000-abcdef")
    words = ("launch", "--json", *overrides(tmp_path), "--run-path", str(run.path))
    try:
        rehearsal, launched = burst(*words, "--dry-run"), burst(*words)
    finally:
        kill_run(run.run_id)
    assert (rehearsal.code, launched.code) == (0, 0), launched.err
    for told in (rehearsal.err, launched.err):  # in whole lines, whatever the width
        assert re.search(r"^expected: .* 3 steps, by the prediction for cpu, without the start$", told, re.MULTILINE)
    rehearsed, document = rehearsal.document, launched.document
    # What was rehearsed is what was run.
    plan = json.loads((run.path / "launch.json").read_text())
    assert {name: rehearsed[name] for name in plan} == plan
    assert (plan["config"]["train"]["steps"], plan["config"]["cluster"]["backend"]) == (STEPS, "gloo")
    assert (rehearsed["memory"]["fits"], rehearsed["memory"]["device_peak_bytes"] > 0) == (True, True)
    assert (run.path / "overrides.txt").read_text().splitlines() == overrides(tmp_path)
    # It trained, and prints its summary.
    assert (document["status"], document["steps"], document["world_size"]) == ("completed", STEPS, 2)
    assert (document["path"], document["attention_preset"]) == (str(run.path), "burst")
    assert 0.0 < document["final_validation_bits_per_byte"] < 9.0  # 512 ids, untrained: 9 bits each
    assert document["peak_flops_per_device"] == 1e12
    assert document["step_time_s_n"] == 1  # medians leave three steps out, but never the last
    # Every step has every metric, and every rank its log.
    rows, host = run.read_metrics(), run.read_state()["host"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(set(row) >= METRICS and row["comm_intra_bytes"] > 0 for row in rows)
    assert f"step {STEPS}/{STEPS}" in run.log_path(host, 0).read_text()
    assert run.log_path(host, 1).exists()
    assert "train" in [event.get("phase") for event in run.read_events()]
    assert (run.log_dir(host) / "torchrun.log").read_text() == ""
    (record,) = burst("report", run.run_id, "--json").document["runs"]
    both = set(record) & set(document)  # the report adds where the run comes from
    assert {key: record[key] for key in both} == {key: document[key] for key in both}
