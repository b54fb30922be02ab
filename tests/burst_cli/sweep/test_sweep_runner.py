from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep_driver import FAKE, Quiet, manner_of, plan_of
from testkit.waiting import wait_for

from burst_cli.sweep.runner import SweepManner, SweepRunner, last_words
from burst_cli.sweep.store import SweepError, SweepFolder, find_sweep, open_sweep
from engine.config.errors import ConfigError
from engine.runs.folder import RunFolder, create_run, list_runs

DRIVER = Path(__file__).parent / "sweep_driver.py"


class Stops:
    """Requests to stop, as a test makes them."""

    count = 0
    cause = ""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("FAKE_CELL_S", "0.05")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    return tmp_path / "ledger"


def run_sweep(runs_dir: Path, count: int, modes: Mapping[int, str] = {}, **settings: Any) -> list[dict[str, Any]]:
    folder, _ = open_sweep(runs_dir, plan_of(count, modes))
    return SweepRunner(folder, manner_of(runs_dir, **settings), Quiet(), Stops()).run()


def starts(ledger: Path) -> int:
    return ledger.read_text().count("start")


def states(cells: list[dict[str, Any]]) -> list[str]:
    return [cell["state"] for cell in cells]


def test_every_cell_runs_once_whatever_its_result_and_retry_runs_only_what_it_names(
    tmp_path: Path, ledger: Path
) -> None:
    modes = {0: "failed", 1: "oom", 2: "refused"}
    cells = run_sweep(tmp_path, 4, modes, lanes=2)
    assert states(cells) == ["failed", "oom", "failed", "completed"]
    assert [cell["result"]["message"] for cell in cells] == ["it failed", "it oom", "the nodes are on strike", None]
    assert {cell["lane"] for cell in cells} == {"lane 0", "lane 1"}
    assert run_sweep(tmp_path, 4, modes) == cells
    assert starts(ledger) == 4
    run_sweep(tmp_path, 4, modes, lanes=2, retry=frozenset({"oom"}))
    assert starts(ledger) == 5
    assert len(list_runs(tmp_path)) == 3  # the second attempt of a cell is an attempt of the same run


def test_cell_that_is_not_expected_to_fit_runs_only_by_force(tmp_path: Path, ledger: Path) -> None:
    plan = plan_of(2)
    short = replace(plan, cells=(replace(plan.cells[0], short_of_memory="19 GiB of 6"), plan.cells[1]))
    folder, _ = open_sweep(tmp_path, short)
    first = SweepRunner(folder, manner_of(tmp_path), Quiet(), Stops()).run()
    assert (states(first), first[0]["result"]["predicted"]) == (["oom", "completed"], True)
    forced = manner_of(tmp_path, arguments=("--force",))
    assert states(SweepRunner(folder, forced, Quiet(), Stops()).run()) == ["completed"] * 2
    assert starts(ledger) == 2


def test_run_that_the_launch_of_a_killed_sweep_cancels_on_its_way_out_is_taken_up_at_once(
    tmp_path: Path, ledger: Path
) -> None:
    run = create_run(tmp_path / "fake/20260101-000000-aaaaaa", {"config.yaml": "", "mode": "ok"}, world_size=1)
    for state in ("starting", "running"):
        run.transition(state)  # by this process, which lives
    folder, _ = open_sweep(tmp_path, plan_of(1))
    folder.update_cell("cell00", run_path=str(run.path), lane="lane 0", launches=1)

    class Leaves(Quiet):
        def note(self, text: str) -> None:
            assert "still runs under another launcher" in text
            run.transition("cancelled")

    assert states(SweepRunner(folder, manner_of(tmp_path), Leaves(), Stops()).run()) == ["completed"]
    assert (starts(ledger), list_runs(tmp_path)) == (1, [run])


_INSTEAD_OF_LAUNCHES = f"""
import os, runpy, sys
if sys.orig_argv[1:5] == ["-P", "-m", "burst_cli", "launch"]:
    try:
        runpy.run_path({str(FAKE[1])!r}, run_name="__main__")
    except SystemExit as end:
        os._exit(end.code)
"""


def test_as_many_cells_run_at_a_time_as_parallel_says(burst, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ledger.parent / "sitecustomize.py").write_text(_INSTEAD_OF_LAUNCHES)  # which every Python runs first
    monkeypatch.setenv("PYTHONPATH", f"{ledger.parent}:{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("FAKE_TOGETHER", "2")  # the first waits for another, however long that takes to start
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # cells must not share GPUs
    words = ("sweep", "exp=tiny", "train.seq_len=512,1024,1536,2048", "--parallel", "2", "--force")
    result = burst(*words, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    folder, cells = ledger.parent / "runs/sweeps" / document["sweep_id"], document["cells"]
    assert document == {"sweep_id": folder.name, "path": str(folder), "cells": SweepFolder(folder).cells()}
    assert {cell["lane"] for cell in cells} == {"this machine 1", "this machine 2"}
    moments = sorted((cell[key], change) for cell in cells for key, change in (("started_at", 1), ("ended_at", -1)))
    assert max(itertools.accumulate(change for _, change in moments)) == 2
    again = burst(*words)  # all is there already
    assert (again.code, starts(ledger)) == (0, 4)
    assert f"sweep {folder.name} goes on in {folder}\n" in again.err
    assert "train.seq_len=1536" in again.out
    assert again.out.splitlines()[-2:] == [
        "4 of 4 cells done: 4 completed",
        f"more: burst report --sweep {folder.name} --output report.html",
    ]


def begun_cell(folder: SweepFolder, number: int, lane: str) -> RunFolder:
    """As a killed sweep leaves a cell whose launch had begun and was cancelled with it."""
    path = folder.path.parent.parent / f"fake/2026010{number + 1}-000000-aaaaaa"
    run = create_run(path, {"config.yaml": "", "mode": "ok"}, world_size=1)
    for state in ("starting", "running", "cancelled"):
        run.transition(state)
    folder.update_cell(f"cell{number:02d}", run_path=str(path), lane=lane, launches=1)
    return run


def test_begun_cells_go_on_first_and_in_their_lanes(tmp_path: Path, ledger: Path) -> None:
    folder, _ = open_sweep(tmp_path, plan_of(3))
    runs = {number: begun_cell(folder, number, f"lane {2 - number}") for number in (1, 2)}
    cells = run_sweep(tmp_path, 3, lanes=2)
    assert states(cells) == ["completed"] * 3
    assert [(cell["lane"], cell["run_path"]) for cell in cells[1:]] == [
        (f"lane {2 - number}", str(runs[number].path)) for number in (1, 2)
    ]
    first = ledger.read_text().splitlines()[:2]
    assert sorted(first) == sorted(f"start {run.path.name} resume" for run in runs.values())


def test_begun_cells_whose_lane_is_gone_begin_anew(tmp_path: Path, ledger: Path) -> None:
    folder, _ = open_sweep(tmp_path, plan_of(1))
    run = begun_cell(folder, 0, "a lane of other nodes")
    (cell,) = run_sweep(tmp_path, 1)
    assert (cell["state"], cell["lane"]) == ("completed", "lane 0")
    assert cell["run_path"] != str(run.path)


def test_max_failures_leaves_the_rest_waiting(tmp_path: Path, ledger: Path) -> None:
    cells = run_sweep(tmp_path, 3, {0: "refused", 1: "refused"}, max_failures=2)
    assert states(cells) == ["failed", "failed", "pending"]


def test_stop_cancels_the_running_cell_which_is_taken_up_next_time(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CELL_S", "30")
    folder, _ = open_sweep(tmp_path, plan_of(2))
    stop = Stops()

    class StopsOnceItRuns(Quiet):
        def tick(self, cells: Any) -> None:
            path = cells[0]["run_path"]
            if path and (Path(path) / "metrics.jsonl").exists() is False and (Path(path) / "run.json").exists():
                is_running = RunFolder(Path(path)).read_state()["state"] == "running"
                stop.count = 1 if is_running else stop.count  # a request is not taken back when the run has ended

    first = SweepRunner(folder, manner_of(tmp_path), StopsOnceItRuns(), stop).run()
    assert states(first) == ["cancelled", "pending"]
    monkeypatch.setenv("FAKE_CELL_S", "0.05")
    assert states(run_sweep(tmp_path, 2)) == ["completed"] * 2
    assert len(list_runs(tmp_path)) == 2


def test_two_controllers_of_one_sweep_are_refused(tmp_path: Path, ledger: Path) -> None:
    folder, _ = open_sweep(tmp_path, plan_of(1))
    with folder.locked(), pytest.raises(SweepError, match=f"process {os.getpid()}"):
        run_sweep(tmp_path, 1)
    assert not ledger.exists()


def test_other_cells_under_the_same_name_are_refused(tmp_path: Path) -> None:
    open_sweep(tmp_path, plan_of(1))
    with pytest.raises(SweepError, match="another sweep of the same name"):
        open_sweep(tmp_path, plan_of(2))


def test_launch_that_is_always_lost_becomes_a_failed_cell(tmp_path: Path, ledger: Path) -> None:
    folder, _ = open_sweep(tmp_path, plan_of(1))
    suicide = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    manner = manner_of(tmp_path)
    runner = SweepRunner(folder, type(manner)(tmp_path, manner.lanes, command=suicide), Quiet(), Stops())
    (cell,) = runner.run()
    assert (cell["state"], cell["launches"]) == ("failed", 3)
    assert "lost 3 times" in cell["result"]["message"]


def test_launches_are_of_this_code_whatever_lies_where_the_sweep_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "burst_cli").mkdir()
    (tmp_path / "burst_cli" / "__init__.py").write_text("raise SystemExit('another program')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder, _ = open_sweep(tmp_path, plan_of(1))
    (cell,) = SweepRunner(folder, SweepManner(tmp_path), Quiet(), Stops()).run()
    assert cell["result"]["message"] == "2 problems in the configuration"


def test_damaged_sweep_is_named(tmp_path: Path) -> None:
    folder, _ = open_sweep(tmp_path, plan_of(1))
    (folder.path / "sweep.json").write_text("{")
    with pytest.raises(SweepError, match="is damaged"):
        folder.read()
    for cells, said in (("[7]", "does not describe a sweep"), ('[{"id": "other"}]', "holds another sweep")):
        (folder.path / "sweep.json").write_text(f'{{"format": 1, "cells": {cells}}}')
        with pytest.raises(SweepError, match=said):
            open_sweep(tmp_path, plan_of(1))


def test_sweep_is_found_by_its_id_or_how_it_begins(tmp_path: Path) -> None:
    folder, _ = open_sweep(tmp_path, plan_of(1))
    assert find_sweep(tmp_path, "fake") == folder == find_sweep(tmp_path, "0")
    with pytest.raises(ConfigError, match="did you mean fake-0"):
        find_sweep(tmp_path, "fake-1")


def test_last_words_are_the_error_a_launch_printed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("warming up\nerror: no such node\n\n")
    assert last_words(log) == "no such node"
    assert last_words(tmp_path / "absent") == "it said nothing"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_sweep_killed_at_random_moments_runs_every_cell_exactly_once(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setenv("FAKE_CELL_S", "0.3")
    for _ in range(3):
        process = subprocess.Popen([sys.executable, str(DRIVER), str(tmp_path), "5"])
        time.sleep(rng.uniform(0.3, 1.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run([sys.executable, str(DRIVER), str(tmp_path), "5"], timeout=200).returncode == 0
    cells = SweepFolder(tmp_path / "sweeps" / "fake-0").cells()
    assert states(cells) == ["completed"] * 5
    runs = list_runs(tmp_path)
    assert {cell["run_path"] for cell in cells} == {str(run.path) for run in runs}
    histories = [[move["state"] for move in run.read_state()["history"]] for run in runs]
    assert [history.count("completed") for history in histories] == [1] * 5
    wait_for(lambda: not _strays(tmp_path), "the end of launches that outlived their sweep")


def _strays(runs_dir: Path) -> list[str]:
    """Launches that run."""
    found = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if "fake_sweep_launch" in line and str(runs_dir) in line]
