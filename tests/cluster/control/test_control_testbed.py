"""A controller over real SSH to real supervisors on a virtual cluster; only the ranks are fakes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from control_fakes import Observer
from testkit import PYTHON_PATH
from testkit.fake_run import TestbedRun
from testkit.link_rig import bridges_on
from testkit.process_table import run_processes, supervisors, wait_until_gone

from cluster.control.controller import Manner, control
from cluster.control.outcome import LaunchOutcome
from cluster.control.settle import request_cancel, settle, take_over
from cluster.control.stopping import StopRequests
from cluster.control.timing import LaunchTiming
from cluster.testbed.build import Testbed
from cluster.testbed.faults import clear_faults, set_fault

END_S = 300.0  # on a machine that is busy with other tests
GONE_S = 15.0


@pytest.fixture(scope="module")
def testbed(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Two nodes of this module alone, for they get faults."""
    from testkit.testbed_fixture import Testbeds

    testbeds = Testbeds(tmp_path_factory.mktemp("control"))
    try:
        yield testbeds.make(nodes=2, rails=1)
    finally:
        testbeds.close()


@pytest.fixture
def start(testbed: Testbed, tmp_path: Path) -> Iterator[Callable[..., TestbedRun]]:
    """Makes runs; afterwards nothing of them may be left on any node."""
    made: list[TestbedRun] = []

    def make(mode: str, **settings: object) -> TestbedRun:
        made.append(TestbedRun(testbed, tmp_path, mode, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for node in testbed.node_names:
        clear_faults(testbed, node)
    left = [process for one in made for process in wait_until_gone(one.run.run_id, GONE_S)]
    for one in made:
        one.kill()
    assert left == []


def lead(
    one: TestbedRun, act: Callable[[], None] = lambda: None, stop: StopRequests | None = None, **timing: float
) -> tuple[LaunchOutcome, Observer]:
    observer = Observer(act)
    manner = Manner(timing=LaunchTiming(**timing))
    return control(one.plan, one.run, one.links(), observer, stop or StopRequests(), manner), observer


def steps_done(one: TestbedRun) -> int:
    return len(one.run.read_metrics())


def is_under_way(one: TestbedRun) -> bool:
    """Whether ranks do steps, and the launcher knows that all nodes have begun: before, what goes is a failed start."""
    return steps_done(one) >= 5 and one.run.read_state()["nodes_started_at"] is not None


def test_run_on_two_nodes_completes_with_all_its_files_here(start: Callable[..., TestbedRun]) -> None:
    one = start("ok")
    outcome, _ = lead(one)
    assert (outcome.status, outcome.leftover) == ("completed", ())
    assert [row["step"] for row in one.run.read_metrics()] == [1, 2, 3, 4, 5]
    assert (one.run.read_summary() or {})["attention_preset"] == "ring"
    first, second = one.testbed.node_names
    logs = [sorted(path.name for path in one.run.log_dir(node).glob("rank*.log")) for node in (first, second)]
    assert logs == [["rank0000.log", "rank0001.log"], ["rank0002.log", "rank0003.log"]]
    assert one.run.log_path(second, 3).read_text() == "rank 3 in mode ok\n"
    states = [entry["state"] for entry in one.run.read_state()["history"]]
    assert states == ["planned", "starting", "running", "completed"]


@pytest.mark.parametrize(
    ("mode", "kind", "word"),
    [("kill", "signal", "SIGKILL"), ("raise", "exception", "tenth"), ("exit7", "exit", "7")],
)
def test_rank_that_fails_on_the_second_node_is_blamed(
    start: Callable[..., TestbedRun], mode: str, kind: str, word: str
) -> None:
    one = start(mode)
    outcome, _ = lead(one)
    failure = outcome.failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.host) == (kind, 3, one.testbed.node_names[1])
    assert word in failure.message
    assert str(failure.log) == str(one.run.log_path(one.testbed.node_names[1], 3))
    assert (outcome.exit_code, one.run.read_state()["state"]) == (1, "failed")


def test_supervisor_that_is_killed_is_blamed_and_its_node_swept(start: Callable[..., TestbedRun]) -> None:
    one = start("sleep")
    second = one.testbed.node_names[1]

    def kill() -> None:
        if is_under_way(one):
            for process in supervisors(one.run.run_id):
                with contextlib.suppress(psutil.Error):  # one that has just been killed
                    if second in process.cmdline():
                        process.kill()

    outcome, _ = lead(one, kill)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host, outcome.leftover) == ("node_lost", second, ())


def test_node_that_is_cut_off_is_lost_and_stops_by_its_lease(start: Callable[..., TestbedRun]) -> None:
    one = start("wait", lease_s=8.0)
    second = one.testbed.node_names[1]
    cut: list[float] = []

    def sever() -> None:
        if is_under_way(one) and not cut:
            set_fault(one.testbed, second, "link_down")
            cut.append(time.monotonic())

    outcome, _ = lead(one, sever)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.host) == ("node_lost", second)
    assert [left.node for left in outcome.leftover] == [second]
    assert wait_until_gone(one.run.run_id, 8.0 + 14.0 + GONE_S) == []


def test_stop_request_reaches_all_nodes(start: Callable[..., TestbedRun]) -> None:
    one, stop = start("wait"), StopRequests()

    def press() -> None:
        if is_under_way(one):
            stop.count, stop.cause = 1, "Ctrl-C"

    outcome, _ = lead(one, press, stop)
    assert (outcome.status, outcome.leftover) == ("cancelled", ())


def test_second_attempt_begins_anew_and_ends_well(start: Callable[..., TestbedRun]) -> None:
    one = start("kill")
    assert lead(one)[0].status == "failed"
    one.mend()
    outcome, _ = lead(one)
    assert (outcome.status, outcome.failure) == ("completed", None)
    assert one.run.read_state()["attempt"] == 2
    assert [row["step"] for row in one.run.read_metrics()] == [1, 2, 3, 4, 5]
    assert (one.run.path / "attempts/1/metrics.jsonl").exists()


class Launcher:
    """A controller in a process of its own, which can be killed."""

    def __init__(self, one: TestbedRun) -> None:
        code = f"import sys; from burst_cli.follow import main; sys.exit(main({str(one.run.path)!r}, 'start'))"
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        self.process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def orphaned(one: TestbedRun) -> Iterator[None]:
    """A run whose launcher was killed after five steps."""
    launcher = Launcher(one)
    try:
        deadline = time.monotonic() + END_S
        while steps_done(one) < 5:
            assert launcher.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        launcher.kill()
    yield


def test_run_of_a_killed_launcher_is_settled_taken_over_and_cancelled(start: Callable[..., TestbedRun]) -> None:
    one = start("wait")
    with orphaned(one):
        settled = settle(one.run, 20.0)
        assert (settled.state, settled.problem) == ("running", None)
        stop = StopRequests()
        observer = Observer()

        def press() -> None:
            if observer.statuses and all(status.phase == "running" for status in observer.statuses):
                stop.count, stop.cause = 1, "Ctrl-C"

        observer.act = press
        outcome = take_over(one.run, observer, stop)
        assert (outcome.status, one.run.read_state()["attempt"]) == ("cancelled", 1)
        assert [row["step"] for row in one.run.read_metrics()] == [1, 2, 3, 4, 5]


def test_run_of_a_killed_launcher_is_cancelled_from_elsewhere(start: Callable[..., TestbedRun]) -> None:
    one = start("wait")
    with orphaned(one):
        settled = request_cancel(one.run)
    assert (settled.state, settled.leftover) == ("cancelled", ())
    assert run_processes(one.run.run_id) == []
    deadline = time.monotonic() + GONE_S  # a bridge ends once it sees that nobody is on the other side
    while any(bridges_on(one.testbed, node) for node in one.testbed.node_names):
        assert time.monotonic() < deadline
        time.sleep(0.05)
