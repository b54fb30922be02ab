"""What the files of a run say, as flat records, whatever a damaged or foreign file put there. Never raises."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from burst_cli.render import grouped
from burst_cli.runs.read import read_facts, read_table, run_record
from cluster.remote_text import number, one_line, table, text, whole
from engine.runs.files import read_json_lines
from engine.runs.folder import RunFolder

Record = Mapping[str, Any]
_SAME_PEAK = 1.01
_VERSIONS = ("burst-train", "torch", "python", "flash-attn", "triton")


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


def is_in_progress(record: Record) -> bool:
    """Whether its figures will change: its ranks start or run, and a launcher controls them."""
    return status_of(record) in ("starting", "running")


def tokens(value: float) -> str:
    """A sequence length as people say it: 512, 4K, 256K, 1M (powers of two); others in full."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value >= size and value % size == 0:
            return f"{value / size:.0f}{unit}"
    return f"{value:,.0f}"


def pooled(records: Iterable[Record], name: str) -> tuple[float, float, float] | None:
    """The median of the completed runs' figures and the widest of their quartiles; None where none has the figure."""
    runs = [r for r in records if r.get("status") == "completed" and number(r, name) is not None]
    middles, lows, highs = (
        [value for run in runs if (value := number(run, f"{name}{end}")) is not None] for end in ("", "_p25", "_p75")
    )
    if not middles:
        return None
    middle = statistics.median(middles)
    # A damaged summary may have quartiles on one side of its median, which no bar can show.
    return middle, min(middle, *(lows or middles)), max(middle, *(highs or middles))


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
    planned = {"planned_steps": read_facts(run).steps} if is_in_progress(record) else {}
    return {
        **provenance_facts(run.path),
        **record,
        **planned,
        "failure_text": one_line(str(message)) if message else None,
    }


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

    known = grouped((family(record), device) for record in records if (device := text(record, "device")) is not None)
    for record in records:
        sisters = set(known.get(family(record), ()))
        guess = sisters.pop() if len(sisters) == 1 else record.get("launch_hardware")
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
