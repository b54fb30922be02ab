"""Runs through Slurm for real: jobs of a testbed's Slurm, with the fake trainer as ranks, led by the controller."""

from __future__ import annotations

import subprocess
import time

import pytest
from slurm_rig import SlurmBench, job_id
from testkit.fake_run import Led
from testkit.process_table import run_processes
from testkit.waiting import wait_for

from cluster.control.controller import settle
from cluster.control.link import LaunchTiming
from cluster.control.runner import read_run_plan
from cluster.launch.slurm.plan import granted_plan, read_token
from cluster.testbed.slurm import slurmd
from engine.config.settings import CheckpointConfig


def names(bench: SlurmBench) -> tuple[str, ...]:
    return bench.testbed.node_names


def test_a_run_completes_and_the_run_folder_tells_it_under_the_names_of_the_nodes(bench):
    led = Led(bench.plan("ok")).begin()
    outcome = led.wait()
    first, second = names(bench)[:2]

    assert (outcome.status, outcome.exit_code, outcome.leftover) == ("completed", 0, ()), led.describe()
    assert [row["step"] for row in led.run.read_metrics()] == [1, 2, 3, 4, 5]
    assert "rank 1 in mode ok" in led.run.log_path(second, 1).read_text()
    assert led.run.read_state()["nodes"] == [first, second]
    assert led.run.read_state()["lease_s"] is None  # a job outlives its launcher
    assert f"Slurm job {job_id(led.run)} runs on {first}, {second}" in led.observer.notes
    assert run_processes(led.run.run_id) == []
    one, other = bench.testbed.nodes[:2]  # each got its own command and the address of the first
    plan = read_run_plan(led.run.path)
    assert [node.name for node in plan.nodes] == [first, second]
    masters = {word for node in plan.nodes for word in node.argv if word.startswith("--master-addr")}
    assert (masters, f"--local-addr={other.address}" in plan.nodes[1].argv) == ({f"--master-addr={one.address}"}, True)
    assert "GLOO_SOCKET_IFNAME=eth0" in (led.run.path / plan.nodes[1].env_file).read_text()
    assert all((led.run.path / node.env_file).stat().st_mode & 0o077 == 0 for node in plan.nodes)
    wait_for(lambda: "JobState=COMPLETED" in bench.client("scontrol", "show", "job", job_id(led.run)))


def test_the_rank_that_failed_is_blamed_and_not_those_that_srun_stops(bench):
    led = Led(bench.plan("kill")).begin()
    failure = led.wait().failure

    assert failure is not None
    assert (failure.kind, failure.type, failure.rank, failure.host) == ("signal", "SIGKILL", 1, names(bench)[1])
    assert led.run.read_state()["state"] == "failed"
    wait_for(lambda: not run_processes(led.run.run_id))


def test_scancel_from_outside_is_a_cancelled_run(bench):
    # Impatient, so that the controller stops what it believes to have failed before the nodes say who asked them.
    led = Led(bench.plan("wait")).begin(timing=LaunchTiming(evidence_s=0.0, failure_grace_s=0.0))
    led.wait_for_step(5)
    bench.client("scancel", job_id(led.run))
    outcome = led.wait()

    assert (outcome.status, outcome.exit_code, outcome.failure) == ("cancelled", 130, None)
    assert run_processes(led.run.run_id) == []


def test_without_slurms_controller_a_launch_says_so_with_exit_code_3(make_testbed, tmp_path, monkeypatch):
    bench = SlurmBench(make_testbed(nodes=1, slurm=True), tmp_path)
    monkeypatch.setenv("SLURM_CONF", bench.environment["SLURM_CONF"])
    bench.kill_controller()
    outcome = Led(bench.plan("ok", nodes=1)).begin().wait(200)

    assert outcome.failure is not None
    assert (outcome.exit_code, outcome.failure.kind, outcome.failure.type) == (3, "start", "SlurmError")
    assert "controller does not answer" in outcome.failure.message


def test_the_first_node_that_does_not_see_the_run_folder_is_noticed_by_slurm(bench):
    plan = bench.plan("ok", nodes=1)
    first = bench.testbed.nodes[0]
    (runs := bench.folder / "runs").mkdir()
    subprocess.run(first.inside("mount", "-t", "tmpfs", "tmpfs", str(runs)), check=True)
    try:
        failure = Led(plan).begin().wait().failure
    finally:
        subprocess.run(first.inside("umount", str(runs)), check=True)

    assert failure is not None
    assert (failure.kind, "need a run folder that all nodes share" in failure.message) == ("start", True)


@pytest.mark.thorough
def test_a_node_that_is_lost_is_named(bench):
    led = Led(bench.plan("wait")).begin()
    led.wait_for_step(5)
    lost = bench.testbed.nodes[1]
    try:
        bench.lose(lost)
        failure = led.wait(120).failure
    finally:
        slurmd(lost).start()

    assert failure is not None
    assert (failure.kind, failure.host) == ("node_lost", lost.name)
    wait_for(lambda: not run_processes(led.run.run_id))


@pytest.mark.thorough
def test_the_time_limit_is_told_as_such(bench):
    led = Led(bench.plan("wait")).begin()
    led.wait_for_step(5)
    # Slurm refuses an end that is over when it reads of it, and looks for such ends only every half a minute.
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 10))
    bench.client("scontrol", "update", f"JobId={job_id(led.run)}", f"EndTime={soon}")
    outcome = led.wait(120)

    assert outcome.failure is not None
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert "time limit" in outcome.failure.message


@pytest.mark.thorough
@pytest.mark.parametrize("is_led", [True, False], ids=["marked down", "dead, without a launcher"])
def test_a_run_that_may_restart_and_lost_a_node_goes_on_with_another(bench, is_led):
    plan = bench.plan("saves", max_restarts=1)
    led = Led(plan).begin() if is_led else None
    run = led.run if led is not None else bench.leave_in_queue(plan)
    wait_for(lambda: len(run.read_metrics()) == 5)
    first, lost = job_id(run), bench.testbed.nodes[1]
    try:
        down = ("scontrol", "update", f"NodeName={lost.name}", "State=DOWN", "Reason=test")
        bench.client(*down) if is_led else bench.lose(lost)  # Slurm takes it back when its daemon next speaks
        if led is None:  # Slurm lets two minutes pass
            wait_for(lambda: run.read_state()["attempt"] == 2 and settle(run).state == "completed", timeout_s=400)
        else:
            failure = led.wait().failure
            assert failure is not None
            assert "requeued" in failure.message
            wait_for(lambda: "CANCELLED" in bench.client("scontrol", "show", "job", first))  # first it is COMPLETING
    finally:
        if led is None:
            slurmd(lost).start()

    if led is None:
        assert job_id(run) != first
        granted = granted_plan(read_run_plan(run.path), run, read_token(run.path) or "")  # a look may come first
        assert granted is not None
        assert tuple(node.name for node in granted.nodes) == names(bench)[::2]
        assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]


def test_ranks_save_when_slurm_warns_of_its_time_limit(bench):
    led = Led(bench.plan("saves", checkpoint=CheckpointConfig(every_steps=5, stop_grace_s=12))).begin()
    led.wait_for_step(5)
    bench.client("scancel", "--signal=USR1", "--batch", job_id(led.run))  # as Slurm does at --signal=B:USR1@72
    failure = led.wait().failure

    assert failure is not None
    assert (failure.kind, failure.type) == ("launcher", "time limit")
    assert "near its time limit" in failure.message
    assert [row["step"] for row in led.run.read_events() if row["kind"] == "checkpoint"] == [5]
