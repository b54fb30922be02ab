"""Effective training time: which share of the wall clock made steps that count, and where the rest went.

Read from what a run keeps anyway: the history of run.json (starts and ends), metrics.jsonl (seconds of every step) and
events.jsonl (phases), each for every attempt (attempts/<N>/ holds those of earlier ones).

    wall = productive + start-up + evaluation + checkpoint stall + lost work + restart + other

    productive         seconds of the steps that count: of the last attempt that made each step
    start_up           from the first start to the training phase of the first attempt; of a run that only evaluates,
                       to that
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

from burst_cli.report.metrics_file import metric_rows
from burst_cli.report.values import number
from engine.checkpoint.commit import checkpoints_of, list_checkpoints
from engine.errors import ConfigError
from engine.run.records import read_json_lines
from engine.runs import FINAL_STATES, RunFolder, RunFolderError

_KEYS = ("wall", "productive", "start_up", "evaluation", "checkpoint_stall", "lost_work", "restart", "other")


@dataclass(frozen=True)
class _Attempt:
    """One attempt: when it started, ended and began to train (seconds since 1970), its steps and phases in seconds."""

    start: float
    end: float
    trained_from: float | None
    step_seconds: Mapping[int, float]
    phases: Mapping[str, float]


def effective_time(run: RunFolder) -> dict[str, Any]:
    """{attempts, effective_fraction, wall_s, productive_s, ...}; None for all that the run's files do not tell."""
    unknown: dict[str, Any] = {"attempts": None, "effective_fraction": None, **{f"{key}_s": None for key in _KEYS}}
    try:
        state = run.read_state()
        attempts = _attempts(run, state)
    except (RunFolderError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return unknown
    if not attempts:
        return unknown
    seconds = _shares(attempts)
    if not any(attempt.phases.get("checkpoint") for attempt in attempts) and _has_checkpoints(run.path):
        seconds["checkpoint_stall"] = None  # some were written, nothing says how long that took
    known = {f"{key}_s": seconds[key] for key in _KEYS}
    wall, productive = seconds["wall"], seconds["productive"]
    fraction = productive / wall if wall and productive is not None else None
    return {"attempts": len(attempts), "effective_fraction": fraction, **known}


def _shares(attempts: Sequence[_Attempt]) -> dict[str, float | None]:
    owner = {step: index for index, attempt in enumerate(attempts) for step in attempt.step_seconds}
    productive = lost = restart = 0.0
    for index, attempt in enumerate(attempts):
        for step, seconds in attempt.step_seconds.items():
            if owner[step] == index:
                productive += seconds
            else:
                lost += seconds
        begun = attempt.end if attempt.trained_from is None else attempt.trained_from
        if index:
            restart += max(0.0, begun - attempts[index - 1].end)
    first = attempts[0]
    start_up = (first.end if first.trained_from is None else first.trained_from) - first.start
    wall = max(attempt.end for attempt in attempts) - first.start
    shares: dict[str, float | None] = {
        "wall": wall,
        "productive": productive,
        "start_up": start_up,
        "evaluation": sum(attempt.phases.get("evaluation", 0.0) for attempt in attempts),
        "checkpoint_stall": sum(attempt.phases.get("checkpoint", 0.0) for attempt in attempts),
        "lost_work": lost,
        "restart": restart,
    }
    spent = sum(value for key, value in shares.items() if key != "wall" and value is not None)
    return {**shares, "other": max(0.0, wall - spent)}


def _attempts(run: RunFolder, state: Mapping[str, Any]) -> list[_Attempt]:
    starts: list[float] = []
    ends: list[float | None] = []
    for entry in state["history"]:
        moment = _seconds(entry["at"])
        if entry["state"] == "starting":
            starts.append(moment)
            ends.append(None)
        elif entry["state"] in FINAL_STATES and ends:
            ends[-1] = moment
    last = len(starts) - 1
    folders = [run.path if index == last else run.path / "attempts" / str(index + 1) for index in range(len(starts))]
    return [_attempt(folder, start, end) for folder, start, end in zip(folders, starts, ends, strict=True)]


def _attempt(folder: Path, start: float, end: float | None) -> _Attempt:
    """end None: it still runs, or died without a word; then it lasted until its last sign of life."""
    events = [(_seconds(event["at"]), event) for event in read_json_lines(folder / "events.jsonl") if "at" in event]
    if end is None:
        signs = [moment for moment, _ in events]
        metrics = folder / "metrics.jsonl"
        if metrics.exists():
            signs.append(metrics.stat().st_mtime)  # renaming a file into attempts/ leaves its time as it was
        end = max([start, *signs])
    trains = _entered(events, "train") or _entered(events, "evaluate")
    rows = metric_rows(folder / "metrics.jsonl", all_rows=True)
    steps = {row["step"]: seconds for row in rows if (seconds := number(row, "step_time_s")) is not None}
    return _Attempt(start, max(start, end), min(trains, default=None), steps, _phases(events, end))


def _entered(events: Sequence[tuple[float, Mapping[str, Any]]], phase: str) -> list[float]:
    return [moment for moment, event in events if event.get("phase") == phase]


def _phases(events: Sequence[tuple[float, Mapping[str, Any]]], end: float) -> dict[str, float]:
    """Seconds in evaluation and in checkpoints: from a phase to the next one; events that name their stall add it."""
    found = {"evaluation": 0.0, "checkpoint": 0.0}
    phases = [(moment, str(event.get("phase"))) for moment, event in events if event.get("kind") == "phase"]
    for index, (moment, phase) in enumerate(phases):
        until = phases[index + 1][0] if index + 1 < len(phases) else end
        name = "evaluation" if phase == "evaluate" else "checkpoint" if "checkpoint" in phase else None
        if name is not None:
            found[name] += max(0.0, until - moment)
    found["checkpoint"] += sum(number(event, "stall_s") or 0.0 for _, event in events)
    return found


def _has_checkpoints(path: Path) -> bool:
    try:
        return bool(list_checkpoints(checkpoints_of(path)))
    except (ConfigError, OSError):
        return False


def _seconds(moment: Any) -> float:
    return datetime.fromisoformat(moment).timestamp()
