"""Jobs that wait, that nobody leads, and steps inside of an allocation: on a testbed's Slurm."""

from __future__ import annotations

import os

from slurm_rig import SlurmBench, job_id
from testkit.fake_run import Led
from testkit.process_table import living, run_processes
from testkit.waiting import wait_for

from cluster.control.controller import settle
from cluster.control.runner import read_run_plan


def occupy(bench: SlurmBench, nodes: int) -> str:
    """The job that holds so many nodes."""
    job = bench.client("sbatch", "--parsable", f"-N{nodes}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    wait_for(lambda: "RUNNING" in bench.client("scontrol", "show", "job", job))
    return job


def test_a_job_without_nodes_says_why_it_waits_and_can_be_cancelled(bench):
    occupy(bench, 3)
    led = Led(bench.plan("ok")).begin()
    wait_for(lambda: any("nodes that are free" in event["phase"] for event in led.run.read_events()), led.describe)
    led.stop.count, led.stop.cause = 1, "Ctrl-C"
    outcome = led.wait()

    assert (outcome.status, outcome.leftover) == ("cancelled", ())
    assert "CANCELLED" in bench.client("scontrol", "show", "job", job_id(led.run))
    assert led.run.read_state()["state"] == "cancelled"


def test_a_run_that_waits_is_known_to_other_processes_and_led_on_by_them(bench):
    blocker = occupy(bench, 3)
    plan = bench.plan("ok")
    run = bench.leave_in_queue(plan)
    settled = settle(run)
    bench.client("scancel", blocker)
    outcome = Led(read_run_plan(run.path), run).begin(start=False).wait()

    assert settled.state == "starting"
    assert outcome.status == "completed"


def test_a_run_that_ended_while_nobody_looked_is_judged_later(bench):
    run = bench.leave_in_queue(bench.plan("raise"))
    wait_for(lambda: len(list(run.path.glob("nodes/*/outcome.json"))) == 2)
    wait_for(lambda: settle(run).is_final)
    failure = run.read_state()["failure"]

    assert (failure["rank"], failure["host"]) == (1, bench.testbed.node_names[1])


def test_inside_of_an_allocation_its_nodes_are_used_and_a_cancelled_run_leaves_it(bench, monkeypatch):
    allocation = occupy(bench, 2)
    monkeypatch.setenv("SLURM_JOB_ID", allocation)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # of the allocation, not of the run
    led = Led(bench.plan("wait", max_restarts=1)).begin()
    led.wait_for_step(5)
    assert job_id(led.run) == allocation
    sessions = {os.getsid(srun.pid) for srun in living("cmdline", f"--job-name=burst-{led.run.run_id}")}
    assert sessions  # of what outlives whoever began it
    assert os.getsid(0) not in sessions
    led.stop.count, led.stop.cause = 1, "Ctrl-C"
    outcome = led.wait()

    assert outcome.status == "cancelled"
    assert run_processes(led.run.run_id) == []
    assert "RUNNING" in bench.client("scontrol", "show", "job", allocation)
