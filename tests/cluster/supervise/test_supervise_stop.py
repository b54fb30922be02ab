"""How a supervisor stops its ranks: asked to, or because nobody renews its lease. Real daemons and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from testkit.machine_clock import machine_time
from testkit.supervise_rig import Rig, is_gone, kill
from testkit.waiting import wait_for

from cluster.agent.supervisor import StopOrder

Ask = Callable[[Rig, int], object]
DAMAGED = '{"cause": ["x"], "grace_s": "soon"'


@pytest.mark.parametrize(
    ("ask", "by"),
    [
        (lambda rig, pid: rig.stop(10.0), "Ctrl-C"),
        (lambda rig, pid: Path(rig.files().stop).write_text(DAMAGED), ""),  # with the grace of the spec
        (lambda rig, pid: kill(pid, signal.SIGTERM), "SIGTERM"),
        (lambda rig, pid: kill(pid, signal.SIGHUP), "SIGHUP"),
    ],
    ids=["request", "damaged request", "SIGTERM", "SIGHUP"],
)
def test_whoever_asks_for_the_end_ranks_have_time_to_finish(rig: Rig, ask: Ask, by: str) -> None:
    pid, begin_ns = rig.start("polite"), time.time_ns()
    ask(rig, pid)
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", by)
    assert rig.said() == ["finished\n"] * 2
    assert {death["exit_code"] for death in outcome["deaths"]} <= {0, None}
    assert begin_ns < outcome["stop_at_ns"] < outcome["deaths"][0]["at_ns"] < time.time_ns()


def test_rank_that_ignores_the_stop_is_killed_after_the_grace(rig: Rig) -> None:
    rig.start("stubborn", stop_grace_s=60.0)
    begin, began = machine_time(), time.monotonic()
    rig.stop(1.0)
    outcome = rig.outcome()
    assert time.monotonic() - began > 0.9
    assert machine_time() - begin < 6.0
    assert {death["exit_code"] for death in outcome["deaths"]} <= {-9, None}  # None: torchrun reaped it first
    assert outcome["exit_code"] == 1  # which had time to say so
    said = Path(rig.files().own_log).read_text()
    assert " stopping (stop: Ctrl-C), grace 1 s\n" in said
    assert " killing what is left\n" in said


def test_later_request_shortens_the_grace_and_never_lengthens_it(rig: Rig) -> None:
    order = StopOrder()
    assert order.ask("stop", "first", 5.0)
    first = order.deadline
    assert not order.ask("stop", "second", 60.0)
    assert order.deadline == first
    rig.start("stubborn", stop_grace_s=60.0)
    rig.stop(60.0, "first")
    wait_for(lambda: rig.status()["phase"] == "stopping", "the first request")
    rig.stop(0.0, "second")
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", "first")


@pytest.mark.needs("root")
def test_workers_and_grandchildren_in_other_sessions_end_as_well(rig: Rig) -> None:
    pid = rig.start("children")

    def naked() -> list[psutil.Process]:
        return [one for one in psutil.Process(pid).children(recursive=True) if one not in rig.processes()]

    found = wait_for(naked, "the one without marks")
    environment = {"BURST_RUN_ID": rig.run_id, "BURST_NODE": rig.name(), "RANK": "2"}
    with subprocess.Popen(["sleep", "100"], env=environment, user=65534) as stranger:
        rig.stop(0.0)
        assert rig.outcome()["leftover_pids"] == []
        assert [process.pid for process in rig.processes()] == [stranger.pid]  # another user's is none of ours
        stranger.kill()
    assert all(is_gone(process.pid) for process in found)


def test_run_ends_when_nobody_renews_the_lease_whatever_the_clock_of_who_did(rig: Rig) -> None:
    rig.start("polite", lease_s=3.0)  # a machine that is busy elsewhere may hold up who beats for seconds
    for count in range(20):
        os.utime(rig.files().lease, (count, count))
        time.sleep(0.2)
    begin = machine_time()
    assert rig.status()["phase"] == "running"
    assert rig.outcome()["cause"] == "lease"
    assert machine_time() - begin < 10.0
    assert rig.said() == ["finished\n"] * 2
