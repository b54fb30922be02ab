"""The one block that a person reads when a run failed: who, when, what, the last words, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from burst_cli.render import clean
from cluster.control.attempt import read_log_starts, tail_text
from cluster.failure import Failure
from cluster.remote_text import number, word
from engine.runs.figures import binary_bytes
from engine.runs.folder import RunFolder, RunFolderError

LOG_LINES = 15
_SELF_EXPLAINING = ("config", "user", "start", "hang", "node_lost", "port")
_MESSAGE_CHARACTERS = 2_000
_LINE_CHARACTERS = 400


def failure_block(run: RunFolder, failure: Failure) -> Text:
    """The block for `run`; nothing in it is markup, and terminal escapes of the ranks are gone."""
    where = _where(failure)
    block = Text.assemble(
        (f"{failure.status.upper()} ", "bold red"),
        (f"{run.exp}/{run.run_id}", "bold"),
        f": {where}\n" if where else "\n",
    )
    kind = "" if failure.kind in (*_SELF_EXPLAINING, "launcher") else f"{clean(failure.type)}: "
    message = clean(failure.message)[:_MESSAGE_CHARACTERS].rstrip() or "(no message)"
    block.append("".join(f"  {line}\n" for line in f"{kind}{message}".splitlines()), style="red")
    if failure.memory is not None:
        block.append(f"  memory: {memory_line(failure.memory)}\n")
    dim = [f"│ {clean(line)[:_LINE_CHARACTERS]}" for line in failure.details]
    if failure.stacks:
        dim.append(f"stacks of the rank {failure.stacks}, those of the others beside it")
    if failure.log and failure.kind not in _SELF_EXPLAINING:
        lines = last_lines(failure.log, start=_attempt_start(run, failure.log))
        dim.append(f"last lines of {failure.log}" if lines else f"log {failure.log} (empty)")
        dim += [f"│ {line}" for line in lines]
    block.append("".join(f"  {line}\n" for line in dim), style="dim")
    if failure.checkpoint:
        block.append(f"  last checkpoint {failure.checkpoint}\n")
    if failure.advice:
        block.append("  what to do: ", style="bold")
        block.append(failure.advice)
    return block


def failure_line(failure: Any) -> str:
    """Who failed with what, in one line, by the failure in run.json; empty without one."""
    rank, host = number(failure, "rank"), word(failure, "host")
    who = f"rank {rank:.0f}{f' on {host}' if host else ''}: " if rank is not None else ""
    return f"{who}{': '.join(filter(None, [word(failure, 'type', 60), word(failure, 'message')]))}"


def memory_line(memory: Mapping[str, Any]) -> str:
    """Peak, capacity, prediction and the allocation that failed; `memory` is `Failure.memory`."""
    peak, capacity, predicted, asked = (
        memory.get(name) for name in ("peak_bytes", "capacity_bytes", "predicted_peak_bytes", "requested_bytes")
    )
    of = f" of {binary_bytes(capacity)}" if capacity is not None else ""
    line = f"{memory.get('device', memory.get('where'))}: peak {binary_bytes(peak)}{of} ({memory.get('peak_source')})"
    line += f", {binary_bytes(asked)} more asked for" if asked is not None else ""
    line += f", predicted peak {binary_bytes(predicted)}" if predicted is not None else ""
    return clean(line)


def last_lines(log: str, count: int = LOG_LINES, *, start: int = 0) -> list[str]:
    """The last `count` lines of a log from byte `start` on that say something, cut to a width that can be read."""
    lines = [line.rstrip() for line in clean(tail_text(Path(log), start=start)).splitlines()]
    return [line[:_LINE_CHARACTERS] for line in lines if line][-count:]


def _attempt_start(run: RunFolder, log: str) -> int:
    """Where the last attempt begins in a log that earlier ones wrote as well."""
    with contextlib.suppress(RunFolderError, ValueError):
        return read_log_starts(run).get(Path(log).relative_to(run.path).as_posix(), 0)
    return 0


def _where(failure: Failure) -> str:
    parts = []
    if failure.rank is not None:
        parts.append(f"rank {failure.rank}" if failure.host is None else f"rank {failure.rank} on {failure.host}")
    elif failure.host is not None:
        parts.append(f"on {failure.host}")
    if failure.step is not None:
        # A rank that was killed could not say where it was: what is known is the last step that was recorded.
        inside = failure.phase and not failure.signal
        parts.append(f"step {failure.step}" if inside else f"after step {failure.step}")
    if failure.phase:
        parts.append(f"phase {clean(failure.phase)}")
    return ", ".join(parts)
