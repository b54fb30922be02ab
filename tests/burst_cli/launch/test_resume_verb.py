"""`burst resume`: a run that nobody leads is led on, one that ended starts again, one that is led is left alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from testkit import ROOT
from testkit.fake_run import LivingRun
from testkit.run_maker import forget_process, make_run
from testkit.waiting import wait_for

from burst_cli.launch.take_over import UnknownRunError, find_way
from cluster.control.attempt import RunState, controlling
from engine.runs.folder import RunFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def lost(root: Path) -> RunFolder:
    """A run that says it runs, of a process that is gone."""
    run = make_run(root)
    forget_process(run)
    return run


def quiet() -> Console:
    return Console(file=io.StringIO())


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- which way --------------------------------------------------------------------------------------------------------


def test_run_that_goes_on_is_taken_over(lost: RunFolder) -> None:
    console = quiet()
    assert find_way(lost, console, lambda run: RunState({"state": "running"})) == "take over"
    assert "taking it over, attempt 1" in said(console)


def test_run_that_turns_out_to_have_ended_starts_again(lost: RunFolder) -> None:
    def ask(run: RunFolder) -> RunState:
        run.transition("failed", failure={"type": "ValueError", "message": "no head", "rank": 0})
        return RunState({"state": "failed"})

    console = quiet()
    assert find_way(lost, console, ask) == "start"
    assert "it had ended (failed: rank 0: ValueError: no head); starting attempt 2" in said(console)


def test_run_of_which_nobody_knows_is_left_alone(lost: RunFolder) -> None:
    with pytest.raises(UnknownRunError, match="no answer of tb1") as caught:
        find_way(lost, quiet(), lambda run: RunState({"state": "running"}, problem="no answer of tb1 (refused)"))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("state", "way"), [("planned", "start"), ("cancelled", "start"), ("completed", "done")])
def test_run_that_does_not_run_needs_no_question(root: Path, state: str, way: str) -> None:
    def ask(run: RunFolder) -> RunState:
        raise AssertionError("nobody is to be asked")

    assert find_way(make_run(root, state=state), quiet(), ask) == way


def test_run_that_somebody_leads_is_refused_with_the_pid(burst, root: Path) -> None:
    with LivingRun(root, "wait") as living:
        living.wait_steps()
        result = burst("resume")
        assert result.code == 1
        assert f"controlled by process {living.controller.pid} on " in result.err
        assert living.run.read_state()["state"] == "running"


def test_lock_alone_is_enough_to_be_refused(lost: RunFolder) -> None:
    from cluster.control.attempt import ControllerBusyError

    with controlling(lost), pytest.raises(ControllerBusyError, match=f"process {os.getpid()} on "):
        find_way(lost, quiet(), lambda run: RunState({"state": "running"}))


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_completed_run_has_nothing_to_resume_and_a_failed_one_starts_its_next_attempt(
    burst, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LivingRun(root, "raise") as living:
        assert living.controller.wait(200) == 1
        monkeypatch.setenv("FAKE_MODE", "ok")
        result = burst("resume", "--plain")
        assert result.code == 0, result.err
        assert "starting attempt 2" in result.err
        assert "completed tiny/" in result.out
        state = living.run.read_state()
        assert (state["state"], state["attempt"]) == ("completed", 2)
        assert (living.run.path / "attempts" / "1" / "metrics.jsonl").exists()
        again = burst("resume", "--json")
        assert again.code == 0
        assert json.loads(again.out)["status"] == "completed"
        assert living.run.read_state()["attempt"] == 2


def test_killed_launcher_is_replaced_and_the_run_loses_nothing(burst, root: Path) -> None:
    with LivingRun(root, "wait") as living:
        living.wait_steps()
        living.kill()
        with start_resume(root, living.run.run_id) as resumed:
            # Not the lock: it holds that too while it asks the nodes, and lets go of it before it leads.
            wait_for(lambda: living.run.read_state()["pid"] == resumed.pid, "a new leader")
            assert burst("cancel").code == 0
            _, err = resumed.communicate(timeout=200)
            assert resumed.returncode == 130, err
        assert "taking it over, attempt 1" in err
        assert len(living.run.read_metrics()) == 5
        state = living.run.read_state()
        assert (state["state"], state["attempt"]) == ("cancelled", 1)


@contextlib.contextmanager
def start_resume(root: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "BURST_RUNS_DIR": str(root)}
    command = [sys.executable, "-m", "burst_cli", "resume", *argv]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stdout=-1, stderr=-1)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_detached_leader_takes_over_in_the_background(burst, root: Path) -> None:
    with LivingRun(root, "wait", "--detached") as living:
        living.wait_steps()
        living.kill()
        with start_resume(root, "--detach", "--json") as leaving:
            out, err = leaving.communicate(timeout=200)
            assert leaving.returncode == 0, err
        document = json.loads(out)
        assert document["detached"] is True
        seen = json.loads(burst("status", "--json").out)
        assert seen["controller"]["pid"] == document["controller_pid"]
        assert burst("cancel").code == 0
        assert burst("status").code == 130


def test_run_that_no_launcher_started_is_refused(burst, root: Path) -> None:
    run = make_run(root, state="failed")
    (run.path / "launch.json").unlink()
    result = burst("resume")
    assert result.code == 1
    assert "`burst launch` did not start this run" in result.err
