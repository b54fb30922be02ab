"""`burst launch` as its user meets it: real processes, real signals, what is printed where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_driver import launch
from testkit import PYTHON_PATH, ROOT
from testkit.fault_rig import confirm
from testkit.fault_table import AROUND_RANKS
from testkit.process_table import kill_run, run_processes, wait_until_gone
from testkit.run_maker import make_run
from testkit.terminal import StrictConsole, on_terminal
from testkit.waiting import wait_for

from burst_cli.launch.detach import CONTROLLER_LOG, launch_detached
from cluster.control.attempt import StopRequests, find_controller
from cluster.control.controller import request_cancel, settle
from engine.config.errors import RunError
from engine.runs.folder import RunFolder, list_runs
from engine.runs.process import process_start

DRIVER = Path(__file__).parent / "launch_driver.py"
END_S = 60.0  # start of torchrun on a busy machine takes up to ten seconds
GONE_S, GONE_DETACHED_S = 5.0, 10.0


class Launch:
    """One `burst launch` with the fake trainer, as a process of its own."""

    def __init__(self, folder: Path, mode: str, *flags: str, **streams: Any) -> None:
        self.runs_dir = folder / "runs"
        environment = {**os.environ, "FAKE_MODE": mode, "PYTHONPATH": PYTHON_PATH}
        environment.pop("COLUMNS", None)
        streams = streams or {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, str(DRIVER), str(self.runs_dir), *flags]
        self.process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **streams)
        self.stdout = self.stderr = ""

    @property
    def run(self) -> RunFolder:
        (run,) = list_runs(self.runs_dir)
        return run

    def end(self) -> int:
        """The exit code; afterwards no process of the run may be left."""
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=END_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        left = wait_until_gone(self.run.run_id, GONE_S)
        kill_run(self.run.run_id)
        assert left == []
        return self.process.returncode


# --- real processes ---------------------------------------------------------------------------------------------------


def test_a_completed_run_has_all_its_files(
    tmp_path: Path,
) -> None:
    completed = Launch(tmp_path, "ok", "--real")
    assert completed.end() == 0
    run = completed.run
    names = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}
    host = run.read_state()["host"]
    assert names >= {"config.yaml", "overrides.txt", "run.json", "provenance.json", "plan.sh", f"env/{host}.env"}
    assert names >= {
        "events.jsonl",
        "metrics.jsonl",
        "summary.json",
        *(f"logs/{host}/rank000{rank}.log" for rank in "01"),
    }
    assert (run.path / "overrides.txt").read_text() == "exp=tiny\n"
    assert (run.path / "checkpoints").is_dir()
    provenance = json.loads((run.path / "provenance.json").read_text())
    words = ["sh", "-c", "git rev-parse HEAD"]  # fails where there is no git, or no checkout
    head = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert provenance["versions"]["torch"]
    assert (provenance["git"] or {"sha": ""})["sha"] == head.stdout.strip()  # no checkout, no commit
    assert provenance["hardware"]["cores"] == os.cpu_count()
    assert not {"\x1b", "\r"} & set(completed.stderr + completed.stdout)
    assert re.search(r"^step 5/5  loss 0\.8000 ", completed.stderr, re.MULTILINE)
    assert "\ntrain\n" in completed.stderr
    assert completed.stdout.startswith("completed tiny/")
    assert f"burst report {run.run_id}" in completed.stdout
    assert "step 5/5" not in completed.stdout


def test_failing_rank_gives_one_readable_block_without_its_terminal_escapes(tmp_path: Path) -> None:
    failed = Launch(tmp_path, "raise")
    assert (failed.end(), failed.stdout, failed.stderr.count("FAILED")) == (1, "", 1)
    block = failed.stderr[failed.stderr.index("FAILED") :]
    error = "ValueError: the tenth expert [bold]is missing"
    for text in ("rank 1 on ", "step 3, phase forward", error, "rank0001.log", "what to do: "):
        assert text in block
    assert "\x1b" in failed.run.log_path(failed.run.read_state()["host"], 1).read_text()
    assert "\x1b" not in failed.stderr


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    """While torchrun, two ranks and a grandchild in its own session are alive."""
    launch = Launch(tmp_path, "sleep", "--real")
    try:
        wait_for(lambda: any(len(run.read_metrics()) == 5 for run in list_runs(launch.runs_dir)))
        assert len(run_processes(launch.run.run_id)) >= 4
    finally:
        launch.process.send_signal(signal.SIGINT)
        code = launch.end()
    state = launch.run.read_state()
    assert (code, state["state"], state["exit_code"]) == (130, "cancelled", 130)
    assert ("Ctrl-C: stopping the ranks" in launch.stderr, "Traceback" in launch.stderr) == (True, False)
    assert launch.stdout.startswith("cancelled tiny/")


def test_terminal_that_is_closed_does_not_hurt_the_run(tmp_path: Path) -> None:
    (row,) = (row for row in AROUND_RANKS if row.do == "close stdout")
    reader, writer = os.pipe()
    launch = Launch(tmp_path, "ok", "--plain", stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    code = launch.end()
    confirm(row, launch.run, code, ())


def test_plain_disables_the_live_block(tmp_path: Path) -> None:
    def shown(folder: Path, *flags: str) -> str:
        """What a terminal receives."""
        folder.mkdir()
        begun: list[Launch] = []
        text = on_terminal(lambda end: begun.append(Launch(folder, "ok", *flags, stdin=end, stdout=end, stderr=end)))
        assert begun[0].end() == 0
        assert {"\x1b[2K" in text, f"\x1b[2m{begun[0].run.path}" in text} == {"--plain" not in flags}
        return text

    drawn, lines = shown(tmp_path / "drawn"), shown(tmp_path / "lines", "--plain")
    assert {part in drawn for part in ("\x1b[?25h", "\x1b[1mtiny/", "completed")} == {True}  # the cursor is shown again
    assert "step 5/5" in lines


@pytest.mark.parametrize(("mode", "code"), [("ok", 0), ("config", 2)])
def test_json_is_the_only_thing_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, code: int
) -> None:
    """Of a launch by this very process."""
    monkeypatch.setenv("FAKE_MODE", mode)
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    assert launch(tmp_path / "runs", "--json") == code
    out, err = capsys.readouterr()
    document, (run,) = json.loads(out), list_runs(tmp_path / "runs")
    told = {"run_id": run.run_id, "exp": "tiny", "path": str(run.path), "lost": False, "exit_code": code}
    assert document.items() >= told.items()
    assert (document["leftover"], document["socket_fallback"]) == ([], [])
    heading = f"tiny/{run.run_id}  2 ranks, gloo (on the CPU: 0 visible GPUs for 2 ranks)"
    assert [line for line in err.splitlines() if run.run_id in line][:2] == [heading, str(run.path)]
    if code:
        assert (document["status"], "train.seq_len is odd" in document["failure"]["message"]) == ("failed", True)
    else:
        assert re.search(r"^step 5/5  loss 0\.8000 ", err, re.MULTILINE)  # news of the node may come before or after
        done = {"status": "completed", "steps": 5, "step_time_s": 0.5, "mfu": None, "failure": None}
        assert document.items() >= done.items()


# --- in the background ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where detached runs are made; afterwards neither their processes nor their controllers may be left."""
    yield tmp_path
    (run,) = list_runs(tmp_path / "runs")
    left = [str(process) for process in wait_until_gone(run.run_id, GONE_DETACHED_S)]
    controller = find_controller(run)
    if controller is not None and controller.pid is not None:
        psutil.Process(controller.pid).kill()
        left.append(f"controller {controller.pid}")
    kill_run(run.run_id)
    assert left == []


def detach(folder: Path, mode: str, *flags: str) -> tuple[Launch, RunFolder]:
    """The launcher, once it has returned, and what it left in the background."""
    done = Launch(folder, mode, "--detach", *flags)
    done.stdout, done.stderr = done.process.communicate(timeout=END_S)
    return done, done.run


def ended(run: RunFolder) -> str:
    """The state of a run once nobody leads it any more."""
    wait_for(lambda: find_controller(run) is None)
    return str(run.read_state()["state"])


def test_launcher_returns_once_the_ranks_run_which_outlive_it_and_can_still_be_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done, run = detach(folder, "wait")
    controller = find_controller(run)
    assert done.process.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"burst {verb} {run.run_id}" for verb in ("status", "logs", "cancel")]
    assert controller is not None
    assert controller.pid is not None
    told = f"\x1b[2mit goes on in the background, led by process {controller.pid}\x1b[0m"
    assert done.stderr.splitlines()[-1] == told
    assert os.getsid(controller.pid) == controller.pid  # it hears nothing of a terminal
    assert run.read_state()["lease_s"] is None
    wait_for(lambda: run.read_state()["state"] == "running")
    os.kill(controller.pid, signal.SIGKILL)
    assert ended(run) == "running"
    resolved = settle(run)
    assert (resolved.state, [status.phase for status in resolved.nodes]) == ("running", ["running"])
    assert request_cancel(run, grace_s=0.5).state == "cancelled"
    assert run_processes(run.run_id) == []


def test_detached_run_comes_to_its_end_alone(folder: Path) -> None:
    done, run = detach(folder, "gate", "--json")
    document = json.loads(done.stdout)
    assert (document["run_id"], document["detached"]) == (run.run_id, True)
    (run.path / "gate").touch()
    assert ended(run) == "completed"
    wait_for(lambda: process_start(document["controller_pid"]) is None)  # it says how it went once it leads no more
    log = (run.path / CONTROLLER_LOG).read_text()
    assert re.search(r"^20\S+Z starting the ranks$", log, re.MULTILINE)
    assert re.search(r"^20\S+Z step 5/5  loss 0\.8000 ", log, re.MULTILINE)
    assert ("\ncompleted tiny/" in log, "\x1b" in log) == (True, False)


def test_a_process_in_the_background_that_ends_at_once_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is gone."""
    (tmp_path / "burst_cli").mkdir()
    (tmp_path / "burst_cli/__init__.py").write_text("raise SystemExit('another program')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = make_run(tmp_path, state="planned"), make_run(tmp_path, "tiny/20260102-000000-bbbbbb", state="cancelled")
    for run in ended:
        (run.path / "launch.json").unlink()
    console = StrictConsole(stderr=True)
    with pytest.raises(RunError, match=r"exit code 1 before the nodes ran: error: .*`burst launch` did not start"):
        launch_detached(ended[0], StopRequests(), console, as_json=False)
    assert (ended[0].path / CONTROLLER_LOG).stat().st_mode & 0o777 == 0o600
    (log := ended[1].path / CONTROLLER_LOG).write_text("before\n")
    assert launch_detached(ended[1], StopRequests(), console, as_json=False) == 1
    assert capsys.readouterr().out == f"cancelled tiny/{ended[1].run_id}\n"
    assert log.read_text().startswith("before\nerror: ")


def test_failure_of_the_start_is_shown_in_the_foreground(folder: Path) -> None:
    done, run = detach(folder, "ok", "--broken")
    assert (done.process.returncode, done.stdout, run.read_state()["state"]) == (1, "", "failed")
    assert ("FAILED" in done.stderr, "/no/such/python" in done.stderr) == (True, True)
