"""Faults while a run is launched or works, one after the other: real sshd, torchrun and gloo on a virtual cluster.

Every case says who is blamed, the exit code, how fast everything stopped, and that nothing stays behind; the rows make
docs/faults.md. The nodes are those of one testbed, and every case ends with all faults taken back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from testkit.fault_rig import FOREVER, START_S, FaultRig, Launched, Row, reason, send, unanswered, wait_for
from testkit.testbed_fixture import Testbeds

from cluster.testbed.faults import clear_faults, set_fault
from engine.runs import RunFolder

pytestmark = [pytest.mark.timeout(600)]

STOP_S = 15.0  # all processes of all nodes after the death of a rank
HANG_S = 60.0  # a hang named, with stacks
LEASE = "cluster.lease_s=8"
HANG = "cluster.hang_timeout_s=8"
STOPS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}


@pytest.fixture(scope="module")
def rig(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRig]:
    folder = tmp_path_factory.mktemp("faults")
    testbeds = Testbeds(folder / "config")
    try:
        testbed = testbeds.make(nodes=2)
        rig = FaultRig(testbed, folder / "config", folder)
        done = rig.burst("launch", *rig.words("train.steps=2"))
        assert done.returncode == 0, done.stderr  # and from here on code and tokens lie on the nodes
        yield rig
    finally:
        testbeds.close()


@pytest.fixture(autouse=True)
def _healthy_nodes(rig: FaultRig) -> Iterator[None]:
    yield
    for name in rig.testbed.node_names:
        clear_faults(rig.testbed, name)


# --- before the ranks start -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A launch that must not start. fault: of the testbed, on node 2. text: what the message must say."""

    name: str
    text: str
    exit_code: int = 1
    fault: str | None = None
    words: tuple[str, ...] = ()


REFUSALS = (
    Refusal("node unreachable", "does not answer", fault="link_down"),
    Refusal("connection refused", "refuses connections", fault="sshd_stop"),
    Refusal("sshd silent", "stays silent", fault="sshd_hang"),
    Refusal("login refused", "accepts none of our keys", fault="login_refused"),
    Refusal("host key changed", "host key is not the one that is known", fault="key_swap"),
    Refusal("no Python on the nodes", "python", words=("cluster.python=/nonexistent/python3",)),
    Refusal("interface missing", "eth9", words=("cluster.interface=eth9",)),
    Refusal("data file missing", "corpus", words=("data.paths=[/nonexistent/corpus.txt]",)),
    Refusal("disk of a node full", "free under", fault="disk_full"),
    Refusal("bad override", "did you mean", 2, words=("train.stepz=3",)),
    Refusal("unknown model", "model", 2, words=("model=llama9000",)),
    Refusal(
        "length that no method can divide", "cannot divide", 2, words=("attention=ulysses", "cluster.ranks_per_node=3")
    ),
    Refusal("more ranks than the method can use", "cp_size", 2, words=("parallel.cp_size=3",)),
    Refusal(
        "no engine for containers", "docker", words=("cluster.container.runtime=docker", "cluster.container.image=a:1")
    ),
)


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name.replace(" ", "_"))
def test_launch_that_cannot_work_is_refused_with_its_reason_and_starts_nothing(rig: FaultRig, case: Refusal) -> None:
    node = rig.testbed.node_names[1]
    if case.fault is not None:
        value = f"{rig.testbed.node(node).folder.home}/.burst" if case.fault == "disk_full" else None
        set_fault(rig.testbed, node, case.fault, value)
    before = rig.run_paths()
    begin = time.monotonic()
    hurried = [] if case.fault is None else ["cluster.ssh.connect_timeout_s=3"]  # a healthy node may be slow
    done = rig.burst("launch", *rig.words(*hurried, *case.words))
    elapsed = time.monotonic() - begin
    assert done.returncode == case.exit_code, done.stderr
    assert case.text.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr
    if case.fault is not None:
        assert node in done.stderr
    for path in rig.run_paths() - before:  # a run that was created says how it ended, and no rank was started
        assert RunFolder(path).read_state()["state"] == "failed"
        assert not rig.left_behind(path.name)
    row = Row(case.name, "launching", "not started", blamed=reason(done.stderr), stop_s=elapsed)
    rig.conclude(row, None, done.returncode)


def test_port_that_somebody_uses_is_refused_before_anything_starts(rig: FaultRig) -> None:
    first = rig.testbed.node_names[0]
    script = "import socket,sys; s=socket.create_server(('',29555)); print('ready',flush=True); sys.stdin.read()"
    with contextlib.closing(_Holder(rig, first, script)):
        done = rig.burst("launch", *rig.words("cluster.master_port=29555"))
    assert done.returncode == 1, done.stderr
    assert "29555" in done.stderr
    rig.conclude(Row("port in use", "launching", "not started", blamed="port 29555"), None, done.returncode)


def test_runs_folder_that_cannot_be_written_is_named(rig: FaultRig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = rig.burst("launch", *rig.words(), "--runs-dir", str(tmp_path / "file" / "runs"))
    assert done.returncode == 1, done.stderr
    assert "cannot be created" in done.stderr
    rig.conclude(Row("run folder cannot be written", "launching", "not started", blamed="RunFolderError"), None, 1)


@pytest.mark.thorough
def test_second_launch_on_busy_nodes_is_refused_and_the_first_goes_on(rig: FaultRig) -> None:
    first = rig.launch(*rig.words(FOREVER))
    run = first.wait_for_step()
    done = rig.burst("launch", *rig.words("train.steps=2"))
    assert done.returncode == 1, done.stderr
    assert run.run_id in done.stderr
    assert first.process.poll() is None
    send(first.process.pid, signal.SIGINT)
    assert first.end() == 130
    rig.conclude(Row("two launches at once", "launching", "not started", blamed="node is busy"), None, 1)


class _Holder:
    """A program that holds something on a node until it is closed, from when it says that it is ready."""

    def __init__(self, rig: FaultRig, node: str, script: str) -> None:
        command = rig.testbed.node(node).inside(sys.executable, "-c", script)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# --- while ranks work: what a rank does -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Injury:
    """Something that goes wrong inside rank 1, on node 2, at step 4. blamed: words that name cause and place."""

    fault: str
    name: str
    blamed: tuple[str, ...]
    state: str = "failed"
    exit_code: int = 1
    limit_s: float = STOP_S
    words: tuple[str, ...] = ()


INJURIES = (
    Injury("kill", "rank killed (SIGKILL)", ("SIGKILL", "rank 1")),
    Injury("segv", "rank crashes (SIGSEGV)", ("SIGSEGV", "rank 1")),
    Injury("abort", "rank aborts (SIGABRT)", ("SIGABRT", "rank 1")),
    Injury("exit0", "rank exits with 0 too early", ("rank 1",)),
    Injury("exit7", "rank exits with 7", ("rank 1",)),
    Injury("raise", "rank raises", ("rank 1",)),
    Injury("config", "rank finds a mistake in the configuration", ("config", "rank 1"), exit_code=2),
    Injury("oom_host", "host memory ends", ("oom", "rank 1"), state="oom"),
    Injury("oom_device", "device memory ends", ("oom", "rank 1"), state="oom"),
    Injury("nan", "loss becomes NaN", ("rank",)),
    Injury("hang_sleep", "rank hangs", ("hang", "rank 1"), limit_s=HANG_S, words=(HANG,)),
    Injury("hang_gil", "rank hangs in native code", ("hang", "rank 1"), limit_s=HANG_S, words=(HANG,)),
    Injury("stop", "rank stopped (SIGSTOP)", ("hang", "rank 1"), limit_s=HANG_S, words=(HANG,)),
    Injury("disk", "disk full while recording", ("rank",)),
)  # fmt: skip


THOROUGH = ("exit0", "exit7", "segv", "abort", "hang_gil")  # others stand for them


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case.fault in THOROUGH), id=case.fault) for case in INJURIES],
)
def test_injured_rank_is_blamed_and_everything_stops(rig: FaultRig, case: Injury) -> None:
    rank = 0 if case.fault == "disk" else 1  # rank 0 records
    words = rig.words(FOREVER, *case.words, f'cluster.environment=["BURST_FAULT={case.fault};{rank};4"]')
    launched = rig.launch(*words)
    run = launched.wait_for_step(2)  # the last that rank 0 is sure to record before rank 1 comes to the fourth
    begin = time.monotonic()
    code = launched.end()
    stopped = time.monotonic() - begin
    row = rig.conclude(Row(case.name, "running", stop_s=stopped), run, code)
    assert (row.state, row.exit_code) == (case.state, case.exit_code), launched.said()
    assert stopped <= case.limit_s
    for word in case.blamed:
        assert word in row.blamed
    assert row.left == []
    if "hang" in case.blamed:
        stacks = list(run.path.glob("logs/*/rank*.stacks"))
        assert any("File " in path.read_text(errors="replace") for path in stacks), stacks


@pytest.mark.thorough
def test_straggler_slows_the_run_and_is_named(rig: FaultRig) -> None:
    words = rig.words("train.steps=12", 'cluster.environment=["BURST_FAULT=slow:0.3;1;3"]')
    launched = rig.launch(*words)
    run = launched.run()
    assert launched.end() == 0, launched.said()
    late = [row.get("straggler_rank") for row in run.read_metrics()[5:]]
    assert late.count(1) > len(late) / 2, late
    rig.conclude(Row("straggler", "running", blamed="straggler_rank=1 in metrics"), run, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["flood", "garbage"])
def test_log_that_floods_or_holds_garbage_disturbs_nothing(rig: FaultRig, kind: str) -> None:
    launched = rig.launch(*rig.words("train.steps=6", f'cluster.environment=["BURST_FAULT={kind};1;3"]'))
    run = launched.run()
    assert launched.end() == 0, launched.said()
    node = rig.testbed.node_names[1]
    log = f"logs/{node}/rank0001.log"
    assert (run.path / log).read_bytes() == (rig.node_folder(run, node) / log).read_bytes()
    shown = rig.burst("logs", run.run_id, "--tail", "50")
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
    rig.conclude(Row(f"log {kind}", "running", blamed="–"), run, 0)


# --- while ranks work: what happens to them ---------------------------------------------------------------------------


@pytest.mark.thorough
def test_torchrun_killed_takes_its_ranks_with_it_and_is_blamed(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words(FOREVER))
    run = launched.wait_for_step()
    (pid, *_) = rig.pids_of(run, node, "torch.distributed.run")
    send(pid, signal.SIGKILL)
    _ends(rig, launched, run, Row("torchrun killed", "running"), blamed=(node,))


@pytest.mark.thorough
def test_supervisor_killed_is_noticed_and_nothing_of_it_stays(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words(FOREVER))
    run = launched.wait_for_step()
    send(rig.supervisor_pid(run, node), signal.SIGKILL)
    _ends(rig, launched, run, Row("supervisor killed", "running"), blamed=(node,))


@pytest.mark.thorough
def test_node_that_restarts_is_blamed(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words(FOREVER, LEASE))
    run = launched.wait_for_step()
    rig.lose(run, node)
    time.sleep(1)
    clear_faults(rig.testbed, node)
    _ends(rig, launched, run, Row("node restarts", "running"), blamed=(node,))


@pytest.mark.thorough
def test_link_between_launcher_and_a_node_cut_for_good_ends_both_sides(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words(FOREVER, LEASE))
    run = launched.wait_for_step()
    begin = time.monotonic()
    set_fault(rig.testbed, node, "link_down")
    code = launched.end(90)
    rig.wait_until_gone(run.run_id)
    row = rig.conclude(Row("link of a node cut", "running", stop_s=time.monotonic() - begin), run, code)
    assert (row.state, row.exit_code, row.left) == ("failed", 1, [])
    assert node in row.blamed + str(run.read_state()["failure"])


@pytest.mark.thorough
def test_ssh_that_breaks_for_a_moment_ends_nothing(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words("train.steps=400", "cluster.lease_s=60"))
    run = launched.wait_for_step()
    for session in rig.sshd_sessions(node):
        send(session, signal.SIGKILL)
    code = launched.end()
    row = rig.conclude(Row("SSH sessions of a node killed", "running", blamed="–"), run, code)
    assert (row.state, row.exit_code, row.left) == ("completed", 0, []), launched.said()
    log = f"logs/{node}/rank0001.log"
    assert (run.path / log).read_bytes() == (rig.node_folder(run, node) / log).read_bytes()


@pytest.mark.thorough
def test_nodes_that_cannot_reach_each_other_end_with_a_reason(rig: FaultRig) -> None:
    first, second = rig.testbed.node_names
    launched = rig.launch(*rig.words(FOREVER, HANG))
    run = launched.wait_for_step()
    begin = time.monotonic()
    with unanswered(rig.testbed, second, [first]):
        code = launched.end()
    row = rig.conclude(Row("partition between nodes", "running", stop_s=time.monotonic() - begin), run, code)
    assert (row.state, row.exit_code, row.left) == ("failed", 1, [])
    assert row.stop_s is not None
    assert row.stop_s <= HANG_S


@pytest.mark.thorough
def test_slow_link_slows_the_run_and_ends_nothing(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words("train.steps=30"))
    run = launched.wait_for_step()
    set_fault(rig.testbed, node, "link_slow", "20mbit")
    code = launched.end()
    row = rig.conclude(Row("slow link", "running", blamed="–"), run, code)
    assert (row.state, row.exit_code) == ("completed", 0), launched.said()


# --- what happens to the launcher -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_launcher_killed_leaves_nodes_that_stop_by_themselves(rig: FaultRig) -> None:
    launched = rig.launch(*rig.words(FOREVER, LEASE))
    run = launched.wait_for_step()
    begin = time.monotonic()
    send(launched.process.pid, signal.SIGKILL)
    launched.process.wait()
    rig.wait_until_gone(run.run_id, 60)
    stopped = time.monotonic() - begin
    assert rig.burst("status", run.run_id).returncode in (1, 130)
    row = rig.conclude(Row("launcher killed", "running", stop_s=stopped), run, None)
    assert row.state in ("failed", "cancelled")
    assert row.left == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["Ctrl-C", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("SIGTERM", "SIGHUP"))]
)
def test_launcher_asked_to_stop_stops_all_nodes(rig: FaultRig, name: str) -> None:
    launched = rig.launch(*rig.words(FOREVER))
    run = launched.wait_for_step()
    begin = time.monotonic()
    send(launched.process.pid, STOPS[name])
    code = launched.end()
    row = rig.conclude(Row(name, "running", stop_s=time.monotonic() - begin), run, code)
    assert (row.state, row.exit_code, row.left) == ("cancelled", 130, [])


@pytest.mark.thorough
def test_second_ctrl_c_kills_ranks_that_will_not_stop(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words(FOREVER, 'cluster.environment=["BURST_FAULT=hang_gil;1;4"]'))
    run = launched.wait_for_step()
    log = rig.node_folder(run, node) / f"logs/{node}/rank0001.log"
    wait_for(lambda: "BURST_FAULT: now hang_gil" in log.read_text(errors="replace"), START_S, launched.said)
    _interrupt(launched, "Ctrl-C: stopping the ranks")
    begin = time.monotonic()
    send(launched.process.pid, signal.SIGINT)
    code = launched.end()
    row = rig.conclude(Row("Ctrl-C twice, a rank hangs", "running", stop_s=time.monotonic() - begin), run, code)
    assert (row.state, row.exit_code, row.left) == ("cancelled", 130, [])
    assert row.stop_s is not None
    assert row.stop_s < 10


@pytest.mark.thorough
def test_third_ctrl_c_leaves_at_once_and_says_what_may_remain(rig: FaultRig) -> None:
    node = rig.testbed.node_names[1]
    launched = rig.launch(*rig.words(FOREVER, LEASE))
    run = launched.wait_for_step()
    set_fault(rig.testbed, node, "link_down")
    begin = time.monotonic()
    for sign in ("Ctrl-C: stopping the ranks", "Ctrl-C: killing what is left"):
        _interrupt(launched, sign)
    send(launched.process.pid, signal.SIGINT)
    code = launched.end(20)
    left_after = time.monotonic() - begin
    assert node in launched.said()
    rig.wait_until_gone(run.run_id, 60)
    row = rig.conclude(Row("Ctrl-C three times, a node is cut off", "running", stop_s=left_after), run, code)
    assert (row.exit_code, row.left) == (130, [])


@pytest.mark.thorough
def test_terminal_that_is_closed_does_not_hurt_the_run(rig: FaultRig) -> None:
    reader, writer = os.pipe()
    launched = rig.launch(*rig.words("train.steps=60"), stdout=writer)
    os.close(writer)
    os.close(reader)
    run = launched.run()
    code = launched.end()
    row = rig.conclude(Row("stdout closed", "running", blamed="–"), run, code)
    assert (row.state, row.exit_code, row.left) == ("completed", 0, []), launched.said()


# --- from another terminal --------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_cancel_from_another_terminal_stops_the_run(rig: FaultRig) -> None:
    launched = rig.launch(*rig.words(FOREVER))
    run = launched.wait_for_step()
    begin = time.monotonic()
    assert rig.burst("cancel", run.run_id).returncode == 0
    code = launched.end()
    row = rig.conclude(Row("burst cancel", "running", stop_s=time.monotonic() - begin), run, code)
    assert (row.state, row.exit_code, row.left) == ("cancelled", 130, [])


@pytest.mark.thorough
def test_detached_run_is_followed_and_cancelled_from_elsewhere(rig: FaultRig) -> None:
    known = rig.run_paths()
    done = rig.burst("launch", *rig.words(FOREVER), "--detach")
    assert done.returncode == 0, done.stderr
    (path,) = rig.run_paths() - known
    run = RunFolder(path)
    wait_for(lambda: len(run.read_metrics()) > 2, START_S, lambda: (run.path / "controller.log").read_text()[-2000:])
    logs = [run.log_path(name, rank) for rank, name in enumerate(rig.testbed.node_names)]  # each comes on its own way
    wait_for(lambda: all(log.exists() and log.stat().st_size for log in logs), START_S)
    assert rig.burst("status", run.run_id).returncode == 0
    shown = rig.burst("logs", run.run_id, "--tail", "5").stdout
    assert all(f"{name}:{rank} | " in shown for rank, name in enumerate(rig.testbed.node_names)), shown
    assert rig.burst("cancel", run.run_id).returncode == 0
    row = rig.conclude(Row("detached, then cancelled", "running"), run, None)
    assert (row.state, row.left) == ("cancelled", [])


@pytest.mark.thorough
def test_run_of_a_killed_launcher_is_taken_up_again_and_ends_well(rig: FaultRig) -> None:
    launched = rig.launch(*rig.words("train.steps=600", "cluster.lease_s=60"))
    run = launched.wait_for_step()
    send(launched.process.pid, signal.SIGKILL)
    launched.process.wait()
    assert rig.burst("status", run.run_id).returncode == 0
    done = rig.burst("resume", run.run_id)
    row = rig.conclude(Row("launcher killed, then burst resume", "running", blamed="–"), run, done.returncode)
    assert (row.state, row.exit_code, row.left) == ("completed", 0, []), done.stderr
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 601))


def _interrupt(launched: Launched, sign: str) -> None:
    """Ctrl-C, and until it was heard: two that come before one is heard are one."""
    send(launched.process.pid, signal.SIGINT)
    wait_for(lambda: sign in launched.said(), START_S, launched.said)


def _ends(rig: FaultRig, launched: Launched, run: RunFolder, row: Row, *, blamed: tuple[str, ...]) -> None:
    """The launch ends as failed within the limit, blames who is named, and leaves nothing."""
    begin = time.monotonic()
    code = launched.end()
    row.stop_s = time.monotonic() - begin
    rig.conclude(row, run, code)
    assert (row.state, row.exit_code, row.left) == ("failed", 1, []), launched.said()
    assert row.stop_s <= STOP_S
    text = row.blamed + str(run.read_state()["failure"])
    for word in blamed:
        assert word in text
