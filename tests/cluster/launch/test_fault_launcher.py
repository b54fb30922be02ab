"""A launcher that is told to stop or killed, and a torchrun that is: with fake ranks, on nodes that are names.

The launchers are processes of their own, all at the same time; supervisors, signals and files are real.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen

import pytest
import test_fault_nodes
from testkit.fake_run import LocalRun
from testkit.fault_rig import confirm, send
from testkit.fault_table import AROUND_RANKS, LEASE, Row
from testkit.process_table import run_processes, wait_until_gone

from cluster.control.attempt import StopRequests
from cluster.control.controller import ControlOptions, control, request_cancel, settle
from cluster.control.link import LaunchObserver
from cluster.control.runner import open_links
from cluster.plan import read_launch_plan
from engine.runs.folder import RunFolder

AT_ONCE = 3
END_S = 60.0


def kill_torchrun(run: RunFolder) -> None:
    found = [process for process in run_processes(run.run_id) if process.environ().get("BURST_NODE") == "node2"]
    (torchrun,) = (process for process in found if "distributed/run.py" in " ".join(process.cmdline()))
    send(torchrun.pid, signal.SIGKILL)


def signals(*numbers: signal.Signals) -> Callable[[RunFolder, Popen[bytes]], None]:
    def act(_run: RunFolder, launcher: Popen[bytes]) -> None:
        for number in numbers:
            os.kill(launcher.pid, number)
            time.sleep(0.2)  # two signals of a kind at once are one

    return act


ACTIONS: dict[str, tuple[str, Callable[[RunFolder, Popen[bytes]], None]]] = {
    "kill torchrun": ("sleep", lambda run, _: kill_torchrun(run)),
    "SIGTERM": ("wait", signals(signal.SIGTERM)),
    "SIGHUP": ("wait", signals(signal.SIGHUP)),
    "SIGINT twice": ("ignore", signals(signal.SIGINT, signal.SIGINT)),
    "cancel": ("wait", lambda run, _: request_cancel(run) and None),
    "kill the launcher": ("wait", lambda _, launcher: launcher.kill()),
    "resume": ("gate", lambda _, launcher: launcher.kill()),
}
ROWS = {row.do: row for row in AROUND_RANKS if row.do in ACTIONS}
Ended = tuple[RunFolder, int, float]


def lead(base: Path, row: Row) -> Ended:
    """A run, the exit code of its launcher, and after how many seconds nothing was left of it."""
    mode, act = ACTIONS[row.do]
    lease = {"lease_s": 5.0} if row.words == LEASE else {}
    one = LocalRun(base / row.do.replace(" ", "_"), mode, **lease)
    try:
        with one.led_elsewhere() as launcher:
            begin = time.monotonic()
            act(one.run, launcher)
            code = launcher.wait(END_S)
            if row.do == "resume":
                (one.run.path / "gate").touch()
                code = take_up(one.run)
            assert wait_until_gone(one.run.run_id, row.limit_s or END_S) == []
            return one.run, code, time.monotonic() - begin
    finally:
        one.kill()


def take_up(run: RunFolder) -> int:
    assert settle(run, 20.0).state in ("running", "completed")
    plan = read_launch_plan(run.path)
    return control(
        plan, run, open_links(plan, run), LaunchObserver(), StopRequests(), ControlOptions(start=False)
    ).exit_code


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    base = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {row.do: pool.submit(lead, base, row) for row in reversed(ROWS.values())}


@pytest.mark.parametrize("do", [do for do in ROWS if do not in ("kill the launcher", "resume")])
def test_run_ends_as_its_launcher_was_told(ended: dict[str, Future[Ended]], do: str) -> None:
    run, code, took_s = ended[do].result()
    assert took_s <= (ROWS[do].limit_s or END_S)
    confirm(ROWS[do], run, code, ("node1", "node2"))


def test_launcher_killed_leaves_nodes_that_stop_by_themselves(ended: dict[str, Future[Ended]]) -> None:
    row = ROWS["kill the launcher"]
    run, _, took_s = ended[row.do].result()
    assert 1.0 < took_s <= (row.limit_s or END_S)  # it was the lease, not the death, that ended them
    settle(run)
    confirm(row, run, None, ("node1", "node2"))


def test_run_of_a_killed_launcher_is_taken_up_again_and_ends_well(ended: dict[str, Future[Ended]]) -> None:
    run, code, _ = ended["resume"].result()
    confirm(ROWS["resume"], run, code, ("node1", "node2"))
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]
    assert run.read_state()["attempt"] == 1


def test_every_row_has_its_test() -> None:
    elsewhere = {"close stdout"}  # tests/burst_cli/test_launch_command.py
    assert {row.do for row in AROUND_RANKS} == {*ACTIONS, *test_fault_nodes.ACTIONS} | elsewhere
