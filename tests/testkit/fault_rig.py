"""What tests of faults share: real launches by the command line on a testbed, what remains of them, what a row says."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.agent.folder import holder, take_lock
from cluster.testbed.faults import set_fault
from cluster.testbed.node import sshd
from cluster.testbed.testbed import Testbed
from engine.runs.folder import RunFolder, list_runs
from testkit import ROOT
from testkit.fault_table import Row
from testkit.host_tree import write_host_tree
from testkit.image_rig import LauncherEngine
from testkit.process_table import run_processes
from testkit.waiting import wait_for

# A model so small that a step takes milliseconds, and data that takes no time to prepare.
SMALL = (
    "exp=tiny",
    "data=text",
    "data.tokenizer=bytes",
    "data.validation_fraction=0.2",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=32",
    "model.vocab_size=512",
    "train.seq_len=256",
    "train.eval_samples=1",
    "optimizer.warmup_steps=0",
    "cluster.threads_per_rank=1",
    "train.peak_flops_per_device=1e11",  # else every rank measures it for a second
)
FOREVER = "train.steps=100000"
# Stands in the environment of every launch, as a token would; nothing that a launch writes or starts may tell it.
SECRET = "canary-3e9d1c77ab52"
START_S = 240.0  # torch starts four times for one launch: no limit of a test, only an end to waiting


@dataclass
class Launched:
    """A `burst launch` at work."""

    rig: FaultRig
    process: subprocess.Popen[str]
    known: frozenset[Path]

    def run(self, timeout_s: float = START_S) -> RunFolder:
        """Its run folder, as soon as there is one."""
        return RunFolder(wait_for(lambda: max(self.rig.run_paths() - self.known, default=None), self.said, timeout_s))

    def wait_for_step(self, step: int = 3, timeout_s: float = START_S) -> RunFolder:
        """Its run folder once so many steps are recorded."""
        run = self.run(timeout_s)

        def reached() -> bool:
            has_ended = self.process.poll() is not None  # asked first: then its last rows are there
            rows = run.read_metrics()
            is_there = bool(rows) and int(rows[-1].get("step", 0)) >= step
            assert is_there or not has_ended, self.said()
            return is_there

        wait_for(reached, lambda: f"{run.path}: {self.said()}", timeout_s)
        return run

    def end(self, timeout_s: float = START_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"burst launch did not end in {timeout_s} s: {self.said()}") from None

    def said(self) -> str:
        """What it wrote so far."""
        return self.rig.output.read_text(errors="replace")[-4000:]


class FaultRig:
    """Launches on `testbed`; everything that they write lies in `folder`."""

    def __init__(self, testbed: Testbed, config_dir: Path, folder: Path) -> None:
        self.testbed, self.folder = testbed, folder
        self.runs_dir, self.output = folder / "runs", folder / "launch.out"
        self.corpus = folder / "corpus.txt"
        self.corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        self.environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(config_dir),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "BURST_RUNS_DIR": str(self.runs_dir),
            "COLUMNS": "200",
            "HF_TOKEN": SECRET,
            "WANDB_API_KEY": SECRET,
        }

    def words(self, *overrides: str) -> list[str]:
        """The settings of a small run on the testbed, and these."""
        return [*SMALL, f"data.paths=[{self.corpus}]", f"cluster={self.testbed.name}", *overrides]

    def burst(
        self, *words: str, timeout_s: float = START_S, env: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """Any verb, to its end."""
        command = [sys.executable, "-m", "burst_cli", *words]
        environment = {**self.environment, **env}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def launch(self, *words: str, stdout: int | None = None, env: Mapping[str, str] = {}) -> Launched:
        """`burst launch WORDS --plain`, started in a session of its own."""
        known = frozenset(self.run_paths())
        with self.output.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "burst_cli", "launch", *words, "--plain"],
                cwd=ROOT,
                env={**self.environment, **env},
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        return Launched(self, process, known)

    def run_paths(self) -> set[Path]:
        """All run folders; one that is still being filled has another name, under which nothing is found later."""
        return {run.path for run in list_runs(self.runs_dir)}

    # --- containers --------------------------------------------------------------------------------------------------

    def push_host_image(self, engine: LauncherEngine, nodes: Sequence[str]) -> list[str]:
        """An image of this machine's Python, brought to `nodes` by `burst image push`: settings to run ranks in it."""
        tree = io.BytesIO()
        write_host_tree(tree)
        engine("import", "-", "rig/host:1", stdin=tree.getvalue())
        words = ["--image", "rig/host:1", f"cluster={self.testbed.name}", "--hosts", ",".join(nodes)]
        push = self.burst("image", "push", *words, env={"DOCKER_HOST": engine.host}, timeout_s=START_S)
        assert push.returncode == 0, push.stderr
        # torch and Python's own links lie outside of the image, which stays small: the containers see them by mounts.
        mounts = sorted({sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))})
        container = ("runtime=docker", "image=rig/host:1", f"mounts=[{','.join(mounts)}]")
        return [*(f"cluster.container.{word}" for word in container), f"cluster.python={sys.executable}"]

    def containers(self, node: str) -> list[str]:
        """Names of the containers of a node, those that ended too."""
        socket = f"unix://{self.testbed.node(node).docker_socket}"
        listed = self.testbed.node(node).inside("docker", "-H", socket, "ps", "--all", "--format", "{{.Names}}")
        return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()

    # --- processes ---------------------------------------------------------------------------------------------------

    def processes(self, run_id: str) -> dict[int, dict[str, str]]:
        """Living processes of a run on all nodes: pid -> environment."""
        found = {}
        for process in run_processes(run_id):
            with contextlib.suppress(psutil.Error):  # one that just ended
                found[process.pid] = process.environ()
        return found

    def lose(self, run: RunFolder, node: str) -> None:
        """The node dies: every process of the run there, its sshd and all connections; none sees another go."""
        own = run_processes(run.run_id, f"BURST_NODE={node}")
        pids = [*sshd_sessions(self.testbed, node), *(process.pid for process in own)]
        for pid in pids:
            send(pid, signal.SIGSTOP)
        set_fault(self.testbed, node, "sshd_stop")
        for pid in pids:
            send(pid, signal.SIGKILL)

    def node_folder(self, run: RunFolder, node: str) -> Path:
        """The run folder on a node."""
        return self.testbed.node(node).home / ".burst" / "runs" / run.run_id

    def wait_until_gone(self, run_id: str, timeout_s: float = 60.0) -> None:
        """Return once no process of the run is left, supervisors included: they hold the locks of their nodes."""
        wait_for(lambda: not self.left_behind(run_id), lambda: str(self.left_behind(run_id)), timeout_s)

    def left_behind(self, run_id: str) -> list[str]:
        """What is still there of a run that ended: processes, node locks, containers."""
        found = [f"process {process.pid}" for process in run_processes(run_id)]
        locks = [Path(f"/tmp/burst-{os.getuid()}/{name}.lock") for name in self.testbed.node_names]
        own = [str(lock) for lock in locks if holder(str(lock)).get("run_id") == run_id]
        return found + [f"lock {lock}" for lock in own if _is_held(lock)]

    def tells_secrets(self, run: RunFolder) -> list[str]:
        """Files of the run, here and on the nodes, and living command lines that hold the secret of the environment."""
        folders = [run.path, *(self.node_folder(run, name) for name in self.testbed.node_names)]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return [str(path) for path in [*files, *Path("/proc").glob("[0-9]*/cmdline")] if _holds(path, SECRET)]

    def conclude(self, row: Row, run: RunFolder, exit_code: int) -> None:
        """That the run ended as `row` says, and left nothing: neither processes nor secrets."""
        confirm(row, run, exit_code, self.testbed.node_names)
        assert self.left_behind(run.run_id) == []
        assert not self.tells_secrets(run)


def confirm(row: Row, run: RunFolder, exit_code: int | None, names: Sequence[str]) -> None:
    """That the run ended as `row` says; `names` are those of its nodes, which the row calls node1 and node2."""
    state = run.read_state()
    assert (state["state"], exit_code) == (row.state, row.exit_code), state
    told = describe(state.get("failure") or {})
    for number, name in enumerate(names, 1):
        told = told.replace(name, f"node{number}")
    assert told.startswith(row.blamed) if row.blamed else not told, (told, row.blamed)


def describe(failure: dict[str, Any]) -> str:
    """Who is blamed for what, in one line."""
    who = f"rank {failure['rank']} on {failure['host']}" if failure.get("rank") is not None else failure.get("host")
    return " ".join(filter(None, [failure.get("kind"), failure.get("type"), f"({who})" if who else None]))


def sshd_sessions(testbed: Testbed, node: str) -> list[int]:
    """The sshd processes of a node that serve connections."""
    listener = sshd(testbed.node(node)).pid()
    assert listener is not None
    return [process.pid for process in psutil.Process(listener).children()]


def take_ssh_away(testbed: Testbed, node: str) -> None:
    """Neither sshd nor a connection is left on a node, whose processes go on; `clear_faults` gives it back."""
    sessions = sshd_sessions(testbed, node)
    set_fault(testbed, node, "sshd_stop")
    for pid in sessions:
        send(pid, signal.SIGKILL)


@contextlib.contextmanager
def port_held(testbed: Testbed, node: str, port: int) -> Iterator[None]:
    """Somebody listens on a port of a node while the block lasts."""
    program = f"import socket, sys; s = socket.create_server(('', {port})); print(1, flush=True); sys.stdin.read()"
    command = testbed.node(node).inside(sys.executable, "-c", program)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        yield


@contextlib.contextmanager
def unanswered(testbed: Testbed, node: str, others: Sequence[str]) -> Iterator[None]:
    """Packets between `node` and `others` (names of nodes) are dropped while the block lasts."""
    addresses = [testbed.node(other).address for other in others]
    rules = [(chain, flag, address) for address in addresses for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d"))]
    for chain, flag, address in rules:
        _iptables(testbed, node, "-I", chain, flag, address)
    try:
        yield
    finally:
        for chain, flag, address in rules:
            _iptables(testbed, node, "-D", chain, flag, address)


def _iptables(testbed: Testbed, node: str, how: str, chain: str, flag: str, address: str) -> None:
    command = testbed.node(node).inside("iptables", how, chain, flag, address, "-j", "DROP")
    subprocess.run(command, check=True, capture_output=True)


def _holds(path: Path, word: str) -> bool:
    with contextlib.suppress(OSError):  # a process that has just ended
        return word.encode() in path.read_bytes()
    return False


def _is_held(path: str) -> bool:
    if (lock := take_lock(path, 0.0)) is not None:
        lock.close()
    return lock is None


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
