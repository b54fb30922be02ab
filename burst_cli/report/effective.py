"""Effective training time: which share of the wall clock made steps that count, and where the rest went.

wall = productive + start-up + evaluation + checkpoint stall + lost work + restart + other

productive         seconds of the steps that count: of the last attempt that made each step
start_up           from the first start to the training phase of the first attempt (or to its evaluation)
lost_work          steps that a later attempt made again
restart            from the end of an attempt to the training phase of the next one; all of one that never trained
checkpoint_stall   phases in which training waited for a checkpoint
other              the rest: between steps, shutting down
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from burst_cli.report.records import metric_rows, series
from cluster.remote_text import number
from engine.runs.files import read_json_lines
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError

_SHARES = ("wall", "productive", "start_up", "evaluation", "checkpoint_stall", "lost_work", "restart", "other")
EFFECTIVE_KEYS = ("attempts", "effective_fraction", *(f"{share}_s" for share in _SHARES))


@dataclass(frozen=True)
class _Attempt:
    """One attempt: when it started, began to train and ended (seconds since 1970), its steps and phases in seconds."""

    start: float
    begun: float
    end: float
    step_seconds: Mapping[int, float]
    phases: Mapping[str, float]


def effective_time(run: RunFolder) -> dict[str, Any]:
    """{attempts, effective_fraction, wall_s, productive_s, ...}; None for all that the run's files do not tell."""
    try:
        attempts = _attempts(run)
    except (RunFolderError, OSError, ValueError, TypeError, KeyError, AttributeError):
        attempts = []
    if not attempts:
        return dict.fromkeys(EFFECTIVE_KEYS)
    shares = _shares(attempts)
    fraction = shares["productive"] / shares["wall"] if shares["wall"] else None
    values = (len(attempts), fraction, *(shares[name] for name in _SHARES))
    return dict(zip(EFFECTIVE_KEYS, values, strict=True))


def _shares(attempts: Sequence[_Attempt]) -> dict[str, float]:
    owner = {step: index for index, attempt in enumerate(attempts) for step in attempt.step_seconds}
    productive = lost = restart = 0.0
    for index, attempt in enumerate(attempts):
        counted = sum(seconds for step, seconds in attempt.step_seconds.items() if owner[step] == index)
        productive += counted
        lost += sum(attempt.step_seconds.values()) - counted
        restart += max(0.0, attempt.begun - attempts[index - 1].end) if index else 0.0
    shares = {
        "productive": productive,
        "start_up": attempts[0].begun - attempts[0].start,
        "evaluation": sum(attempt.phases["evaluation"] for attempt in attempts),
        "checkpoint_stall": sum(attempt.phases["checkpoint"] for attempt in attempts),
        "lost_work": lost,
        "restart": restart,
    }
    wall = max(attempt.end for attempt in attempts) - attempts[0].start
    return {"wall": wall, **shares, "other": max(0.0, wall - sum(shares.values()))}


def _attempts(run: RunFolder) -> list[_Attempt]:
    starts: list[float] = []
    ends: list[float | None] = []
    for entry in run.read_state()["history"]:
        moment = _seconds(entry["at"])
        if entry["state"] == "starting":
            starts.append(moment)
            ends.append(None)
        elif entry["state"] in FINAL_STATES and ends:
            ends[-1] = moment
    folders = [*(run.path / "attempts" / str(number) for number in range(1, len(starts))), run.path]
    return [_attempt(*attempt) for attempt in zip(folders, starts, ends, strict=True)] if starts else []


def _attempt(folder: Path, start: float, end: float | None) -> _Attempt:
    """end None: it still runs, or died without a word; then it lasted until its last sign of life."""
    events = [(_seconds(event["at"]), event) for event in read_json_lines(folder / "events.jsonl") if "at" in event]
    metrics = folder / "metrics.jsonl"
    if end is None:
        # Renaming a file into attempts/ leaves its time as it was.
        written = [metrics.stat().st_mtime] if metrics.exists() else []
        end = max([start, *(moment for moment, _ in events), *written])
    phases = {name: [at for at, event in events if event.get("phase") == name] for name in ("train", "evaluate")}
    begun = min(phases["train"] or phases["evaluate"], default=max(start, end))
    steps = dict(series(metric_rows(metrics), "step_time_s"))
    return _Attempt(start, begun, max(start, end), steps, _phases(events, end))


def _phases(events: Sequence[tuple[float, Mapping[str, Any]]], end: float) -> dict[str, float]:
    """Seconds in evaluation and in checkpoints: from a phase to the next one; events that name their stall add it."""
    found = {"evaluation": 0.0, "checkpoint": sum((number(event, "stall_s") or 0.0 for _, event in events), 0.0)}
    phases = [(moment, str(event.get("phase"))) for moment, event in events if event.get("kind") == "phase"]
    for (moment, phase), (until, _) in zip(phases, [*phases, (end, "")][1:], strict=True):
        name = "evaluation" if phase == "evaluate" else "checkpoint" if "checkpoint" in phase else None
        if name is not None:
            found[name] += max(0.0, until - moment)
    return found


def _seconds(moment: Any) -> float:
    return datetime.fromisoformat(moment).timestamp()
