"""What becomes of ranks when somebody kills: them, torchrun or their supervisor. Real daemons and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from testkit.supervise_rig import PYTHON_PATH, UNHURRIED, Rig, is_gone, kill, names_of, new_run_id
from testkit.waiting import wait_for

from cluster.agent.folder import read_json, take_lock


def test_death_of_a_rank_is_known_with_its_signal_and_moment(rig: Rig) -> None:
    rig.start(environment=UNHURRIED)
    before = time.time_ns()
    kill(rig.ranks()["1"])
    deaths = wait_for(lambda: rig.status()["supervisor"]["deaths"], "the death")
    assert (deaths[0]["rank"], deaths[0]["exit_code"]) == (1, -9)
    assert before <= deaths[0]["at_ns"] < time.time_ns()
    outcome = rig.outcome()
    assert (outcome["exit_code"], outcome["cause"], outcome["deaths"][0]) == (1, "exit", deaths[0])
    assert outcome["memory"]["evidence"] is None
    assert outcome["memory"]["memory"]["capacity_bytes"] > 2**30


def test_a_killed_command_takes_its_ranks_along(rig: Rig) -> None:
    rig.start("stubborn")
    kill(rig.command())
    outcome = rig.outcome()
    assert (outcome["exit_code"], outcome["cause"], outcome["leftover_pids"]) == (-9, "exit", [])
    assert sorted((death["rank"], death["exit_code"]) for death in outcome["deaths"]) == [(0, -9), (1, -9)]


def test_killed_supervisor_takes_its_ranks_along_and_what_it_left_ends_with_the_next_attempt_or_a_sweep(
    rig: Rig,
) -> None:
    for _ in range(2):
        pid = rig.start("children")
        wait_for(lambda: names_of(rig.processes()).count("sleep") == 2, "two, and no older ones")
        ranks = rig.ranks().values()
        kill(pid)
        wait_for(lambda: all(map(is_gone, [pid, *ranks])), "the end of the supervisor and its ranks")  # noqa: B023
        assert rig.status()["phase"] == "lost"
        assert rig.processes() != []  # a child in a session of its own
    assert rig.sweep() == []
    assert rig.processes() == []


def test_sweep_waits_for_a_process_that_dies_to_let_go_of_its_lock(rig: Rig) -> None:
    files = rig.files()
    Path(files.lock).parent.mkdir(parents=True)
    lock = take_lock(files.lock)
    assert lock is not None
    lock.say(rig.run_id, os.getpid())
    threading.Timer(0.2, lock.close).start()
    assert rig.sweep() == []
    assert not Path(files.lock).exists()


def test_sweep_ends_a_supervisor_that_is_stopped_and_none_of_another_run(rig: Rig) -> None:
    pid = rig.start("stubborn")
    assert rig.sweep(new_run_id()) == []
    assert rig.status()["phase"] == "running"
    kill(pid, signal.SIGSTOP)
    assert rig.sweep() == []
    assert is_gone(pid)


def test_full_disk_does_not_free_the_processes(rig: Rig) -> None:
    """A limit on the size of its files does to the supervisor what a full disk does."""
    pid = rig.start("stubborn", lease_s=2.0, stop_grace_s=0.5)
    subprocess.run(["prlimit", "--pid", str(pid), "--fsize=0:unlimited"], check=True)
    before = read_json(rig.files().supervisor)
    wait_for(lambda: not rig.processes(), "the end of the lease")
    assert read_json(rig.files().supervisor) == before
    assert rig.status()["phase"] != "ended"
    subprocess.run(["prlimit", "--pid", str(pid), "--fsize=unlimited"], check=True)
    assert rig.outcome()["cause"] == "lease"


@pytest.mark.parametrize("patience_s", ["1", ""])
def test_outcome_that_cannot_be_written_holds_the_node_for_a_while_or_until_it_is_told_to_go(
    rig: Rig, patience_s: str
) -> None:
    spec, environment = rig.spec(argv=["/nowhere/torchrun"]), {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command, pipe = [sys.executable, "-m", "testkit.supervise_rig", "/proc", patience_s], subprocess.PIPE
    Path(rig.files().outcome, "in the way").mkdir(parents=True)
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(spec).encode())
        process.stdin.close()
        for _ in range(2):
            assert b"cannot write the outcome" in process.stderr.readline()
        assert rig.status()["phase"] == "starting"  # what could not start never looks as if it ran
        if not patience_s:
            process.terminate()
        assert process.wait(100) == 0
        assert len(process.stderr.readlines()) < 8
