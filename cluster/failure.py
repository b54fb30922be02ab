"""Which rank failed first, and how: from the errors that ranks left and from what torchrun saw. Pure functions.

torchrun's own "root cause" is often the victim: a rank that lost its peer fails loudly, while the one that was killed
says nothing.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import RunConfig
from engine.memory.oom import Where, less_memory_text

Kind = Literal["config", "user", "oom", "exception", "peer_lost", "signal", "exit", "launcher"]

_FIRST_DEATH = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


@dataclass(frozen=True)
class Failure:
    """What ended a run. `rank` is None when no rank is to blame; `signal` is a name such as SIGKILL.

    memory: what `engine.memory.oom.OutOfMemory` says and what was predicted, under kind oom. advice: what to do next.
    """

    kind: Kind
    type: str
    message: str
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    phase: str | None = None
    signal: str | None = None
    exit_code: int = 1
    log: str | None = None
    memory: Mapping[str, Any] | None = None
    advice: str | None = None

    @property
    def status(self) -> str:
        """The final state of the run: failed or oom."""
        return "oom" if self.kind == "oom" else "failed"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as they stand in run.json."""
        return asdict(self)


@dataclass(frozen=True)
class Death:
    """The first rank that torchrun saw end badly; a negative exit code is a signal."""

    rank: int
    exit_code: int
    pid: int | None = None

    @property
    def signal(self) -> signal.Signals | None:
        try:
            return signal.Signals(-self.exit_code) if self.exit_code < 0 else None
        except ValueError:
            return None


def first_death(torchrun_log: str) -> Death | None:
    """The rank that torchrun observed to fail first, or None when its log names none (one node: local rank = rank)."""
    found = _FIRST_DEATH.search(torchrun_log)
    return Death(int(found[2]), int(found[1]), int(found[3])) if found else None


@dataclass(frozen=True)
class KillFacts:
    """What is known when a process was ended by SIGKILL.

    evidence: why it is certain that the kernel did it for lack of memory. hint: why that is possible. memory: what the
    process held, as in `Failure.memory`.
    """

    evidence: str | None = None
    hint: str | None = None
    memory: Mapping[str, Any] | None = None


def find_failure(
    errors: Sequence[Mapping[str, Any]],
    death: Death | None,
    torchrun_exit_code: int,
    kill: KillFacts = KillFacts(),
) -> Failure:
    """The failure that came first.

    errors: what ranks wrote themselves, earliest first. death: what torchrun observed first. kill: what is known should
    SIGKILL have ended that rank, or torchrun. A rank killed by a signal is the cause, and the errors of
    others its echo; only an abort may itself be an echo (NCCL aborts ranks that lost a peer).
    """
    silent = death is not None and all(error.get("rank") != death.rank for error in errors)
    if death is not None and silent and death.signal not in (None, signal.SIGABRT, signal.SIGTERM):
        return _from_death(death, kill)
    own = [error for error in errors if error.get("kind") != "peer_lost"]
    if own:
        return _from_error(own[0])
    if death is not None and silent:
        return _from_death(death, kill)
    if errors:
        return _from_error(errors[0])
    if torchrun_exit_code == -signal.SIGKILL:
        return _killed("torchrun", None, kill)
    how = f"signal {-torchrun_exit_code}" if torchrun_exit_code < 0 else f"exit code {torchrun_exit_code}"
    if torchrun_exit_code == 0:
        return Failure("launcher", "Incomplete", "all ranks ended without an error before training was complete")
    return Failure("launcher", "LauncherDied", f"torchrun ended with {how} and no rank reported an error")


def advice(failure: Failure, run_path: Path, config: RunConfig) -> str:
    """What to do next, in one or two sentences; `run_path` is the run folder, whose plan.sh starts the ranks again."""
    log = failure.log or "the log"
    again = f"`sh {shlex.quote(str(run_path / 'plan.sh'))}` starts the same ranks again."
    match failure.kind:
        case "config" | "user":
            return "Correct the setting or file that the message names and launch again."
        case "oom":
            return less_memory_text(config, _where(failure))
        case "signal" if failure.signal == "SIGKILL":
            remedy = _lower(less_memory_text(config, "host"))
            return f"If `dmesg` shows that the kernel ran out of memory, {remedy} If not, ask who sent the signal."
        case "peer_lost":
            return f"The rank that it lost said nothing: compare the logs beside {log}."
        case "launcher":
            return f"Read {log}; {again}"
        case _:
            return f"The whole traceback is in {log}; {again}"


def _where(failure: Failure) -> Where:
    return "device" if failure.memory is not None and failure.memory.get("where") == "device" else "host"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _from_error(error: Mapping[str, Any]) -> Failure:
    return Failure(
        kind=error.get("kind", "exception"),
        type=str(error.get("type", "Error")),
        message=str(error.get("message", "")),
        rank=error.get("rank"),
        host=error.get("host"),
        step=error.get("step"),
        phase=error.get("phase"),
        exit_code=2 if error.get("exit_code") == 2 else 1,
        memory=error.get("memory"),
    )


def _from_death(death: Death, kill: KillFacts) -> Failure:
    if death.signal is None:
        text = f"the process ended with exit code {death.exit_code} without leaving an error"
        return Failure("exit", "SystemExit", text, rank=death.rank)
    if death.signal is signal.SIGKILL:
        return _killed("the process", death.rank, kill)
    name = death.signal.name
    return Failure(
        "signal", name, f"the process was ended by signal {-death.exit_code} ({name})", rank=death.rank, signal=name
    )


def _killed(what: str, rank: int | None, kill: KillFacts) -> Failure:
    """What SIGKILL ended: lack of memory if that is certain, else a signal of somebody."""
    if kill.evidence is not None:
        text = f"the kernel killed {what} (SIGKILL) because host memory ran out: {kill.evidence}"
        return Failure("oom", "OutOfMemory", text, rank=rank, signal="SIGKILL", memory=kill.memory)
    text = " ".join(filter(None, [f"{what} was ended by signal 9 (SIGKILL).", kill.hint]))
    if rank is None:
        return Failure("launcher", "LauncherDied", f"{text} No rank reported an error.", signal="SIGKILL")
    return Failure("signal", "SIGKILL", text, rank=rank, signal="SIGKILL")
