"""How long runs take from their launch to the first training step, as earlier runs measured it."""

from __future__ import annotations

import statistics
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from cluster.remote_text import rows, whole, word
from engine.runs.files import read_json_lines, read_json_object
from engine.runs.folder import RunFolder, list_runs

_MOST_RUNS = 5  # the newest ones: older ones may be of other machines or data


def measured_start_s(run: RunFolder) -> float | None:
    """Seconds from the start of the last attempt of `run` to its training phase; None where it did not train."""
    history = rows(_launch_record(run), "history")
    starts = [word(entry, "at") for entry in history if entry.get("state") == "starting"]
    try:
        events = read_json_lines(run.path / "events.jsonl")
        begun = next((str(event.get("at")) for event in events if event.get("phase") == "train"), None)
        if begun is None or not starts:
            return None
        return max(0.0, (datetime.fromisoformat(begun) - datetime.fromisoformat(str(starts[-1]))).total_seconds())
    except (OSError, ValueError, TypeError):
        return None


def earlier_start_s(runs_dir: Path, exp: str, world_size: int | None, run_path: Path | None = None) -> float | None:
    """The start of the run at `run_path` where it trained before, else the median of the newest runs of `exp`.

    Only runs on as many ranks count. None: no run is known that says it.
    """
    if run_path is not None and (own := measured_start_s(RunFolder(run_path))) is not None:
        return own
    newest = reversed([run for run in list_runs(runs_dir) if run.exp == exp])
    alike = (run for run in newest if whole(_launch_record(run), "world_size") == world_size)
    found = list(islice((start for run in alike if (start := measured_start_s(run)) is not None), _MOST_RUNS))
    return statistics.median(found) if found else None


def _launch_record(run: RunFolder) -> dict[str, Any]:
    """run.json; empty when it cannot be read."""
    try:
        return read_json_object(run.path / "run.json") or {}
    except (OSError, ValueError, RecursionError):
        return {}
