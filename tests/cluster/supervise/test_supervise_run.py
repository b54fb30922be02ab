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

from testkit.supervise_rig import PYTHON_PATH, UNHURRIED, Rig, is_gone, kill, names_of, new_run_id
from testkit.waiting import wait_for

from cluster.agent.folder import read_json, take_lock
from cluster.agent.start import sweep


def test_death_of_a_rank_is_known_with_its_signal_and_moment(rig: Rig) -> None:
    rig.start(environment=UNHURRIED)
    rank = rig.ranks()["1"]
    before = time.time_ns()
    kill(rank)
    deaths = wait_for(lambda: rig.status()["supervisor"]["deaths"], "the death")
    assert (deaths[0]["rank"], deaths[0]["exit_code"]) == (1, -9)
    assert before <= deaths[0]["at_ns"] < time.time_ns()
    outcome = rig.outcome()
    assert (outcome["exit_code"], outcome["cause"]) == (1, "exit")
    assert outcome["memory"]["evidence"] is None
    assert outcome["memory"]["memory"]["capacity_bytes"] > 2**30


def test_killed_torchrun_takes_ranks_and_their_children_along(rig: Rig) -> None:
    rig.start("children")
    kill(rig.command())
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["exit_code"]) == ("exit", -9)
    assert {death["exit_code"] for death in outcome["deaths"]} == {-9}  # orphans fall to the supervisor
    assert rig.processes() == []


def test_killed_supervisor_takes_all_along_and_counts_as_lost(rig: Rig) -> None:
    kill(rig.start("stubborn"))
    wait_for(lambda: not rig.processes(), "the end of the ranks")
    assert rig.status()["phase"] == "lost"


def test_next_attempt_first_ends_what_a_killed_supervisor_left(rig: Rig) -> None:
    pid = rig.start("children")
    kill(pid)
    wait_for(lambda: is_gone(pid), "the end of the supervisor")
    assert rig.processes() != []  # a child in a session of its own
    second = rig.start("children")
    assert len(rig.ranks()) == 2
    assert second != pid
    wait_for(lambda: names_of(rig.processes()).count("sleep") == 2, "two, and no older ones")


def test_sweep_ends_what_a_killed_supervisor_left(rig: Rig) -> None:
    pid = rig.start("children")
    kill(pid)
    wait_for(lambda: is_gone(pid), "the end of the supervisor")
    assert sweep(str(rig.folder / "alpha"), rig.name(), rig.run_id) == []
    assert rig.processes() == []


def test_sweep_waits_for_a_process_that_dies_to_let_go_of_its_lock(rig: Rig) -> None:
    files = rig.files()
    Path(files.lock).parent.mkdir(parents=True)
    lock = take_lock(files.lock)
    assert lock is not None
    lock.say(rig.run_id, os.getpid())
    threading.Timer(0.2, lock.close).start()
    assert sweep(files.folder, rig.name(), rig.run_id) == []
    assert not Path(files.lock).exists()


def test_stopped_supervisor_is_no_obstacle_for_a_sweep(rig: Rig) -> None:
    pid = rig.start("stubborn")
    kill(pid, signal.SIGSTOP)
    assert sweep(str(rig.folder / "alpha"), rig.name(), rig.run_id) == []
    assert is_gone(pid)


def test_sweep_of_another_run_in_the_same_folder_touches_nothing(rig: Rig) -> None:
    rig.start()
    assert sweep(str(rig.folder / "alpha"), rig.name(), new_run_id()) == []
    assert rig.status()["phase"] == "running"


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


_UNWRITABLE = """
import json, os, sys
from cluster.agent import supervisor
from cluster.agent.folder import NodeFiles, make_folder
from cluster.agent.messages import parse_spec
supervisor._PATIENCE_S = float(sys.argv[1])
spec = parse_spec(json.load(sys.stdin))
files = NodeFiles(spec.folder, spec.node)
make_folder(files.log_dir)
os.makedirs(files.outcome + "/in the way")
made = supervisor.Supervisor(spec)
made.tell()
made.run()
"""


def test_outcome_that_can_never_be_written_does_not_hold_the_node_for_ever(rig: Rig) -> None:
    spec = rig.spec(argv=[sys.executable, "-c", ""])
    command = [sys.executable, "-c", _UNWRITABLE, "1"]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(command, input=json.dumps(spec).encode(), env=environment, capture_output=True, timeout=200)
    assert b"cannot write the outcome" in done.stderr
    assert done.returncode == 0


def test_what_could_not_start_never_looks_as_if_it_ran_before_its_outcome_is_there(rig: Rig) -> None:
    spec = rig.spec(argv=["/nowhere/torchrun"])
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", _UNWRITABLE, "200"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(json.dumps(spec).encode())
    process.stdin.close()
    assert b"cannot write the outcome" in process.stderr.readline()
    assert rig.status()["phase"] == "starting"
    process.terminate()  # who is asked to go waits no longer
    assert process.wait(200) == 0
    process.stderr.close()
