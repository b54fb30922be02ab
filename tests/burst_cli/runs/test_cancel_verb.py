"""`burst cancel`: runs end, wherever they are led, and it is said what ended how."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from testkit.living_run import LivingRun
from testkit.process_table import run_processes
from testkit.run_maker import make_run
from testkit.waiting import wait_for

from burst_cli.runs.cancel import cancelled_text, result_of
from cluster.control.attempt import RunState


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_run_that_is_led_ends_and_so_does_its_leader(burst, root: Path) -> None:
    with LivingRun(root, "wait") as living:
        living.wait_steps()
        result = burst("cancel")
        assert result.code == 0
        assert f"cancelled tiny/{living.run.run_id} after step 5" in result.out
        assert "waiting for its end" in result.err
        assert living.controller.wait(200) == 130
        assert run_processes(living.run.run_id) == []
        assert living.run.read_state()["exit_code"] == 130


def test_run_whose_launcher_was_killed_ends_at_once(burst, root: Path) -> None:
    with LivingRun(root, "ignore") as living:
        living.wait_steps()
        living.kill()
        assert run_processes(living.run.run_id)
        result = burst("cancel", living.run.run_id[-6:], "--now", "--json")
        document = json.loads(result.out)
        assert result.code == document["exit_code"] == 0
        (entry,) = document["runs"]
        assert (entry["status_before"], entry["status"], entry["problem"]) == ("running", "cancelled", None)
        wait_for(lambda: run_processes(living.run.run_id) == [], "the end of all processes", 10.0)


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "oom"])
def test_run_that_has_ended_is_left_as_it_is(burst, root: Path, state: str) -> None:
    run = make_run(root, state=state)
    before = run.read_state()
    result = burst("cancel")
    assert result.code == 0
    assert result.out == f"{state} tiny/{run.run_id}: it had already ended\n"
    assert run.read_state() == before


def test_run_that_never_began_is_cancelled(burst, root: Path) -> None:
    run = make_run(root, state="planned")
    assert burst("cancel", run.run_id).code == 0
    assert run.read_state()["state"] == "cancelled"


def test_all_means_those_that_have_begun_and_not_ended(burst, root: Path) -> None:
    make_run(root, state="completed")
    make_run(root, "tiny/20260102-000000-bbbbbb", state="planned")
    result = burst("cancel", "--all")
    assert (result.code, result.out) == (0, "All runs have ended.\n")
    assert json.loads(burst("cancel", "--all", "--json").out) == {"runs": [], "exit_code": 0}


def test_mistakes_are_named(burst, root: Path) -> None:
    make_run(root, state="starting")
    make_run(root, "tiny/20260102-000000-bbbbbb", state="running")
    assert burst("cancel", "--all", "aaaaaa").code == 2
    several = burst("cancel")
    assert several.code == 2
    names = "tiny/20260102-000000-bbbbbb, tiny/20260101-000000-aaaaaa"
    assert f"2 runs have not ended: {names}. Say which one" in several.err
    assert burst("cancel", "cccccc").code == 2


def test_run_that_no_launcher_started_cannot_be_stopped_from_here(burst, root: Path) -> None:
    run = make_run(root, state="running")
    (run.path / "launch.json").unlink()
    result = burst("cancel")
    assert result.code == 1
    assert "`burst launch` did not start this run" in result.out


def test_nodes_that_cannot_be_reached_are_named_and_the_end_is_unknown(root: Path) -> None:
    run = make_run(root, state="cancelled", nodes={"tb1": 2, "tb2": 2, "tb3": 2}, steps=7)
    text = "tb3: no route to host; its ranks end by themselves 60 s after it last heard of a launcher"
    result = result_of(run, "running", RunState({"state": "cancelled", "leftover": [text]}))
    assert result.to_dict() == {
        **{"run_id": run.run_id, "exp": "tiny", "path": str(run.path), "step": 7},
        **{"status": "cancelled", "status_before": "running", "problem": None, "exit_code": 3},
        "leftover": [text],
    }
    assert cancelled_text(result).plain.splitlines() == [
        f"cancelled tiny/{run.run_id} after step 7",
        f"  may still run: {text}",
    ]


def test_run_that_does_not_end_in_time_is_unknown(root: Path) -> None:
    run = make_run(root, state="running")
    problem = "it was asked to stop, but has not ended"
    result = result_of(run, "running", RunState({"state": "running"}, problem=problem))
    assert result.exit_code == 3
    assert cancelled_text(result).plain.splitlines() == [
        f"not stopped tiny/{run.run_id}",
        f"  {problem}",
    ]


def test_handlers_of_signals_are_restored(burst, root: Path) -> None:
    make_run(root, state="completed")
    before = signal.getsignal(signal.SIGINT)
    burst("cancel")
    assert signal.getsignal(signal.SIGINT) == before
