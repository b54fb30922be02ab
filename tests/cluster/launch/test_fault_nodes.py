"""Faults of nodes and links, on a virtual cluster with real sshd; only the ranks are fakes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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


@dataclass
class Case:
    """A run of the row and what is done to it once it is under way."""

    one: TestbedRun
    node: str
    detached: bool
    exit_code: int | None = None

    @property
    def testbed(self) -> Testbed:
        return self.one.testbed

    def lead(self, act: Callable[[], None]) -> None:
        """Lead it to its end in this process; `act` happens once."""
        is_done: list[bool] = []

        def once() -> None:
            if not is_done and self.one.is_under_way:
                is_done.append(True)
                act()

        with StopRequests().listening() as stop:
            self.exit_code = self.one.lead(once, stop, TIMING, detached=self.detached)[0].exit_code
        assert is_done

    def open_gate(self) -> None:
        """The ranks may come to their end."""
        (self.one.there(self.one.names[0]).path / "gate").touch()

    def pids(self, word: str) -> list[int]:
        """Processes of the run on the node with this word in their command line."""
        found = []
        for process in [*run_processes(self.one.run.run_id), *supervisors(self.one.run.run_id)]:
            with contextlib.suppress(psutil.Error):
                is_there = self.node in process.cmdline() or process.environ().get("BURST_NODE") == self.node
                if is_there and word in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def kill(self, word: str) -> None:
        pids = self.pids(word)
        assert pids
        for pid in pids:
            send(pid, signal.SIGKILL)

    def signal(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)


def restart(case: Case) -> None:
    """All that runs on the node is gone at once, then it is there again."""
    case.kill("burst-supervisor")
    for pid in case.pids(""):
        send(pid, signal.SIGKILL)
    set_fault(case.testbed, case.node, "sshd_stop")
    clear_faults(case.testbed, case.node)


def break_sessions(case: Case) -> None:
    for pid in sshd_sessions(case.testbed, case.node):
        send(pid, signal.SIGKILL)
    case.open_gate()


def leave_alone(case: Case) -> None:
    """No SSH for so long; meanwhile the ranks do their last step."""

    def give_it_back() -> None:
        for node in case.testbed.node_names:
            clear_faults(case.testbed, node)

    for node in case.testbed.node_names:
        take_ssh_away(case.testbed, node)
    case.open_gate()
    threading.Timer(AWAY_S, give_it_back).start()


def slow_down(case: Case) -> None:
    set_fault(case.testbed, case.node, "link_slow", "20mbit")
    case.open_gate()


def cut_off_and_leave(case: Case) -> None:
    set_fault(case.testbed, case.node, "link_down")
    case.signal(*[signal.SIGINT] * 3)


ACTIONS: dict[str, tuple[str, Callable[[Case], None]]] = {
    "kill the supervisor": ("sleep", lambda case: case.kill("burst-supervisor")),
    "restart the node": ("wait", restart),
    "cut the link": ("wait", lambda case: set_fault(case.testbed, case.node, "link_down")),
    "kill SSH sessions": ("gate", break_sessions),
    "take SSH away": ("gate", leave_alone),
    "slow the link": ("gate", slow_down),
    "SIGINT": ("sleep", lambda case: case.signal(signal.SIGINT)),
    "SIGINT thrice": ("wait", cut_off_and_leave),
}
ROWS = [row for row in AROUND_RANKS if row.do in ACTIONS]


@pytest.fixture(scope="module")
def testbed(module_testbeds: Testbeds) -> Testbed:
    return module_testbeds.make(nodes=2)


@pytest.fixture
def make_case(testbed: Testbed, tmp_path: Path) -> Iterator[Callable[[Row, str], Case]]:
    """Makes the run of a row; afterwards all faults are taken back, and nothing of it is left on any node."""
    made: list[Case] = []

    def make(row: Row, mode: str) -> Case:
        lease = {"lease_s": 5.0} if row.words == LEASE else {}
        one = TestbedRun(testbed, tmp_path, mode, **lease)
        made.append(Case(one, testbed.node_names[1], row.words == DETACHED))
        return made[-1]

    yield make
    for node in testbed.node_names:
        clear_faults(testbed, node)
    left = [process for case in made for process in wait_until_gone(case.one.run.run_id, GONE_S)]
    for case in made:
        case.one.kill()
    assert left == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.do.replace(" ", "_"))
def test_fault_is_survived_or_ends_the_run_with_its_reason(make_case: Callable[[Row, str], Case], row: Row) -> None:
    mode, act = ACTIONS[row.do]
    case = make_case(row, mode)
    begin: list[float] = []
    case.lead(lambda: (begin.append(time.monotonic()), act(case))[0])
    if row.limit_s is not None:
        assert wait_until_gone(case.one.run.run_id, row.limit_s) == []
        assert time.monotonic() - begin[0] <= row.limit_s
    confirm(row, case.one.run, case.exit_code, case.one.names)
    if row.words == LEASE:  # it was cut off: what may still run there is said
        assert case.node in str(case.one.run.read_state()["leftover"])
    if row.state == "completed":
        log = case.one.run.log_path(case.node, 1)
        assert log.read_bytes() == case.one.there(case.node).log_path(case.node, 1).read_bytes()
