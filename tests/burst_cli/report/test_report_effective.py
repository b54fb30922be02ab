"""Effective training time: every second of the wall clock has one place, and what is unknown is null."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from burst_cli.report.effective import effective_time
from burst_cli.report.records import metric_rows, run_rows, series
from engine.runs.folder import RunFolder

START = datetime(2026, 1, 1, tzinfo=UTC)
PLANNED = '{"state": "planned", "history": [{"state": "planned", "at": "2026-01-01T00:00:00.000Z"}]}'


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write(run: Path, history: list[tuple[str, float]], **facts: Any) -> RunFolder:
    run.mkdir(parents=True, exist_ok=True)
    entries = [{"state": state, "at": at(seconds)} for state, seconds in history]
    document = {"state": history[-1][0], "history": entries, "attempt": 1, **facts}
    (run / "run.json").write_text(json.dumps(document))
    return RunFolder(run)


def record(folder: Path, steps: range, events: list[tuple[float, dict[str, Any]]], step_s: float = 1.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "step_time_s": step_s, "loss": 1.0} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [{"at": at(seconds), "kind": "phase", **event} for seconds, event in events]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_time_of_one_attempt_is_divided_by_activity(tmp_path: Path) -> None:
    run = write(tmp_path / "r", [("planned", 0), ("starting", 5), ("running", 10), ("completed", 40)])
    phases = [(10, "build model"), (15, "train"), (30, "evaluate"), (36, "train")]
    record(run.path, range(1, 13), [(seconds, {"phase": phase}) for seconds, phase in phases])
    assert effective_time(run) == {
        **{"attempts": 1, "effective_fraction": pytest.approx(12 / 35), "wall_s": 35.0, "productive_s": 12.0},
        **{"start_up_s": 10.0, "evaluation_s": 6.0, "checkpoint_stall_s": 0.0, "lost_work_s": 0.0, "restart_s": 0.0},
        "other_s": 7.0,
    }


def test_checkpoint_stalls_count_their_phases(tmp_path: Path) -> None:
    # Training stands for checkpoints in their phases, and as long as they say.
    run = write(tmp_path / "saving", [("starting", 0), ("completed", 30)])
    saved = (20, {"kind": "checkpoint", "stall_s": 0.5})
    phases = [(5, "train"), (9, "checkpoint"), (11, "train")]
    record(run.path, range(1, 11), [*((seconds, {"phase": phase}) for seconds, phase in phases), saved])
    assert effective_time(run)["checkpoint_stall_s"] == 2.5


def test_repeated_steps_are_lost_work(burst, tmp_path: Path) -> None:
    history = [("planned", 0), ("starting", 0), ("failed", 30), ("starting", 50), ("completed", 100)]
    run = write(tmp_path / "runs/tiny/20260101-000000-aaaaaa", history, attempt=2)
    record(run.path / "attempts/1", range(1, 21), [(5, {"phase": "train"})])
    record(run.path, range(16, 51), [(60, {"phase": "train"})])
    assert effective_time(run) == {
        **{"attempts": 2, "effective_fraction": 0.5, "wall_s": 100.0, "productive_s": 50.0, "start_up_s": 5.0},
        **{"evaluation_s": 0.0, "checkpoint_stall_s": 0.0, "lost_work_s": 5.0, "restart_s": 30.0, "other_s": 10.0},
    }
    lines = [line.split() for line in burst("report", "--effective").out.partition("\nHow")[0].splitlines()]
    shown = {" ".join(words[:-1]): words[-1] for words in lines if words}
    told = {"attempts": "2", "effective time": "50%", "wall": "1:40", "productive": "0:50", "start-up": "0:05"}
    told |= {"evaluation": "0:00", "checkpoint stall": "0:00", "lost work": "0:05", "restart": "0:30"}
    assert shown.items() >= told.items()
    runs = [burst("report", "--json", *words).document["runs"][0] for words in ((), ("--effective",))]
    assert ["wall_s" in one for one in runs] == [False, True]  # it is read only when asked for


def test_attempt_that_died_silently_lasted_until_its_last_sign_of_life(tmp_path: Path) -> None:
    run = write(tmp_path / "r", [("starting", 0), ("starting", 100), ("completed", 130)])
    record(run.path / "attempts/1", range(1, 4), [(2, {"phase": "train"}), (20, {"phase": "evaluate"})])
    moment = (START + timedelta(seconds=40)).timestamp()
    os.utime(run.path / "attempts/1/metrics.jsonl", (moment, moment))
    record(run.path, range(1, 6), [(110, {"phase": "train"})])
    assert effective_time(run) == {
        **{"attempts": 2, "effective_fraction": 5 / 130, "wall_s": 130.0, "productive_s": 5.0, "start_up_s": 2.0},
        **{"evaluation_s": 20.0, "checkpoint_stall_s": 0.0, "lost_work_s": 3.0, "restart_s": 70.0, "other_s": 30.0},
    }


def test_effective_time_without_history_is_unknown(tmp_path: Path) -> None:
    for document in ["{", "{}", '{"state": "completed"}', '{"state": "failed", "history": [3]}', PLANNED]:
        (tmp_path / "run.json").write_text(document)
        assert set(effective_time(RunFolder(tmp_path)).values()) == {None}


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_metric_rows_skip_damaged_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 2, "loss": 1}\nnope\n[1]\n{"step": "3"}\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": 5}\n{"st'
    )
    rows = metric_rows(file)
    assert [row["step"] for row in rows] == [1, 2]
    assert series(rows, "loss") == [(2, 5)]
    assert metric_rows(tmp_path / "absent") == []


def test_rows_of_a_run_are_those_of_the_attempt_that_made_each_step_last(tmp_path: Path) -> None:
    """Attempt 1 came to step 9, attempt 2 began again at 6 and came to 7, attempt 3 made no step, 10 none either."""
    record(tmp_path / "attempts" / "1", range(1, 10), [], step_s=1.0)
    assert [row["step"] for row in run_rows(tmp_path)] == [*range(1, 10)]  # the next attempt has made no step yet
    record(tmp_path / "attempts" / "2", range(6, 8), [], step_s=2.0)
    record(tmp_path / "attempts" / "3", range(0), [])
    record(tmp_path / "attempts" / "10", range(0), [])
    record(tmp_path, range(7, 9), [], step_s=3.0)
    (tmp_path / "attempts" / "notes.txt").write_text("not an attempt")
    rows = run_rows(tmp_path)
    assert [(row["step"], row["step_time_s"]) for row in rows] == [
        *((step, 1.0) for step in range(1, 6)),
        (6, 2.0),
        (7, 3.0),
        (8, 3.0),
    ]
