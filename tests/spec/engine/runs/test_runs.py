from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import BurstError, ConfigError
from engine.runs.folder import (
    STATES,
    RunFolder,
    RunFolderError,
    create_run,
    default_runs_dir,
    list_runs,
    new_run_path,
    open_run,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(new_run_path(tmp_path / "runs", "tiny"), {"config.yaml": "seed: 0\n"})


@pytest.fixture
def created(tmp_path: Path) -> RunFolder:
    """A run of three ranks with a script and an environment."""
    return create_run(new_run_path(tmp_path, "tiny"), {"plan.sh": "#!/bin/sh\n", "env/host.env": "A=1\n"}, world_size=3)


def test_run_id_is_the_utc_time_with_a_random_suffix(created: RunFolder, tmp_path: Path) -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", created.run_id)
    assert created.path.parent == tmp_path / "tiny"
    assert created.exp == "tiny"


def test_created_run_is_complete(created: RunFolder) -> None:
    assert {entry.name for entry in created.path.iterdir()} == {"plan.sh", "env", "logs", "checkpoints", "run.json"}


@pytest.mark.parametrize(("name", "mode"), [("", 0o700), ("plan.sh", 0o700), ("env/host.env", 0o600)])
def test_files_of_a_run_are_private(created: RunFolder, name: str, mode: int) -> None:
    assert stat.S_IMODE((created.path / name).stat().st_mode) == mode


def test_created_run_is_planned(created: RunFolder) -> None:
    state = created.read_state()
    unknown = dict.fromkeys(("host", "pid", "pid_start", "started_at", "ended_at", "exit_code", "failure"))
    assert [entry["state"] for entry in state.pop("history")] == ["planned"]
    assert state == {"state": "planned", "attempt": 1, "world_size": 3, **unknown}


@pytest.mark.parametrize("exp", ["", "../up", "a/b", ".hidden", "-x", "a b", "x" * 101])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, exp: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a folder"):
        new_run_path(tmp_path, exp)


def test_runs_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_RUNS_DIR", "/data/runs")
    assert default_runs_dir() == Path("/data/runs")
    monkeypatch.delenv("BURST_RUNS_DIR")
    assert default_runs_dir() == Path("runs")


def test_failed_creation_leaves_no_files(tmp_path: Path) -> None:
    bad = {"config.yaml": "seed: 0\n", "config.yaml/inside": "a file cannot be a folder"}
    with pytest.raises(RunFolderError, match=r"abcdef cannot be created: File exists\. Give .* --runs-dir"):
        create_run(tmp_path / "deep" / "runs" / "tiny" / "20260101-000000-abcdef", bad)
    assert list(tmp_path.iterdir()) == []


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    run = create_run(tmp_path / "tiny" / "20260101-000000-abcdef", {"config.yaml": "seed: 0\n"})
    with pytest.raises(RunFolderError):
        create_run(run.path, {"config.yaml": "seed: 1\n"})
    assert (run.path / "config.yaml").read_text() == "seed: 0\n"
    assert [entry.name for entry in run.path.parent.iterdir()] == [run.run_id]


LEGAL = [
    ("planned", "starting"),
    *(("planned", end) for end in ("failed", "cancelled", "oom")),
    *(("starting", state) for state in ("running", "failed", "cancelled", "oom")),
    *(("running", state) for state in ("completed", "failed", "cancelled", "oom")),
    *((end, "starting") for end in ("completed", "failed", "cancelled", "oom")),
]
WAYS = {"planned": [], "starting": ["starting"], "running": ["starting", "running"]}


@pytest.mark.parametrize("old", STATES)
def test_only_the_moves_of_the_diagram_are_made(tmp_path: Path, old: str) -> None:
    way = WAYS.get(old) or ([] if old == "planned" else ["starting", "running", old])
    for new in STATES:
        run = create_run(tmp_path / new, {})
        for state in way:
            run.transition(state)
        if (old, new) in LEGAL:
            run.transition(new)
        else:
            with pytest.raises(RunFolderError, match=f"cannot become {new}"):
                run.transition(new)
        history = ["planned", *way, *([new] if (old, new) in LEGAL else [])]
        entries = run.read_state()["history"]
        assert [(entry["state"], "at" in entry) for entry in entries] == [(state, True) for state in history]
        assert run.read_state()["state"] == history[-1]


def test_started_run_records_its_process(run: RunFolder) -> None:
    started = run.transition("starting")
    assert started["host"] == socket.gethostname()
    assert started["pid"] == os.getpid()
    assert started["pid_start"] == Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert started["exit_code"] is None
    assert started["ended_at"] is None


@pytest.mark.parametrize(
    ("state", "facts", "code"),
    [("completed", {}, 0), ("failed", {}, 1), ("failed", {"exit_code": 2, "failure": {"rank": 1}}, 2)],
)
def test_ended_run_records_its_exit_code(run: RunFolder, state: str, facts: dict[str, Any], code: int) -> None:
    started = run.transition("starting")
    run.transition("running")
    ended = run.transition(state, **facts)
    assert ended["exit_code"] == code
    assert ended["failure"] == facts.get("failure")
    assert started["started_at"] <= ended["ended_at"]


def test_concurrent_writes_of_the_state_are_atomic(run: RunFolder) -> None:
    def write(index: int) -> None:
        for step in range(10):
            run.record(**{f"fact_{index}_{step}": "x" * 2_000})

    open_files = len(list(Path("/proc/self/fd").iterdir()))
    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert run.read_state()["state"] == "planned"
    assert sum(key.startswith("fact_") for key in run.read_state()) == 40
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files


def test_another_attempt_puts_the_records_of_the_last_aside(run: RunFolder) -> None:
    run.transition("starting")
    run.append_metrics({"step": 1})
    run.append_event("phase")
    run.write_summary({"steps": 1})
    run.write_rank_error(0, ValueError("first"))
    run.log_path(socket.gethostname(), 0).with_suffix(".status.json").write_text("{}")  # where it was
    run.transition("failed")
    (run.path / "attempts" / "1").mkdir(parents=True)  # whoever began to put them aside was killed
    state = run.transition("starting")
    assert state["attempt"] == 2
    assert state["exit_code"] is None
    assert run.read_metrics() == []
    assert run.read_summary() is None
    assert run.rank_errors() == []
    kept = sorted(path.name for path in (run.path / "attempts" / "1").iterdir())
    assert kept == ["events.jsonl", "metrics.jsonl", "rank0000.error.json", "rank0000.status.json", "summary.json"]
    assert run.read_events() == []
    assert [attempt.path.name for attempt in run.attempts()] == ["1", run.run_id]


@pytest.mark.parametrize("way", [["starting"], ["starting", "running"]])
def test_a_started_run_restarts_only_after_its_process_ended(run: RunFolder, way: list[str]) -> None:
    for state in way:
        run.transition(state)
    assert run.is_alive() is True
    run.record(pid_start=None)
    assert run.is_alive() is True
    with pytest.raises(RunFolderError, match=f"is {way[-1]}"):
        run.transition("starting")
    run.record(host="elsewhere")
    assert run.is_alive() is None
    run.record(host=socket.gethostname(), pid_start="0")  # the number belongs to another process now
    assert run.is_alive() is False
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        run.record(pid=process.pid)
    assert run.is_alive() is False
    assert run.transition("starting")["attempt"] == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", ""),
        ("\x00\xff", "codec"),
        ('{"state": "flying"}', "state is 'flying', expected one of planned, starting"),
        ('{"state": ["failed"]}', r"state is \['failed'\], expected one of planned, starting"),
        ('{"state": "failed", "attempt": "two"}', "attempt is 'two', expected a number from 1 on"),
        ('{"state": "failed", "attempt": 0}', "attempt is 0, expected a number from 1 on"),
        ('{"state": "failed", "history": null}', "history is None, expected a list"),
    ],
)
def test_damaged_state_is_named_before_anything_moves(run: RunFolder, text: str, why: str) -> None:
    (run.path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunFolderError, match=rf"{run.path}/run\.json is damaged: .*{why}"):
        run.transition("starting")
    assert not (run.path / "attempts").exists()


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        open_run(tmp_path)


def test_a_folder_with_only_a_config_is_a_planned_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    run = open_run(tmp_path / "config.yaml")
    assert run.read_state()["state"] == "planned"


def test_a_state_without_an_attempt_is_the_first_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    run = open_run(tmp_path)
    (tmp_path / "run.json").write_text('{"state": "failed"}')
    assert run.transition("starting")["attempt"] == 2


def test_list_runs_returns_complete_runs_by_time(tmp_path: Path) -> None:
    for name in ("b/20260102-000000-aaaaaa", "a/20260101-000000-ffffff", "a/20260103-000000-000000"):
        create_run(tmp_path / name, {})
    (tmp_path / "a" / ".new-xyz").mkdir()
    (tmp_path / "notes").mkdir()
    assert [run.run_id[:8] for run in list_runs(tmp_path)] == ["20260101", "20260102", "20260103"]
    assert list_runs(tmp_path / "nowhere") == []


def test_numbers_that_are_not_finite_are_null_in_metrics(run: RunFolder) -> None:
    run.append_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert run.read_metrics() == [{"step": 1, "loss": None, "grad_norm": None}]
    assert "NaN" not in (run.path / "metrics.jsonl").read_text()


def test_damaged_lines_of_metrics_are_skipped(run: RunFolder) -> None:
    run.append_metrics({"step": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('garbage\n[1, 2]\n{"step": 2, "lo')
    assert run.read_metrics() == [{"step": 1}]
    run.append_metrics({"step": 3})
    assert run.read_metrics() == [{"step": 1}, {"step": 3}]


def test_last_line_of_metrics_needs_no_newline(run: RunFolder) -> None:
    run.append_metrics({"step": 3})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}')
    assert run.read_metrics() == [{"step": 3}, {"step": 4}]


def test_events_have_a_utc_time(run: RunFolder) -> None:
    run.append_event("checkpoint", step=3)
    first = run.read_events()[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("at"))
    assert first == {"kind": "checkpoint", "step": 3}


def test_saved_steps_are_those_of_checkpoint_events(run: RunFolder) -> None:
    for facts in ({"step": 3}, {}, {"step": "4"}):
        run.append_event("checkpoint", **facts)
    assert run.saved_steps() == [3]


def test_log_path_of_a_hostile_host_name_is_inside_the_run(run: RunFolder) -> None:
    assert run.log_path("node-1.local", 12) == run.path / "logs" / "node-1.local" / "rank0012.log"
    assert run.log_path("../../etc", 0) == run.path / "logs" / "_.._etc" / "rank0000.log"
    assert run.log_dir("..") == run.path / "logs" / "_"


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (ConfigError(["a", "b"]), "config", 2),
        (BurstError("no"), "user", 1),
        (MemoryError("x"), "oom", 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), "oom", 1),
        *(
            (RuntimeError(f"[gloo/transport/tcp/pair.cc:547] {text} [127.0.0.1]:123"), "peer_lost", 1)
            for text in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
        ),
        *((type(name, (Exception,), {})("gone"), "peer_lost", 1) for name in ("DistBackendError", "DistNetworkError")),
        *((kind("gone"), "peer_lost", 1) for kind in (ConnectionError, ConnectionResetError, BrokenPipeError)),
        (ValueError("out of cheese"), "exception", 1),
        (type("Own", (Exception,), {"__module__": "__main__"})("of the program's own file"), "exception", 1),
    ],
)
def test_rank_errors_are_classified(run: RunFolder, error: Exception, kind: str, exit_code: int) -> None:
    run.write_rank_error(3, error, step=7, phase="forward")
    (record,) = run.rank_errors()
    name, measured = type(error).__name__, {key: record.pop(key) for key in ("time_ns", "at", "memory")}
    assert record == {
        **{"kind": kind, "exit_code": exit_code, "message": str(error), "rank": 3, "step": 7, "phase": "forward"},
        **{"host": socket.gethostname(), "pid": os.getpid(), "traceback": "".join(traceback.format_exception(error))},
        "type": name if type(error).__module__ in ("builtins", "__main__") else f"{type(error).__module__}.{name}",
    }
    assert (measured["memory"] is not None) == (kind == "oom")


def test_earliest_rank_error_is_first_whatever_others_are_like(run: RunFolder) -> None:
    (run.path / "logs").rmdir()
    run.write_rank_error(1, ValueError("first" * 10_000))
    (long,) = run.rank_errors()
    assert len(long["message"]) == 4_000
    assert len(long["traceback"]) == 20_000
    run.write_rank_error(0, ValueError("second"))
    assert [record["rank"] for record in run.rank_errors()] == [1, 0]
    (run.log_dir("odd") / "rank0002.error.json").parent.mkdir()
    (run.log_dir("odd") / "rank0002.error.json").write_text('{"rank": 2, "time_ns": "now"}')
    assert [record["rank"] for record in run.rank_errors()] == [2, 1, 0]
    run.log_dir(socket.gethostname()).rename(run.log_dir("elsewhere"))
    run.log_dir(socket.gethostname()).write_text("a file")
    run.write_rank_error(3, ValueError("which is silent then"))
    assert [record["rank"] for record in run.rank_errors()] == [2, 1, 0]
