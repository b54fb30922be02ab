"""The run folder: the files of a run, and the only code that writes them.

    runs/<exp>/<UTC yyyymmdd-hhmmss>-<id6>/          mode 0700, appears complete or not at all
        config.yaml resolved.json overrides.txt provenance.json plan.sh env/<node>.env
        run.json           the state machine below, replaced atomically under a lock on the folder
        events.jsonl       one object per event;  metrics.jsonl: one object per optimizer step
        summary.json       figures of the whole run
        logs/<node>/rank<NNNN>.log, .status.json, .stacks and, when that rank failed, .error.json
        checkpoints/
        attempts/<N>/      metrics, events, summary and errors of an earlier attempt of the same run

    planned  -> starting, failed, cancelled, oom
    starting -> running, failed, cancelled, oom
    running  -> completed, failed, cancelled, oom
    completed, failed, cancelled, oom -> starting (another attempt)

Standard library only: every rank, the command line and tests import this module without torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config.errors import BurstError, ConfigError
from engine.runs.files import append_json_line, new_folder, read_json_lines, read_json_object, replace_json, utc_now
from engine.runs.oom import measure_out_of_memory
from engine.runs.process import NODE_VARIABLE, process_start

OVERRIDES_FILE = "overrides.txt"  # the typed overrides, one per line
RESOLVED_FILE = "resolved.json"  # config.yaml as the launch resolved it; ranks read it (`engine.resolve.run`)
RUNS_DIR_VARIABLE = "BURST_RUNS_DIR"
RANK_LOGS_VARIABLE = "BURST_RANK_LOGS"  # set: ranks write to their log files instead of the terminal
_UNHAPPY = ("failed", "cancelled", "oom")
FINAL_STATES = frozenset({"completed", *_UNHAPPY})
_MOVES: Mapping[str, tuple[str, ...]] = {
    "planned": ("starting", *_UNHAPPY),
    "starting": ("running", *_UNHAPPY),
    "running": ("completed", *_UNHAPPY),
    **dict.fromkeys(("completed", *_UNHAPPY), ("starting",)),
}
STATES = tuple(_MOVES)
# Fields of run.json that state transitions read: check, and description for the message.
_STATE_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "state": (lambda value: value in STATES, f"one of {', '.join(STATES)}"),
    "attempt": (lambda value: type(value) is int and value > 0, "a number from 1 on"),
    "history": (lambda value: isinstance(value, list), "a list"),
}
_MESSAGE_CHARACTERS = 4_000
_TRACEBACK_CHARACTERS = 20_000
# Errors of a rank that only lost its connection to a failed one.
_ECHO_TYPES = ("DistBackendError", "DistNetworkError", "ConnectionError", "ConnectionResetError", "BrokenPipeError")
_ECHO_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_EXP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ATTEMPT_FILES = ("metrics.jsonl", "events.jsonl", "summary.json")


class RunFolderError(BurstError):
    """A run folder cannot be created or read, or a state transition is not allowed."""


def node_name() -> str:
    """Return the name of this machine in a run's files: that of the launch plan, else its host name."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


def default_runs_dir() -> Path:
    """Return the root of all runs: BURST_RUNS_DIR, else ./runs."""
    return Path(os.environ.get(RUNS_DIR_VARIABLE) or "runs")


def new_run_path(runs_dir: Path, exp: str) -> Path:
    """Return the absolute path of a new run of `exp`, not created; its name has UTC time and six random hex digits."""
    if not _EXP.fullmatch(exp):
        raise ConfigError(f"exp={exp!r} cannot name a folder: use letters, digits, '.', '_' and '-', at most 100.")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path(runs_dir).absolute() / exp / f"{stamp}-{secrets.token_hex(3)}"


def check_writable(path: Path) -> None:
    """Raise RunFolderError if the run folder `path` cannot be created; creates nothing.

    For callers with long work to do before `create_run`; a folder that passes may still refuse later.
    """
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise _cannot_create(path, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _cannot_create(path, f"{nearest} is not writable")


def create_run(path: Path, files: Mapping[str, str], **facts: Any) -> RunFolder:
    """Create the run folder `path` in state planned with `files` (relative name -> text); `facts` go to run.json.

    A failure leaves nothing of it. Raises RunFolderError with the cause.
    """
    try:
        with new_folder(path, 0o700) as work:
            for name, text in files.items():
                target = work / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
                target.chmod(0o700 if name.endswith(".sh") else 0o600)
            for name in ("logs", "checkpoints"):
                (work / name).mkdir(exist_ok=True)
            replace_json(work / "run.json", {**initial_state(), **facts})
    except OSError as error:
        raise _cannot_create(path, error.strerror or str(error)) from error
    return RunFolder(path)


def open_run(path: Path | str) -> RunFolder:
    """Open the run in folder `path` (or that of its config.yaml); a folder without run.json counts as planned."""
    folder = Path(path).absolute()
    if folder.name == "config.yaml":
        folder = folder.parent
    if not (folder / "run.json").is_file() and not (folder / "config.yaml").is_file():
        raise RunFolderError(f"{folder} is no run folder: it holds neither run.json nor config.yaml.")
    return RunFolder(folder)


def typed_overrides(path: Path) -> list[str]:
    """Return the command that was typed for the run in folder `path`; empty if it cannot be read."""
    try:
        return (path / OVERRIDES_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """Return all runs in `runs_dir`, oldest first by name; damaged ones are included and raise when they are read."""
    folders = [folder for folder in Path(runs_dir).absolute().glob("*/*") if _RUN_ID.fullmatch(folder.name)]
    return [RunFolder(folder) for folder in sorted(folders, key=lambda folder: (folder.name, str(folder)))]


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. Every process of the run may have one; only `transition` changes run.json."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def exp(self) -> str:
        return self.path.parent.name

    # --- state -----------------------------------------------------------------------------------------------------

    def read_state(self) -> dict[str, Any]:
        """Read run.json; a missing file means planned. Raises RunFolderError if it is damaged."""
        document = initial_state() | (self._read("run.json") or {})
        for name, (is_right, expected) in _STATE_RULES.items():
            if not is_right(document[name]):
                raise RunFolderError(
                    f"{self.path / 'run.json'} is damaged: {name} is {document[name]!r}, expected {expected}."
                )
        return document

    def transition(self, state: str, **facts: Any) -> dict[str, Any]:
        """Change the state in run.json and merge `facts` (the last writer of a fact wins); return the new content.

        Entering starting records host, pid and start; entering a final state records the end. Starting again after
        the end (or after the recorded process died) moves the old metrics, events, summary and errors to attempts/<N>.
        Raises RunFolderError for a move that the diagram above does not have, and for an unwritable folder.
        """
        return self._change(
            f"Run {self.run_id} cannot be moved to state {state}", lambda old: self._moved(old, state, facts)
        )

    def record(self, **facts: Any) -> None:
        """Merge `facts` into run.json without a change of state."""
        self._change(f"{self.path / 'run.json'} cannot be written", lambda old: {**old, **facts})

    def is_alive(self) -> bool | None:
        """Return whether the process in run.json is alive; None if it is on another host or unknown."""
        document = self.read_state()
        pid, started = document.get("pid"), document.get("pid_start")
        if document.get("host") != socket.gethostname() or not isinstance(pid, int):
            return None
        now = process_start(pid)
        return now is not None and (started is None or now == started)

    # --- records ---------------------------------------------------------------------------------------------------

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; non-finite figures become null."""
        append_json_line(self.path / "metrics.jsonl", row)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read all complete rows of metrics.jsonl in order, without a partial line."""
        return read_json_lines(self.path / "metrics.jsonl")

    def append_event(self, kind: str, **facts: Any) -> None:
        """Append {at, kind, **facts} to events.jsonl; live progress shows kind "phase" with phase="..."."""
        append_json_line(self.path / "events.jsonl", {"at": utc_now(), "kind": kind, **facts})

    def read_events(self) -> list[dict[str, Any]]:
        """Read all complete events in order."""
        return read_json_lines(self.path / "events.jsonl")

    def attempts(self) -> list[RunFolder]:
        """Return the folders with the records of this run's attempts, oldest first; the last is the run folder."""
        earlier = (path for path in (self.path / "attempts").glob("*") if path.name.isdecimal())
        return [*(RunFolder(path) for path in sorted(earlier, key=lambda path: int(path.name))), self]

    def saved_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints of all attempts, in order of commit."""
        events = (event for attempt in self.attempts() for event in attempt.read_events())
        saved = (event.get("step") for event in events if event.get("kind") == "checkpoint")
        return [step for step in saved if isinstance(step, int)]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json atomically."""
        replace_json(self.path / "summary.json", summary)

    def read_summary(self) -> dict[str, Any] | None:
        """Read summary.json, None if the run has none. Raises RunFolderError if it is damaged."""
        return self._read("summary.json")

    def read_memory_plan(self) -> dict[str, Any] | None:
        """Read memory_plan.json, None if the run has none."""
        return self._read("memory_plan.json")

    # --- logs and errors of ranks ----------------------------------------------------------------------------------

    def log_dir(self, host: str) -> Path:
        """Return logs/<host>, with '_' for characters that are not allowed in a file name."""
        return self.path / "logs" / (re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "_")

    def log_path(self, host: str, rank: int) -> Path:
        """Return logs/<host>/rank<NNNN>.log, the standard output and error of that rank."""
        return self.log_dir(host) / f"rank{rank:04d}.log"

    def write_rank_error(
        self, rank: int, error: BaseException, *, step: int | None = None, phase: str | None = None
    ) -> None:
        """Write the error that ended this rank next to its log; never raises, since the rank is ending with `error`."""
        host = node_name()
        path = self.log_path(host, rank).with_suffix(".error.json")
        record = {"rank": rank, "host": host, "pid": os.getpid(), "step": step, "phase": phase, **describe_error(error)}
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, record)

    def rank_errors(self) -> list[dict[str, Any]]:
        """Return the errors that ranks of this attempt wrote, earliest first."""
        records = []
        for path in self.path.glob("logs/*/rank*.error.json"):
            with contextlib.suppress(OSError, ValueError):
                records.append(read_json_object(path))
        return sorted((record for record in records if record), key=_when)

    # --- internals -------------------------------------------------------------------------------------------------

    def _change(self, failure: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Update run.json under the folder's lock, since launcher and rank 0 both change it; return the new content."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                document = change(self.read_state())
                replace_json(self.path / "run.json", document)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RunFolderError(f"{failure}: {error}.") from error
        return document

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return read_json_object(self.path / name)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / name} is damaged: {error}") from error

    def _moved(self, document: dict[str, Any], state: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        old, now = document["state"], utc_now()
        # The other way to start: its launcher died without a word.
        is_dead = state == "starting" and old in ("starting", "running") and self.is_alive() is False
        if state not in _MOVES[old] and not is_dead:
            raise RunFolderError(
                f"Run {self.run_id} is {old} (pid {document.get('pid')} on {document.get('host')}) "
                f"and cannot become {state}; allowed: {', '.join(sorted(_MOVES[old]))}."
            )
        if state == "starting":
            if old != "planned":
                self._put_attempt_aside(document["attempt"])
                document["attempt"] += 1
            document.update(process_facts(), started_at=now, ended_at=None, exit_code=None, failure=None)
        if state in FINAL_STATES:
            document.update(ended_at=now, exit_code=0 if state == "completed" else 1)
        return {**document, "history": [*document["history"], {"state": state, "at": now}], "state": state, **facts}

    def _put_attempt_aside(self, attempt: int) -> None:
        """Move the records of the ended attempt to attempts/<N>, so that two attempts never mix."""
        target = self.path / "attempts" / str(attempt)
        target.mkdir(parents=True, exist_ok=True)
        for name in _ATTEMPT_FILES:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rename(target / name)
        for path in self.path.glob("logs/*/rank*.json"):  # errors and status files of ranks
            path.rename(target / path.name)


def process_facts() -> dict[str, Any]:
    """Return this process as run.json records the leading process of a run: {host, pid, pid_start}."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_start": process_start(pid)}


def initial_state() -> dict[str, Any]:
    """Return the content of run.json of a planned run."""
    unknown = dict.fromkeys(("host", "pid", "pid_start", "started_at", "ended_at", "exit_code", "failure"))
    return {"state": "planned", "attempt": 1, **unknown, "history": [{"state": "planned", "at": utc_now()}]}


def _cannot_create(path: Path, cause: str) -> RunFolderError:
    return RunFolderError(
        f"The run folder {path} cannot be created: {cause}. "
        f"Give a writable folder with --runs-dir or {RUNS_DIR_VARIABLE}."
    )


def _when(record: Mapping[str, Any]) -> int:
    at = record.get("time_ns")
    return at if isinstance(at, int) else 0


def describe_error(error: BaseException) -> dict[str, Any]:
    """{kind, type, message, traceback, exit_code, time_ns, at, memory}; kind: config, user, oom, peer_lost, exception.

    `memory`: result of `measure_out_of_memory` for kind oom, else None.
    """
    measured = measure_out_of_memory(error)
    kind, text = type(error), str(error)[:_MESSAGE_CHARACTERS]
    exit_code = error.exit_code if isinstance(error, BurstError) else 1
    is_plain = kind.__module__ in ("builtins", "__main__")
    if measured is not None:
        what = "oom"  # an error of ours may have been raised from it
    elif isinstance(error, BurstError):
        what = "config" if exit_code == 2 else "user"
    else:
        is_echo = kind.__name__ in _ECHO_TYPES or any(words in text for words in _ECHO_TEXTS)
        what = "peer_lost" if is_echo else "exception"
    return {
        "kind": what,
        "type": kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}",
        "message": text,
        "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:],
        "exit_code": exit_code,
        "time_ns": time.time_ns(),
        "at": utc_now(),
        "memory": measured,
    }
