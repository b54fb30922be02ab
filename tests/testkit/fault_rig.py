"""What tests of faults share: real launches by the command line on a testbed, faults at chosen moments, what remains.

Every case leaves one row: who was blamed, exit code, seconds until the last process of the run was gone, what was
left. `scripts/fault_table.py` makes docs/faults.md of the rows of a whole test run (BURST_FAULT_ROWS names the folder).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.supervise.node.locks import holder
from cluster.testbed.build import Testbed
from cluster.testbed.faults import set_fault
from engine.runs import RunFolder, list_runs
from testkit import ROOT
from testkit.host_tree import write_host_tree
from testkit.image_rig import LauncherEngine

_REASON_CHARS = 160
ROWS_VARIABLE = "BURST_FAULT_ROWS"
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
    "train.eval_batches=1",
    "train.warmup_metric_steps=1",
    "optimizer.warmup_steps=0",
    "cluster.threads_per_rank=1",
    "train.peak_flops_per_device=1e11",  # else every rank measures it for a second
)
FOREVER = "train.steps=100000"
# Stands in the environment of every launch, as a token would; nothing that a launch writes or starts may tell it.
SECRET = "canary-3e9d1c77ab52"
START_S = 240.0  # torch starts four times for one launch: no limit of a test, only an end to waiting


@dataclass
class Row:
    """One line of the table. stop_s: from the fault until no process of the run was left on any node."""

    fault: str
    when: str
    state: str = ""
    exit_code: int | None = None
    blamed: str = ""
    stop_s: float | None = None
    left: list[str] = field(default_factory=list)


@dataclass
class Launched:
    """A `burst launch` at work."""

    rig: FaultRig
    process: subprocess.Popen[str]
    known: frozenset[Path]

    def run(self, timeout_s: float = START_S) -> RunFolder:
        """Its run folder, as soon as there is one."""
        return RunFolder(wait_for(lambda: max(self.rig.run_paths() - self.known, default=None), timeout_s, self._said))

    def wait_for_step(self, step: int = 3, timeout_s: float = START_S) -> RunFolder:
        """Its run folder once so many steps are recorded."""
        run = self.run(timeout_s)

        def reached() -> bool:
            has_ended = self.process.poll() is not None  # asked first: then its last rows are there
            rows = run.read_metrics()
            is_there = bool(rows) and int(rows[-1].get("step", 0)) >= step
            assert is_there or not has_ended, self._said()
            return is_there

        wait_for(reached, timeout_s, lambda: f"{run.path}: {self._said()}")
        return run

    def end(self, timeout_s: float = START_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"burst launch did not end in {timeout_s} s: {self._said()}") from None

    def said(self) -> str:
        """What it wrote so far."""
        return self._said()

    def _said(self) -> str:
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
            "XDG_STATE_HOME": str(folder / "state"),
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
        engine.import_tree("rig/host:1", tree.getvalue())
        words = ["--image", "rig/host:1", f"cluster={self.testbed.name}", "--hosts", ",".join(nodes)]
        push = self.burst("image", "push", *words, env={"DOCKER_HOST": engine.host}, timeout_s=START_S)
        assert push.returncode == 0, push.stderr
        # torch and Python's own links lie outside of the image, which stays small: the containers see them by mounts.
        mounts = sorted({sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))})
        container = ("runtime=docker", "image=rig/host:1", f"mounts=[{','.join(mounts)}]")
        return [*(f"cluster.container.{word}" for word in container), f"cluster.python={sys.executable}"]

    def containers(self, node: str) -> list[str]:
        """Names of the containers of a node, those that ended too."""
        socket = f"unix://{self.testbed.node(node).folder.docker_socket}"
        listed = self.testbed.node(node).inside("docker", "-H", socket, "ps", "--all", "--format", "{{.Names}}")
        return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()

    # --- processes ---------------------------------------------------------------------------------------------------

    def processes(self, run_id: str) -> dict[int, dict[str, str]]:
        """Living processes of a run on all nodes: pid -> environment."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pairs = [pair.split(b"=", 1) for pair in (folder / "environ").read_bytes().split(b"\0") if b"=" in pair]
                values = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in pairs}
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if values.get("BURST_RUN_ID") == run_id and state not in ("Z", "X"):
                    found[int(folder.name)] = values
        return found

    def rank_pid(self, run: RunFolder, rank: int) -> int:
        """The process of a rank."""

        def found() -> int | None:
            pids = [pid for pid, values in self.processes(run.run_id).items() if values.get("RANK") == str(rank)]
            return min(pids) if pids else None

        return int(wait_for(found, START_S))

    def pids_of(self, run: RunFolder, node: str, what: str) -> list[int]:
        """Processes of the run on a node whose command line holds `what`, ranks left out."""
        found = []
        for pid, values in self.processes(run.run_id).items():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                if values.get("BURST_NODE") == node and what in words and "RANK" not in values:
                    found.append(pid)
        return found

    def supervisor_pid(self, run: RunFolder, node: str) -> int:
        """The supervisor of a node."""
        return int(json.loads((self.node_folder(run, node) / f"nodes/{node}/supervisor.json").read_text())["pid"])

    def sshd_sessions(self, node: str) -> list[int]:
        """The sshd processes of a node that serve connections."""
        listener = self.testbed.node(node).sshd_pid()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == listener:
                    found.append(int(folder.name))
        return found

    def lose(self, run: RunFolder, node: str) -> None:
        """The node dies: every process of the run there, its sshd and all connections; none sees another go."""
        own = [pid for pid, values in self.processes(run.run_id).items() if values.get("BURST_NODE") == node]
        pids = [*self.sshd_sessions(node), *own]
        for pid in pids:
            send(pid, signal.SIGSTOP)
        set_fault(self.testbed, node, "sshd_stop")
        for pid in pids:
            send(pid, signal.SIGKILL)

    def node_folder(self, run: RunFolder, node: str) -> Path:
        """The run folder on a node."""
        return self.testbed.node(node).folder.home / ".burst" / "runs" / run.run_id

    def wait_until_gone(self, run_id: str, timeout_s: float = 60.0) -> float:
        """Seconds until no process of the run is left, supervisors included: they hold the locks of their nodes."""
        begin = time.monotonic()
        wait_for(lambda: not self.left_behind(run_id), timeout_s, lambda: str(self.left_behind(run_id)))
        return time.monotonic() - begin

    def left_behind(self, run_id: str) -> list[str]:
        """What is still there of a run that ended: processes, node locks, containers."""
        found = [f"process {pid}" for pid in self.processes(run_id)]
        locks = [Path(f"/tmp/burst-{os.getuid()}/{name}.lock") for name in self.testbed.node_names]
        own = [lock for lock in locks if holder(str(lock)).get("run_id") == run_id]
        return found + [f"lock {lock}" for lock in own if _is_held(lock)]

    def tells_secrets(self, run: RunFolder) -> list[str]:
        """Files of the run, here and on the nodes, and living command lines that hold the secret of the environment."""
        folders = [run.path, *(self.node_folder(run, name) for name in self.testbed.node_names)]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return [str(path) for path in [*files, *Path("/proc").glob("[0-9]*/cmdline")] if _holds(path, SECRET)]

    # --- the table ---------------------------------------------------------------------------------------------------

    def conclude(self, row: Row, run: RunFolder | None, exit_code: int | None) -> Row:
        """The row completed from run.json, and kept for the table."""
        row.exit_code = exit_code
        if run is not None:
            state = run.read_state()
            failure = state.get("failure") or {}
            row.state, row.blamed = state["state"], describe(failure)
            row.left = self.left_behind(run.run_id)
            assert not self.tells_secrets(run)
        keep(row)
        return row


def describe(failure: dict[str, Any]) -> str:
    """Who is blamed for what, in one line."""
    if not failure:
        return "–"
    who = f"rank {failure['rank']} on {failure['host']}" if failure.get("rank") is not None else failure.get("host")
    return " ".join(filter(None, [failure.get("kind"), failure.get("type"), f"({who})" if who else None]))


def reason(stderr: str) -> str:
    """The first error that a refused launch named, in one line."""
    text = " ".join(stderr.rpartition("error: ")[2].split())
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 4] + " ..."


def keep(row: Row) -> None:
    """Leave the row for the table, if a table is made."""
    folder = os.environ.get(ROWS_VARIABLE)
    if folder:
        name = "".join(char if char.isalnum() else "_" for char in f"{row.when}_{row.fault}")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(asdict(row)))


def wait_for(condition: Callable[[], Any], timeout_s: float, said: Callable[[], str] = lambda: "") -> Any:
    """The first true answer of `condition`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout_s} s; {said()}")


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


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
