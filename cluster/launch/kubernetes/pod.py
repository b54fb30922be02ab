"""What a pod runs: `python -m cluster.launch.kubernetes.pod RUN COMMAND...`, where COMMAND is torchrun.

Whoever launched the run may not see the volume that RUN lies on, but can read what pods print. So the lines of the
ranks are printed as `rank0003| line`, and in the first pod every new line of RUN's records as `@burst NAME line`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.env.plan import recorder_variables
from engine.runs.files import read_json_object, replace_file
from engine.runs.folder import FINAL_STATES, RANK_LOGS_VARIABLE, RunFolder
from engine.runs.process import NODE_VARIABLE

# Files of the run folder, which come as variables: one object less to create, and to leave behind.
FILES = {"config.yaml": "BURST_CONFIG", "resolved.json": "BURST_RESOLVED", "memory_plan.json": "BURST_MEMORY_PLAN"}
MARK = "@burst"
RECORDS = ("metrics.jsonl", "events.jsonl")
DOCUMENTS = ("run.json", "summary.json")
PER_POD = frozenset({NODE_VARIABLE, RANK_LOGS_VARIABLE, "TORCH_FR_DUMP_TEMP_FILE"})
_LOOK_S = 0.5


def pod_node(rank: int) -> str:
    """The node that a pod is, in plans and files."""
    return f"pod-{rank}"


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """The exit code of the command; 128 and the signal where one ended it, or came before it began."""
    os.umask(0o077)
    child: subprocess.Popen[bytes] | None = None
    stops: list[int] = []

    def stop(number: int, _: object) -> None:
        stops.append(number)
        if child is not None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, stop)  # a container's first process is not ended by a signal that it does not handle
    run, rank = RunFolder(Path(arguments[0])), int(environment["PET_NODE_RANK"])
    log_dir = run.log_dir(pod_node(rank))
    log_dir.mkdir(parents=True, exist_ok=True)
    voice = Voice(run, log_dir, is_first=rank == 0)
    if rank == 0:
        # The others look for these only after they have met this pod.
        lay_files(run, {name: environment[key] for name, key in FILES.items() if key in environment})
    own = {NODE_VARIABLE: pod_node(rank), RANK_LOGS_VARIABLE: str(log_dir)}
    own |= {each.name: each.value for each in recorder_variables(str(log_dir)) if each.name in PER_POD}
    inherited = {name: value for name, value in environment.items() if name not in FILES.values()}
    code = -signal.SIGTERM
    with voice.speaking():
        if not stops:
            child = subprocess.Popen(arguments[1:], env={**inherited, **own})
            if stops:  # it came meanwhile
                child.send_signal(signal.SIGTERM)
            code = child.wait()
    if rank == 0 and run.read_state()["state"] not in FINAL_STATES:
        run.transition("failed")
    voice.say_documents()
    return code if code >= 0 else 128 - code


def lay_files(run: RunFolder, files: Mapping[str, str]) -> None:
    """The files of a new attempt; records of an earlier one are put aside, whether or not it could say its end."""
    for name, text in files.items():
        replace_file(run.path / name, text)
    if run.read_state()["state"] in ("starting", "running"):
        run.transition("failed")
    run.transition("starting")


class Voice:
    """Prints what is new in the files of a run, line by line, each line in one write."""

    def __init__(self, run: RunFolder, log_dir: Path, *, is_first: bool) -> None:
        self._run, self._log_dir, self._is_first = run, log_dir, is_first
        # What earlier attempts said has been printed then.
        self._offsets = {path: path.stat().st_size for path in log_dir.glob("rank*.log")}
        self._said: dict[str, object] = {}
        self._end = threading.Event()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Print from a thread, to the last line."""
        thread = threading.Thread(target=self._serve, name="voice", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def say_documents(self) -> None:
        """Print what the run and its ranks wrote whole."""
        for path in sorted(self._log_dir.glob("rank*.error.json")):
            self._say_document(path, path.name)
        for name in DOCUMENTS if self._is_first else ():
            self._say_document(self._run.path / name, name)

    def _serve(self) -> None:
        while not self._end.wait(_LOOK_S):
            self._look()
        self._look(final=True)

    def _look(self, *, final: bool = False) -> None:
        for path in sorted(self._log_dir.glob("rank*.log")):
            self._say_lines(path, f"{path.stem}| ", final=final)
        if self._is_first:
            for name in RECORDS:
                self._say_lines(self._run.path / name, f"{MARK} {name} ", final=final)
            self._say_document(self._run.path / DOCUMENTS[0], DOCUMENTS[0])

    def _say_lines(self, path: Path, prefix: str, *, final: bool) -> None:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            for line in file:
                if final or line.endswith(b"\n"):
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    _print(prefix.encode() + line.rstrip(b"\n"))

    def _say_document(self, path: Path, name: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            document = read_json_object(path)
            if document is not None and self._said.get(name) != document:
                self._said[name] = document
                _print(f"{MARK} {name} {json.dumps(document)}".encode())


def _print(line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
