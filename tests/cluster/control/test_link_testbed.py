"""Links over real sshd with the real supervisor: cut, silent, refused, killed; nothing is lost and nothing doubled."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from testkit import KIT
from testkit.fake_plan import fake_torchrun
from testkit.link_rig import RemoteRun, agents_on, begin, led_until, swept
from testkit.testbed_fixture import Testbeds

from cluster.control.link import StartRefusedError
from cluster.control.ssh_link import LinkTiming, SshLink
from cluster.ssh.pool import SshPool
from cluster.testbed.build import Testbed
from cluster.testbed.faults import clear_faults, set_fault


@pytest.fixture(scope="module")
def testbed(module_testbeds: Testbeds) -> Testbed:
    """Two nodes that get faults."""
    return module_testbeds.make(nodes=2, rails=1)


class Led:
    """A run on the first node with its link; all of it is gone at the end."""

    def __init__(self, testbed: Testbed, base: Path) -> None:
        self.testbed, self.node = testbed, testbed.node_names[0]
        self.run = RemoteRun.on(testbed, self.node, base)
        self.pool = SshPool(keepalive_s=2.0)
        self.links: list[SshLink] = []

    def link(self, timing: LinkTiming | None = None) -> SshLink:
        link = self.run.link(self.pool, timing) if timing else self.run.link(self.pool)
        self.links.append(link)
        return link

    def fault(self, kind: str) -> None:
        set_fault(self.testbed, self.node, kind)

    def mend(self) -> None:
        clear_faults(self.testbed, self.node)

    def processes(self) -> list[psutil.Process]:
        """What runs of the run, agents and supervisors included."""
        return [process for process in psutil.process_iter(["pid"]) if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            environ, command = process.environ(), process.cmdline()
        except psutil.Error:
            return False
        marked = environ.get("BURST_RUN_ID") == self.run.run.name
        return (marked or self.run.run.name in command) and process.pid != os.getpid()

    def close(self) -> None:
        self.mend()
        for link in self.links:
            link.close()
        for link in self.links:
            assert link.join(60.0)
        last = self.run.link(self.pool)
        last.follow()
        try:
            assert swept(last) == ()
        finally:
            last.close()
            last.join(60.0)
            self.pool.close()
        assert self.processes() == []


@pytest.fixture
def led(testbed: Testbed, tmp_path: Path) -> Iterator[Led]:
    made = Led(testbed, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_run_is_started_followed_stopped_and_swept(led):
    link = led.link()
    torchrun = fake_torchrun(2, "polite")
    begin(link, led.run.spec(*torchrun, cwd=str(KIT)))
    link.follow()
    led_until(link, lambda seen: seen.phase == "running" and len(seen.supervisor.get("ranks", {})) == 2)
    led_until(link, lambda seen: led.run.log(1).exists() and seen.health)
    with pytest.raises(StartRefusedError) as caught:
        begin(led.link(), led.run.spec(*torchrun))
    assert caught.value.kind == "exists"
    link.stop("Ctrl-C", 10.0)
    outcome = led_until(link, lambda seen: seen.is_synced and seen.outcome)

    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", "Ctrl-C")
    assert led.run.check_logs(2)
    assert (led.run.run / "nodes" / led.node / "run.json").read_text() == "{}\n"
    assert abs(link.poll().clock_offset_ns) < 50_000_000  # nodes of a testbed share our clock
    assert swept(link) == ()


@pytest.mark.parametrize("kind", ["link_down", "sshd_killed"])
def test_a_cut_connection_comes_back_and_the_copy_goes_on(led, kind):
    link = led.link()
    begin(link, led.run.chatty(4, 800, 200.0))
    link.follow()
    led_until(link, lambda seen: led.run.log(3).exists())
    if kind == "link_down":
        led.fault("link_down")
    else:
        led.fault("sshd_stop")
        for process in agents_on(led.testbed, led.node):
            kill_session(process)
    problem = led_until(link, lambda seen: seen.problem)
    assert problem
    time.sleep(1.0)
    here = led.run.log().stat().st_size
    led.mend()
    led_until(link, lambda seen: led.run.log().stat().st_size > here and seen.problem is None)
    outcome = led_until(link, lambda seen: seen.is_synced and seen.outcome)

    assert outcome["exit_code"] == 0
    assert led.run.check_logs(4) == 4 * 800 * 100


def test_a_start_over_a_link_that_is_cut_meanwhile_starts_once(led):
    link = led.link()
    led.fault("link_down")
    mending = threading.Timer(2.0, led.mend)
    mending.start()
    begin(link, led.run.chatty(1, 100, 100.0, 1.0))
    mending.join()
    link.follow()
    led_until(link, lambda seen: seen.is_synced)

    assert led.run.check_logs() == 10_000


def kill_session(process: psutil.Process) -> None:
    """Kill the sshd that serves an agent's connection."""
    for parent in process.parents():
        if "sshd" in parent.name():
            parent.kill()
            return
    raise AssertionError("no sshd above it")
