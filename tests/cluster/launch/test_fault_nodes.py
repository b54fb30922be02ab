"""Faults of nodes and links, on a virtual cluster with real sshd; only the ranks are fakes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from testkit.fake_run import HURRIED, TestbedRun
from testkit.fault_rig import confirm, send, sshd_sessions, take_ssh_away
from testkit.fault_table import AROUND_RANKS, DETACHED, LEASE, Row
from testkit.process_table import run_processes, supervisors, wait_until_gone
from testkit.testbed_fixture import Testbeds

from cluster.control.attempt import StopRequests
from cluster.testbed.faults import clear_faults, set_fault
from cluster.testbed.testbed import Testbed

GONE_S = 15.0
# A node that is not heard is lost soon; who asks for more time than this gets it by other rows.
TIMING = replace(HURRIED, lost_s=2.0, kill_s=1.0)
AWAY_S = 2 * 2.0  # as a minute is twice what half of a lease of 60 s lasts


class Injured(TestbedRun):
    """A run of which the second node is injured once it is under way."""

    @property
    def node(self) -> str:
        return self.names[1]

    def pids(self, word: str) -> list[int]:
        """Processes of the run on the node with this word in their command line."""
        found = []
        for process in [*run_processes(self.run.run_id), *supervisors(self.run.run_id)]:
            with contextlib.suppress(psutil.Error):
                is_there = self.node in process.cmdline() or process.environ().get("BURST_NODE") == self.node
                if is_there and word in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def kill_supervisor(self) -> None:
        (pid,) = self.pids("burst-supervisor")
        send(pid, signal.SIGKILL)

    def open_gate(self) -> None:
        """The ranks may come to their end."""
        (self.there(self.names[0]).path / "gate").touch()


def restart(one: Injured) -> None:
    """All that runs on the node is gone at once, then it is there again."""
    one.kill_supervisor()
    for pid in one.pids(""):
        send(pid, signal.SIGKILL)
    set_fault(one.testbed, one.node, "sshd_stop")
    clear_faults(one.testbed, one.node)


def break_sessions(one: Injured) -> None:
    for pid in sshd_sessions(one.testbed, one.node):
        send(pid, signal.SIGKILL)
    one.open_gate()


def leave_alone(one: Injured) -> None:
    """No SSH for so long; meanwhile the ranks do their last step."""

    def give_it_back() -> None:
        for node in one.names:
            clear_faults(one.testbed, node)

    for node in one.names:
        take_ssh_away(one.testbed, node)
    one.open_gate()
    threading.Timer(AWAY_S, give_it_back).start()


def slow_down(one: Injured) -> None:
    set_fault(one.testbed, one.node, "link_slow", "20mbit")
    one.open_gate()


def cut_off_and_leave(one: Injured) -> None:
    set_fault(one.testbed, one.node, "link_down")
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)


ACTIONS: dict[str, tuple[str, Callable[[Injured], object]]] = {
    "kill the supervisor": ("sleep", Injured.kill_supervisor),
    "restart the node": ("wait", restart),
    "cut the link": ("wait", lambda one: set_fault(one.testbed, one.node, "link_down")),
    "kill SSH sessions": ("gate", break_sessions),
    "take SSH away": ("gate", leave_alone),
    "slow the link": ("gate", slow_down),
    "SIGINT": ("sleep", lambda _: signal.raise_signal(signal.SIGINT)),
    "SIGINT thrice": ("wait", cut_off_and_leave),
}
ROWS = [row for row in AROUND_RANKS if row.do in ACTIONS]


@pytest.fixture(scope="module")
def testbed(module_testbeds: Testbeds) -> Testbed:
    return module_testbeds.make(nodes=2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.do.replace(" ", "_"))
def test_fault_is_survived_or_ends_the_run_with_its_reason(testbed: Testbed, tmp_path: Path, row: Row) -> None:
    mode, act = ACTIONS[row.do]
    one = Injured(testbed, tmp_path, mode, **({"lease_s": 5.0} if row.words == LEASE else {}))
    begin: list[float] = []

    def act_once() -> None:
        if not begin and one.is_under_way:
            begin.append(time.monotonic())
            act(one)

    try:
        with StopRequests().listening() as stop:
            outcome, _ = one.lead(act_once, stop, TIMING, detached=row.words == DETACHED)
        if row.limit_s is not None:
            assert wait_until_gone(one.run.run_id, row.limit_s) == []
            assert time.monotonic() - begin[0] <= row.limit_s
    finally:
        for node in one.names:
            clear_faults(testbed, node)
        left = wait_until_gone(one.run.run_id, GONE_S)
        one.kill()
    assert left == []
    confirm(row, one.run, outcome.exit_code, one.names)
    if row.words == LEASE:  # it was cut off: what may still run there is said
        assert one.node in str(one.run.read_state()["leftover"])
    if row.state == "completed":
        log = one.run.log_path(one.node, 1)
        assert log.read_bytes() == one.there(one.node).log_path(one.node, 1).read_bytes()
