from __future__ import annotations

import itertools
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
from sweep_driver import FAKE, Quiet, plan_of, runner_of
from testkit import ROOT
from testkit.command_line import Burst
from testkit.waiting import wait_for

from burst_cli.runs.sweeps import SweepError, SweepFolder, find_sweep
from burst_cli.sweep.request import Retry, SweepRequest
from burst_cli.sweep.runner import Lane, SweepRunner, last_words
from burst_cli.sweep.sweeping import open_sweep
from engine.config.errors import ConfigError
from engine.runs.folder import RunFolder, create_run, list_runs

DRIVER = [sys.executable, str(Path(__file__).parent / "sweep_driver.py")]


class Stops:
    """Requests to stop, as a test makes them."""

    count = 0
    cause = ""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("FAKE_CELL_S", "0.05")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    return tmp_path / "ledger"


def sweep_of(runs_dir: Path, count: int, modes: Mapping[int, str] = {}) -> SweepFolder:
    return open_sweep(runs_dir, plan_of(count, modes))[0]


def run_sweep(runs_dir: Path, count: int, modes: Mapping[int, str] = {}, **typed: Any) -> list[dict[str, Any]]:
    return runner_of(sweep_of(runs_dir, count, modes), Stops(), **typed).run()


def starts(ledger: Path) -> int:
    return ledger.read_text().count("start")


def states(cells: list[dict[str, Any]]) -> list[str]:
    return [cell["state"] for cell in cells]


# --- which cells run, how often ---------------------------------------------------------------------------------------


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
    run_sweep(tmp_path, 4, modes, lanes=2, retry=[Retry.oom])
    assert starts(ledger) == 5
    assert len(list_runs(tmp_path)) == 3  # the second attempt of a cell is an attempt of the same run


def test_cell_that_is_not_expected_to_fit_runs_only_by_force(tmp_path: Path, ledger: Path) -> None:
    plan = plan_of(2)
    short = replace(plan, cells=(replace(plan.cells[0], short_of_memory="19 GiB of 6"), plan.cells[1]))
    folder, _ = open_sweep(tmp_path, short)
    first = runner_of(folder, Stops()).run()
    assert (states(first), first[0]["result"]["predicted"]) == (["oom", "completed"], True)
    assert states(runner_of(folder, Stops(), force=True, config_dir=[tmp_path]).run()) == ["completed"] * 2
    words = [line.partition(" launch ")[2] for line in ledger.read_text().splitlines()]
    plain = "number={} mode=ok --run-path --plain"
    assert words == [plain.format(1), f"{plain.format(0)} --config-dir {tmp_path} --force"]


def test_failures_leave_the_rest_waiting_and_a_launch_that_is_always_lost_is_one(tmp_path: Path, ledger: Path) -> None:
    cells = run_sweep(tmp_path, 3, {0: "refused", 1: "refused"}, max_failures=2)
    assert states(cells) == ["failed", "failed", "pending"]
    suicide = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    (cell,) = replace(runner_of(sweep_of(tmp_path / "lost", 1), Stops()), command=suicide).run()
    assert (cell["state"], cell["launches"]) == ("failed", 3)
    assert "lost 3 times" in cell["result"]["message"]


_INSTEAD_OF_LAUNCHES = f"""
import os, runpy, sys
if sys.orig_argv[1:5] == ["-P", "-m", "burst_cli", "launch"]:
    try:
        runpy.run_path({str(FAKE[1])!r}, run_name="__main__")
    except SystemExit as end:
        os._exit(end.code)
"""


def test_as_many_cells_run_at_a_time_as_parallel_says(
    burst: Burst, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ledger.parent / "sitecustomize.py").write_text(_INSTEAD_OF_LAUNCHES)  # which every Python runs first
    monkeypatch.setenv("PYTHONPATH", f"{ledger.parent}:{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("FAKE_TOGETHER", "2")  # the first waits for another, however long that takes to start
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # cells must not share GPUs
    words = ("sweep", "exp=tiny", "train.seq_len=512,1024,1536,2048", "--parallel", "2", "--force")
    result = burst(*words, "--json")
    assert result.code == 0, result.err
    document = result.document
    folder, cells = ledger.parent / "runs/sweeps" / document["sweep_id"], document["cells"]
    assert document == {"sweep_id": folder.name, "path": str(folder), "cells": SweepFolder(folder).cells()}
    assert {(cell["lane"], cell["exit_code"]) for cell in cells} == {("this machine 1", 0), ("this machine 2", 0)}
    moments = sorted((cell[key], change) for cell in cells for key, change in (("started_at", 1), ("ended_at", -1)))
    assert max(itertools.accumulate(change for _, change in moments)) == 2
    state = Path(cells[3]["run_path"]) / "run.json"
    state.write_text(state.read_text().replace("completed", "failed"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    again = burst(*words)  # all is there already
    assert (again.code, starts(ledger)) == (1, 4)
    assert f"\x1b[2msweep {folder.name} goes on in {folder}\x1b[0m\n" in again.err
    assert "train.seq_len=1536" in again.out
    assert again.out.splitlines()[-2:] == [
        "4 of 4 cells done: 3 completed, 1 failed",
        f"more: burst report --sweep {folder.name} --output report.html",
    ]


def test_launches_are_of_this_code_whatever_lies_where_the_sweep_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "burst_cli").mkdir()
    (tmp_path / "burst_cli" / "__init__.py").write_text("raise SystemExit('another program')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    request = SweepRequest(runs_dir=tmp_path)
    (cell,) = SweepRunner(sweep_of(tmp_path, 1), request, (Lane("here"),), Quiet(), Stops()).run()
    assert cell["result"]["message"] == "2 problems in the configuration"


# --- taken up again ---------------------------------------------------------------------------------------------------


def begun_cell(folder: SweepFolder, number: int, lane: str, *ends: str) -> RunFolder:
    """As a killed sweep leaves a cell whose launch had begun, and was cancelled with it if `ends` says so."""
    path = folder.path.parent.parent / f"fake/2026010{number + 1}-000000-aaaaaa"
    run = create_run(path, {"config.yaml": "", "mode": "ok"}, world_size=1)
    for state in ("starting", "running", *ends):
        run.transition(state)
    folder.update_cell(f"cell{number:02d}", run_path=str(path), lane=lane, launches=1)
    return run


def test_run_that_the_launch_of_a_killed_sweep_cancels_on_its_way_out_is_taken_up_at_once(
    tmp_path: Path, ledger: Path
) -> None:
    folder = sweep_of(tmp_path, 1)
    run = begun_cell(folder, 0, "lane 0")  # by this process, which lives

    class Leaves(Quiet):
        def note(self, text: str) -> None:
            assert "still runs under another launcher" in text
            run.transition("cancelled")

    assert states(runner_of(folder, Stops(), view=Leaves()).run()) == ["completed"]
    assert (starts(ledger), list_runs(tmp_path)) == (1, [run])


def test_begun_cells_go_on_first_and_in_their_lanes_and_anew_where_their_lane_is_gone(
    tmp_path: Path, ledger: Path
) -> None:
    folder = sweep_of(tmp_path, 4)
    runs = {number: begun_cell(folder, number, f"lane {2 - number}", "cancelled") for number in (1, 2)}
    gone = begun_cell(folder, 3, "a lane of other nodes", "cancelled")
    cells = run_sweep(tmp_path, 4, lanes=2)
    assert states(cells) == ["completed"] * 4
    taken = [(cell["lane"], cell["run_path"]) for cell in cells[1:3]]
    assert taken == [(f"lane {2 - number}", str(runs[number].path)) for number in (1, 2)]
    first = ledger.read_text().splitlines()[:2]
    assert sorted(first) == sorted(f"start {run.path.name} resume --plain" for run in runs.values())
    assert cells[3]["lane"].startswith("lane ")
    assert cells[3]["run_path"] != str(gone.path)


def test_stop_cancels_the_running_cell_which_is_taken_up_next_time(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CELL_S", "30")
    stop, seen = Stops(), set[str]()

    class StopsOnceItRuns(Quiet):
        def tick(self, cells: Any) -> None:
            seen.update(states(cells))
            path = Path(cells[0]["run_path"] or "none")
            if not (path / "metrics.jsonl").exists() and (path / "run.json").exists():
                is_running = RunFolder(path).read_state()["state"] == "running"
                stop.count = 1 if is_running else stop.count  # a request is not taken back when the run has ended

    first = runner_of(sweep_of(tmp_path, 2), stop, view=StopsOnceItRuns()).run()
    assert (states(first), seen) == (["cancelled", "pending"], {"cancelled", "pending", "running"})
    monkeypatch.setenv("FAKE_CELL_S", "0.05")
    assert states(run_sweep(tmp_path, 2)) == ["completed"] * 2
    assert len(list_runs(tmp_path)) == 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_sweep_killed_at_random_moments_runs_every_cell_exactly_once(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setenv("FAKE_CELL_S", "0.3")
    for _ in range(3):
        process = subprocess.Popen([*DRIVER, str(tmp_path), "5"])
        time.sleep(rng.uniform(0.3, 1.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run([*DRIVER, str(tmp_path), "5"], timeout=200).returncode == 0
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


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_sweep_of_two_controllers_of_other_cells_or_damaged_is_refused(tmp_path: Path, ledger: Path) -> None:
    folder = sweep_of(tmp_path, 1)
    lock = folder.path / "sweep.lock"
    lock.write_text("9" * 19)
    with folder.locked(), pytest.raises(SweepError, match=f"process {os.getpid()}; stop"):
        run_sweep(tmp_path, 1)
    assert [path.stat().st_mode & 0o777 for path in (lock, folder.path / "cells")] == [0o600, 0o700]
    assert not ledger.exists()
    with pytest.raises(SweepError, match="another sweep of the same name"):
        sweep_of(tmp_path, 2)
    for text, said in (
        ("{", "is damaged"),
        ('{"format": 1, "cells": [7]}', "does not describe a sweep"),
        ('{"format": 2, "cells": []}', "does not describe a sweep"),
        ('{"format": 1, "cells": [{"id": "other"}]}', "holds another sweep"),
    ):
        folder.file.write_text(text)
        with pytest.raises(SweepError, match=said):
            sweep_of(tmp_path, 1)


def test_sweep_is_found_by_how_its_id_begins_and_last_words_are_the_error_of_a_launch(tmp_path: Path) -> None:
    folder = sweep_of(tmp_path, 1)
    assert find_sweep(tmp_path, "fake") == folder == find_sweep(tmp_path, "0")
    with pytest.raises(ConfigError, match="did you mean fake-0"):
        find_sweep(tmp_path, "fake-1")
    (tmp_path / "log").write_text("error: bad\nwarming up\nerror: no such node\nbye\n\n")
    (tmp_path / "other").write_text("warming up\nerrors: 0\n\n")
    words = [last_words(tmp_path / name) for name in ("log", "other", "absent")]
    assert words == ["no such node", "errors: 0", "it said nothing"]
