"""How a supervisor stops its ranks: asked to, or because nobody renews its lease. Real daemons and signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from testkit.machine_clock import machine_time
from testkit.supervise_rig import Rig, is_gone, kill
from testkit.waiting import wait_for

from cluster.agent.supervisor import StopOrder


def test_stop_gives_ranks_time_to_finish(rig: Rig) -> None:
    rig.start("polite")
    begin_ns = time.time_ns()
    rig.stop(10.0)
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", "Ctrl-C")
    assert Path(rig.files().log_dir, "rank0001.log").read_text() == "finished\n"
    assert {death["exit_code"] for death in outcome["deaths"]} <= {0, None}
    assert begin_ns < outcome["stop_at_ns"] < outcome["deaths"][0]["at_ns"] < time.time_ns()


def test_rank_that_ignores_the_stop_is_killed_after_the_grace(rig: Rig) -> None:
    rig.start("stubborn")
    begin, began = machine_time(), time.monotonic()
    rig.stop(1.0)
    outcome = rig.outcome()
    assert time.monotonic() - began > 0.9
    assert machine_time() - begin < 6.0
    assert {death["exit_code"] for death in outcome["deaths"]} <= {-9, None}  # None: torchrun reaped it first


def test_later_request_shortens_the_grace(rig: Rig) -> None:
    rig.start("stubborn")
    rig.stop(60.0, "first")
    wait_for(lambda: rig.status()["phase"] == "stopping", "the first request")
    rig.stop(0.0, "second")
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", "first")


def test_later_request_never_lengthens_the_grace() -> None:
    order = StopOrder()
    assert order.ask("stop", "first", 5.0)
    first = order.deadline
    assert not order.ask("stop", "second", 60.0)
    assert order.deadline == first
    order.ask("stop", "third", 1.0)
    assert order.deadline < first


def test_damaged_request_stops_with_the_grace_of_the_spec(rig: Rig) -> None:
    rig.start("polite")
    Path(rig.files().stop).write_text('{"cause": ["x"], "grace_s": "soon"')
    assert rig.outcome()["cause"] == "stop"


def test_workers_and_grandchildren_in_other_sessions_end_as_well(rig: Rig) -> None:
    rig.start("children")
    naked = wait_for(lambda: [p for p in descend(rig) if p not in rig.processes()], "the one without marks")
    rig.stop(0.0)
    assert rig.outcome()["leftover_pids"] == []
    assert rig.processes() == []
    assert all(is_gone(process.pid) for process in naked)


def descend(rig: Rig) -> list[psutil.Process]:
    return psutil.Process(rig.status()["supervisor"]["pid"]).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_supervisor_is_a_stop(rig: Rig, number: signal.Signals) -> None:
    kill(rig.start("polite"), number)
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", number.name)
    assert Path(rig.files().log_dir, "rank0000.log").read_text() == "finished\n"


def test_run_ends_when_nobody_renews_the_lease_whatever_the_clock_of_who_did(rig: Rig) -> None:
    rig.start("polite", lease_s=3.0)  # a machine that is busy elsewhere may hold up who beats for seconds
    for count in range(20):
        os.utime(rig.files().lease, (count, count))
        time.sleep(0.2)
    assert rig.status()["phase"] == "running"
    assert rig.outcome()["cause"] == "lease"
    assert Path(rig.files().log_dir, "rank0000.log").read_text() == "finished\n"
