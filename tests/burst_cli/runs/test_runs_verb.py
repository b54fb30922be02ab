"""`burst runs`: which runs, in which order, how fast, whatever is damaged."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from testkit.run_maker import forget_process, make_run
from testkit.terminal import styled

from burst_cli.runs.choose import choose_run
from burst_cli.runs.runs import runs_table
from cluster.control.attempt import RunState, controlling
from engine.runs.folder import create_run


def listed(result) -> list[str]:
    return [line.split()[0] for line in result.out.splitlines() if line.split()[0].count("-") == 2]


def test_newest_run_is_first_with_what_a_person_asks_for(burst, root: Path) -> None:
    moment = "2026-01-01T00:00:00.000Z"
    times = {"started_at": moment, "ended_at": moment}  # not those of a test on a machine that is busy in between
    make_run(root, "tiny/20260101-000000-aaaaaa", state="completed", steps=4, nodes={"tb1": 8, "tb2": 8}, **times)
    failure = {"type": "ValueError", "message": "no [bold]head\nat all", "rank": 3, "host": "tb1"}
    make_run(root, "big/20260201-000000-bbbbbb", state="failed", failure=failure, **times)
    result = burst("runs")
    assert result.code == 0
    assert [" ".join(line.split()) for line in result.out.splitlines()] == [
        "nodes x",
        "run state step MFU loss time ranks",
        "big/20260201-000000-bbbbbb failed 0/200 – – 0:00 1 x 2 rank 3 on tb1: ValueError: no [bold]head at all",
        "tiny/20260101-000000-aaaaaa completed 4/200 25% 1.0000 0:00 2 x 8",
    ]


def test_runs_are_filtered(burst, root: Path) -> None:
    for day in range(1, 5):
        make_run(root, f"tiny/2026010{day}-000000-aaaaaa", state="completed" if day % 2 else "cancelled")
    make_run(root, "big/20260105-000000-bbbbbb", state="completed")
    assert len(listed(burst("runs", "--state", "completed"))) == 3
    assert listed(burst("runs", "--exp", "big")) == ["big/20260105-000000-bbbbbb"]
    limited = burst("runs", "--limit", "2", "--exp", "tiny")
    assert listed(limited) == ["tiny/20260104-000000-aaaaaa", "tiny/20260103-000000-aaaaaa"]
    assert "2 older runs: --limit 4" in limited.out
    assert burst("runs", "--state", "finished").code == 2
    for words in (("--state", "oom"), ("--exp", "none")):
        assert burst("runs", *words).out.startswith(f"No runs of this kind in {root}. Start one with")
    assert listed(burst("runs", "--exp", "tiny", "--limit", "4")) == listed(burst("runs", "--exp", "tiny"))


def test_run_whose_launcher_is_gone_is_lost_until_somebody_controls_it(burst, root: Path) -> None:
    run = make_run(root)
    assert re.search(r" running .*\d:\d\d ", burst("runs").out)
    forget_process(run)
    assert " lost " in burst("runs").out
    assert len(listed(burst("runs", "--state", "lost"))) == len(listed(burst("runs", "--state", "running"))) == 1
    with controlling(run):
        assert " running " in burst("runs").out


def test_json_holds_the_records_of_all_runs(burst, root: Path) -> None:
    make_run(root, state="completed", steps=3)
    run = make_run(root, "tiny/20260102-000000-bbbbbb", world_size=6)
    forget_process(run)
    document = json.loads(burst("runs", "--json").out)
    newest, oldest = document["runs"]
    assert document["total"] == 2
    told = {"run_id": run.run_id, "exp": "tiny", "status": "running", "path": str(run.path), "lost": True, "steps": 0}
    told |= {"started_at": run.read_state()["started_at"], "ended_at": None, "exit_code": None, "failure": None}
    missing = f"{run.path}/config.yaml: cannot read this configuration: No such file or directory"
    told |= {"world_size": 6, "problems": [missing]}
    assert newest.items() >= told.items()  # and the figures of a summary
    assert (oldest["lost"], oldest["steps"], oldest["final_train_loss"]) == (False, 3, 4 / 3)


def test_damaged_runs_are_listed(burst, root: Path) -> None:
    make_run(root, state="failed", failure={"type": "E\x1b[2J", "message": "\x1b]0;title\x07gone\r", "rank": 0})
    damaged = make_run(root, "tiny/20260102-000000-bbbbbb")
    (damaged.path / "run.json").write_text('{"state": "dancing"}')
    (damaged.path / "launch.json").write_text("[" * 100_000)
    (damaged.path / "metrics.jsonl").write_bytes(b'\xff\xfe{"step": 7\n{"step": "x"}\n[]\n')
    result = burst("runs")
    assert (result.code, len(listed(result)), "\x1b" in result.out) == (0, 2, False)
    assert [word for word in ("unreadable", "dancing", "rank 0: E: gone") if word not in result.out] == []
    newest, problems = burst("runs", "--json").document["runs"][0], ("run.json is damaged", "config.yaml")
    assert newest["status"] == "unreadable"
    assert [text.split(":")[0] for text in newest["problems"]] == [f"{damaged.path}/{text}" for text in problems]


def test_a_state_is_seen_by_its_colour(root: Path) -> None:
    colours = {
        **{"planned": "dim", "starting": "cyan", "running": "cyan", "completed": "green", "failed": "red"},
        **{"oom": "red", "cancelled": "yellow", "lost": "bold magenta", "unreadable": "bold red"},
    }
    run = make_run(root)
    entries = [(run, RunState({"state": state}, is_lost=state == "lost", problem="why")) for state in colours]
    found = [piece for piece in styled(runs_table(entries, 200)) if piece[0] in (*colours, "why")]
    assert found == [piece for colour in colours.items() for piece in (colour, ("why", "dim"))]


def test_narrow_table_of_runs_has_the_main_figures(burst, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, steps=1)
    run.append_metrics({"step": 1, "loss": 4.0, "mfu": 0.25, "tokens_per_s_per_device": 6200.0})
    run.transition("failed", failure={"type": "ValueError", "message": "x" * 300})
    for width, kept in [("40", "6.2K 4.0000"), ("60", "6.2K 4.0000 25%"), ("120", "1/200 6.2K 25% 4.0000")]:
        monkeypatch.setenv("COLUMNS", width)
        *header, line = burst("runs").out.splitlines()
        assert all(len(text) <= int(width) for text in (*header, line))
        assert set(kept.split()) <= set(line.split())
        assert line.split()[0] == (f"tiny/{run.run_id}" if width == "120" else "tiny/aaaaaa")
        assert ("failed" in line, "Value" in line) == (True, width != "40")


def test_no_runs_is_no_error(burst, root: Path) -> None:
    result = burst("runs")
    assert (result.code, "No runs in" in result.out) == (0, True)
    assert json.loads(burst("runs", "--json").out) == {"runs": [], "total": 0}


def test_hundreds_of_runs_are_listed_within_a_second(burst, root: Path) -> None:
    for number in range(200):
        create_run(root / "tiny" / f"20260101-{number:06d}-aaaaaa", {}).transition("starting")
    begin = time.process_time()
    result = burst("runs", "--limit", "200")
    assert time.process_time() - begin < 1.0
    assert len(listed(result)) == 200


def test_all_verbs_show_the_same_speed_of_an_ended_run(burst, root: Path) -> None:
    speeds = [
        900.0,
        700.0,
        800.0,
        100.0,
        130.0,
        110.0,
        120.0,
        5000.0,
    ]  # the first three are warm-up, the last an oddity
    for state in ("completed", "failed"):
        run = make_run(root / state)
        for step, speed in enumerate(speeds, start=1):
            run.append_metrics({"step": step, "loss": 1.0, "tokens_per_s_per_device": speed, "mfu": speed / 1e4})
        run.transition(state)
        where = ("--runs-dir", str(root / state))
        (record,) = burst("report", "--json", *where).document["runs"]
        status = burst("status", "--json", *where).document
        assert record["tokens_per_s_per_device"] == status["tokens_per_s_per_device"] == 120.0  # the middle of five
        assert [text for text in ("120", "1.2%") if text not in burst("runs", *where).out.split()] == []
        assert "tokens/s/device 120   MFU 1.2%" in burst("status", *where).out


def test_an_empty_folder_says_where_other_runs_may_be(burst, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BURST_RUNS_DIR", raising=False)
    for result in (burst("runs", "--runs-dir", str(root / "none")), burst("status", "--runs-dir", str(root / "none"))):
        text = " ".join(f"{result.out} {result.err}".split())
        assert f"{root}/none" in text
        assert "name it with --runs-dir or BURST_RUNS_DIR" in text


def test_lines_in_a_pipe_are_no_wider_than_what_they_hold(burst, root: Path) -> None:
    make_run(root, state="failed", failure={"type": "ValueError", "message": "short"})
    assert max(map(len, burst("runs").out.splitlines())) < 110


def test_after_an_evaluation_an_experiment_means_the_run_that_trained(root: Path) -> None:
    trained = make_run(root, "tiny/20260101-000000-aaaaaa", state="completed")
    evaluation = make_run(root, "tiny/20260102-000000-bbbbbb", state="completed")
    (evaluation.path / "config.yaml").write_text("train: {evaluate_only: true}\n")
    assert choose_run("tiny", root) == trained
    assert choose_run(None, root) == trained
    assert choose_run("bbbbbb", root) == evaluation
