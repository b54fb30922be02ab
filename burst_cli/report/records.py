"""What the files of a run say, as flat records, whatever a damaged or foreign file put there. Never raises."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from burst_cli.runs.read import read_table, run_record
from cluster.remote_text import one_line
from cluster.values import number, table, text, whole
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError
from engine.runs.records import read_json_lines

Record = Mapping[str, Any]
LEAST_STEPS_RANKED = 5  # measured ones; fewer rank nobody
PEAK_FIGURES = ("mfu", "mfu_full_attention", "hfu")
_SAME_PEAK = 1.01
_MOST_LINES = 12
_VERSIONS = ("burst-train", "torch", "python", "flash-attn", "triton")


class Pooled(NamedTuple):
    """One figure of runs that are alike. may_rank: there are steps enough to call it better than another."""

    middle: float
    low: float
    high: float
    may_rank: bool


# --- values of a record -----------------------------------------------------------------------------------------------


def method_of(record: Record) -> str | None:
    """Attention preset and memory policy: `burst/attn_out`; the preset alone where nothing is recomputed."""
    preset, policy = text(record, "attention_preset"), text(record, "memory_policy")
    return preset if preset is None or policy in (None, "none") else f"{preset}/{policy}"


def run_name(record: Record) -> str:
    """exp/run_id, or the cell of a sweep that has no run."""
    if record.get("run_id") is None:
        return f"cell {text(record, 'cell') or '?'}"
    return one_line(f"{record.get('exp')}/{record['run_id']}")


def status_of(record: Record) -> str:
    """Its state; `lost` where that says it runs, but nobody sees to it any more."""
    return "lost" if record.get("lost") else text(record, "status") or "?"


def first_of(lines: Sequence[str]) -> list[str]:
    """`lines`, or the first of them and how many more there are."""
    more = len(lines) - _MOST_LINES
    return [*lines] if more <= 0 else [*lines[:_MOST_LINES], f"and {more} more"]


def tokens(value: float) -> str:
    """A sequence length as people say it: 512, 4K, 256K, 1M (powers of two); others in full."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value >= size and value % size == 0:
            return f"{value / size:.0f}{unit}"
    return f"{value:,.0f}"


def pooled(records: Iterable[Record], name: str) -> Pooled | None:
    """The median of the completed runs' figures and the widest of their quartiles; None where none has the figure."""
    runs = [r for r in records if r.get("status") == "completed" and number(r, name) is not None]
    if not runs:
        return None

    def figures(key: str) -> list[float]:
        return [value for run in runs if (value := number(run, key)) is not None]

    middles = figures(name)
    low, high = figures(f"{name}_p25") or middles, figures(f"{name}_p75") or middles
    middle, steps = statistics.median(middles), sum(figures("step_time_s_n"))
    # A damaged summary may have quartiles on one side of its median, which no bar can show.
    return Pooled(middle, min(middle, *low), max(middle, *high), steps >= LEAST_STEPS_RANKED)


def share_a_peak(records: Iterable[Record]) -> bool:
    """Whether utilisations of these runs may be compared: they are shares of one peak."""
    peaks = [value for record in records if (value := number(record, "peak_flops_per_device")) is not None]
    return not peaks or max(peaks) <= _SAME_PEAK * min(peaks)


def is_above_peak(record: Record) -> bool:
    """Whether the run claims more FLOP/s than its device has: then the peak or the clock is wrong."""
    return any((number(record, name) or 0.0) > 1.0 for name in ("mfu", "hfu"))


# --- run.json, summary.json and provenance.json -----------------------------------------------------------------------


def read_record(run: RunFolder) -> dict[str, Any]:
    """The record of a run with where it comes from."""
    record = run_record(run)
    failure = record.get("failure")
    message = failure.get("message") if isinstance(failure, dict) else None
    return {**provenance_facts(run.path), **record, "failure_text": one_line(str(message)) if message else None}


def provenance_facts(run_path: Path) -> dict[str, Any]:
    """The facts of RUN/provenance.json, None for what it does not say.

    launch_hardware is that of the machine that launched: see `with_hardware` for what the ranks themselves said.
    """
    document = read_table(run_path / "provenance.json")
    git, hardware, versions = (table(document, name) for name in ("git", "hardware", "versions"))
    command, gpus = document.get("command"), hardware.get("gpus")
    device = one_line(str(gpus[0]).partition(",")[0]) if gpus and isinstance(gpus, list) else "cpu"
    return {
        "git_sha": text(git, "sha"),
        "dirty": git.get("dirty") if isinstance(git.get("dirty"), bool) else None,
        "host": text(hardware, "host"),
        "launch_hardware": device if isinstance(gpus, list) else None,
        "versions": {name: text(versions, name) for name in _VERSIONS if versions.get(name) is not None} or None,
        "command": one_line(" ".join(map(_without_values, command))) if isinstance(command, list) else None,
        "image": text(document, "image"),
    }


def _without_values(word: object) -> str:
    """A word of a command line; of cluster.environment only which setting it is, for its values may be secrets."""
    key, equals, _ = str(word).partition("=")
    return f"{key}=..." if equals and key.lstrip("+~").startswith("cluster.environment") else str(word)


def with_hardware(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`records` with `hardware`: the device that the ranks found; for runs that died before, that of their sisters.

    A run without summary (it failed, or ran out of memory) belongs to the hardware on which all other runs of its
    experiment, model and ranks were; where those differ, or there are none, the launcher's own is the best guess.
    """

    def family(record: Record) -> tuple[str | None, ...]:
        return tuple(text(record, name) for name in ("exp", "model", "world_size"))

    known: dict[tuple[str | None, ...], set[str]] = {}
    for record in records:
        if (device := text(record, "device")) is not None:
            known.setdefault(family(record), set()).add(device)
    for record in records:
        sisters = known.get(family(record), set())
        guess = next(iter(sisters)) if len(sisters) == 1 else record.get("launch_hardware")
        record["hardware"] = text(record, "device") or guess
    return records


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def run_rows(run_path: Path) -> list[dict[str, Any]]:
    """The rows of all attempts of a run by step: of each attempt the steps before those that the next one made."""
    rows: list[dict[str, Any]] = []
    for attempt in RunFolder(run_path).attempts():
        newer = metric_rows(attempt.path / "metrics.jsonl")
        rows = [row for row in rows if not newer or row["step"] < newer[0]["step"]] + newer
    return rows


def metric_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one file by step, the later of two counts."""
    try:
        rows = {row["step"]: row for row in read_json_lines(path) if whole(row, "step") is not None}
    except OSError:
        return []
    return [rows[step] for step in sorted(rows)]


def series(rows: Iterable[Record], name: str) -> list[tuple[int, float]]:
    """(step, value) of one figure, steps without it left out."""
    return [(row["step"], value) for row in rows if (value := number(row, name)) is not None]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: neighbours become their mean, so nothing that lasts is lost."""
    size = -(-len(points) // most) if points else 1
    groups = (points[index : index + size] for index in range(0, len(points), size))
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in groups]


# --- effective training time: which share of the wall clock made steps that count, and where the rest went ------------
#
#     wall = productive + start-up + evaluation + checkpoint stall + lost work + restart + other
#
#     productive         seconds of the steps that count: of the last attempt that made each step
#     start_up           from the first start to the training phase of the first attempt (or to its evaluation)
#     lost_work          steps that a later attempt made again
#     restart            from the end of an attempt to the training phase of the next one; all of one that never trained
#     checkpoint_stall   phases in which training waited for a checkpoint
#     other              the rest: between steps, shutting down

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
    seconds = _shares(attempts)
    fraction = seconds["productive"] / seconds["wall"] if seconds["wall"] else None
    return {
        "attempts": len(attempts),
        "effective_fraction": fraction,
        **{f"{key}_s": seconds[key] for key in _SHARES},
    }


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
