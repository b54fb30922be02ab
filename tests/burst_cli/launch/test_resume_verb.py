"""`burst resume`: a run that nobody leads is led on, one that ended starts again, one that is led is left alone."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from testkit import ROOT
from testkit.command_line import Burst
from testkit.fake_run import LivingRun
from testkit.run_maker import forget_process, make_run
from testkit.terminal import StrictConsole
from testkit.waiting import wait_for

from burst_cli.launch.take_over import UnknownRunError, resume_action
from cluster.control.attempt import Controller, ControllerBusyError, RunState, controlling
from engine.runs.folder import RunFolder

# --- which way --------------------------------------------------------------------------------------------------------


ASKED = "asking the nodes of tiny/20260101-000000-aaaaaa\n"
TAKEN = "it runs on without a controller: taking it over, attempt 1"
NEXT = "starting attempt 2"


def runs_on(run: RunFolder) -> RunState:
    return RunState({"state": "running"})


def has_ended(run: RunFolder) -> RunState:
    run.transition("failed", failure={"type": "ValueError", "message": "no head", "rank": 0})
    return RunState({"state": "failed"}, problem="a node does not answer")


def nobody_is_asked(run: RunFolder) -> RunState:
    raise AssertionError("nobody is to be asked")


def test_a_run_without_a_leader_is_taken_over_or_starts_again(root: Path) -> None:
    for state, ask, way, said in [
        *((state, runs_on, "take over", f"{ASKED}{TAKEN}\n") for state in ("starting", "running")),
        ("running", has_ended, "start", f"{ASKED}it had ended (failed: rank 0: ValueError: no head); {NEXT}\n"),
        ("planned", nobody_is_asked, "start", ""),
        ("cancelled", nobody_is_asked, "start", f"it had ended (cancelled); {NEXT}\n"),
        ("completed", nobody_is_asked, "done", ""),
    ]:
        run = make_run(root / way / state, state=state)
        if state in ("starting", "running"):
            forget_process(run)
        stream = io.StringIO()
        assert resume_action(run, StrictConsole(file=stream, width=200), ask) == way
        assert stream.getvalue() == said


def test_run_of_which_nobody_knows_or_that_somebody_leads_is_left_alone(root: Path) -> None:
    forget_process(lost := make_run(root))
    console = StrictConsole(file=io.StringIO())
    with pytest.raises(UnknownRunError, match="no answer of tb1") as caught:
        resume_action(lost, console, lambda run: RunState({"state": "running"}, problem="no answer of tb1 (refused)"))
    assert caught.value.exit_code == 3
    led = RunState({"state": "running"}, controller=Controller(4711, "tb2", "today"))
    with pytest.raises(ControllerBusyError, match="process 4711 on tb2"):
        resume_action(lost, console, lambda run: led)
    with controlling(lost), pytest.raises(ControllerBusyError, match=f"process {os.getpid()} on "):  # the lock alone
        resume_action(lost, console, runs_on)


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_run_that_somebody_leads_is_refused_with_the_pid(burst: Burst, root: Path) -> None:
    with LivingRun(root, "wait") as living:
        living.wait_steps()
        make_run(root, "tiny/20990101-000000-aaaaaa", state="completed")  # the newest is not the one that lives
        result = burst("resume")
        assert result.code == 1
        assert f"controlled by process {living.controller.pid} on " in result.err
        assert living.run.read_state()["state"] == "running"


def test_a_failed_run_starts_its_next_attempt_and_a_completed_one_has_nothing_to_resume(
    burst: Burst, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LivingRun(root, "raise") as living:
        assert living.controller.wait(200) == 1
        monkeypatch.setenv("FAKE_MODE", "ok")
        result = burst("resume", "--plain")
        assert result.code == 0, result.err
        assert ("starting attempt 2" in result.err, "completed tiny/" in result.out) == (True, True)
        assert (living.run.path / "attempts" / "1" / "metrics.jsonl").exists()
        again = burst("resume", "--json")
        assert (again.code, again.document["status"], again.document["exit_code"]) == (0, "completed", 0)
        assert f"completed, there is nothing to resume; more: burst report {living.run.run_id}" in burst("resume").out
        state = living.run.read_state()
        assert (state["state"], state["attempt"]) == ("completed", 2)
        (living.run.path / "launch.json").unlink()
        refused = burst("resume")
        assert (refused.code, "`burst launch` did not start this run" in refused.err) == (1, True)


def test_a_copy_of_a_run_is_refused(burst: Burst, root: Path, tmp_path: Path) -> None:
    with LivingRun(root, "raise") as living:
        assert living.controller.wait(200) == 1
    copy = tmp_path / "elsewhere" / living.run.exp / living.run.run_id
    shutil.copytree(living.run.path, copy)

    refused = burst("resume", living.run.run_id, "--runs-dir", str(tmp_path / "elsewhere"))

    assert refused.code == 2
    assert f"was launched in {living.run.path}" in refused.err
    assert living.run.read_state()["attempt"] == 1


def start_resume(root: Path, *argv: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "BURST_RUNS_DIR": str(root)}
    command = [sys.executable, "-m", "burst_cli", "resume", *argv]
    return subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stdout=-1, stderr=-1)


def test_killed_launcher_is_replaced_and_the_run_loses_nothing(burst: Burst, root: Path) -> None:
    with LivingRun(root, "wait") as living:
        living.wait_steps()
        living.kill()
        resumed = start_resume(root, living.run.run_id)
        try:
            # Not the lock: it holds that too while it asks the nodes, and lets go of it before it leads.
            wait_for(lambda: living.run.read_state()["pid"] == resumed.pid, "a new leader")
            assert burst("cancel").code == 0
            _, err = resumed.communicate(timeout=200)
        finally:
            resumed.kill()
        assert (resumed.returncode, "taking it over, attempt 1" in err) == (130, True), err
        state = living.run.read_state()
        assert (state["state"], state["attempt"], len(living.run.read_metrics())) == ("cancelled", 1, 5)


def test_detached_leader_takes_over_in_the_background(burst: Burst, root: Path) -> None:
    with LivingRun(root, "wait", "--detached") as living:
        living.wait_steps()
        living.kill()
        refused = burst("resume", "--hosts", "n1")
        assert (refused.code, "burst cancel it before it gets others" in refused.err) == (2, True)
        (log := living.run.path / "controller.log").symlink_to(root / "of somebody else")
        assert "symbolic links" in burst("resume", "--detach").err
        log.unlink()
        leaving = start_resume(root, "--detach", "--json")
        out, err = leaving.communicate(timeout=200)
        assert leaving.returncode == 0, err
        document = json.loads(out)
        seen = burst("status", "--json").document
        assert (document["detached"], seen["controller"]["detached"]) == (True, True)
        assert document["controller_pid"] == seen["controller"]["pid"]
        assert burst("cancel").code == 0
        assert burst("status").code == 130


@pytest.mark.parametrize("words", [("train.steps=50",), ("tiny", "train.steps=50")])
def test_settings_are_refused_with_what_to_type_instead(burst, words: tuple[str, ...]) -> None:
    result = burst("resume", *words)
    assert result.code == 2
    text = " ".join(result.err.split())
    assert "takes no settings" in text, text
    name = words[0] if len(words) > 1 else "RUN"
    assert f"burst launch exp=NAME train.checkpoint.resume_from={name} train.steps=50" in text
