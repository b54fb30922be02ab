"""From what was typed to a `Report`, a plain value that every writer reads: which runs, in which order and groups.

Reads run.json, summary.json and provenance.json of every run, the rest if asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burst_cli.render import grouped
from burst_cli.report.compare import Comparison, compare
from burst_cli.report.effective import effective_time
from burst_cli.report.naming import data_keys, data_names, read_settings, with_differences
from burst_cli.report.records import Record, read_record, with_hardware
from burst_cli.runs.choose import choose_run, select_runs
from burst_cli.runs.sweeps import SweepError, find_sweep
from cluster.remote_text import one_line, table, text, word
from engine.config.errors import ConfigError
from engine.runs.folder import RunFolder


@dataclass(frozen=True)
class Report:
    """runs_dir: where it looked; warnings: sentences about damaged or lost runs and the like.

    groups: runs that may be compared, because experiment, model, number of ranks, hardware and data are the same, each
    group with a title such as `llama7b_1m · 7b · 32 × NVIDIA H100`, which names the data where that is all that tells
    two groups apart. sweep: {id, path, states: how many cells are in which
    state, cells}; empty unless it is of one.
    """

    runs_dir: Path
    records: tuple[Record, ...]
    groups: tuple[tuple[str, Sequence[Record]], ...]
    sweep: Mapping[str, Any] = field(default_factory=dict)
    comparison: Comparison | None = None
    warnings: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Record]:
        """The records that are runs, without their settings; cells of a sweep that have none are left out."""
        runs = (record for record in self.records if record.get("run_id") is not None)
        return [{key: value for key, value in run.items() if key != "settings"} for run in runs]

    @property
    def sweep_line(self) -> str:
        """`sweep lengths-12ab, 24 cells: 20 completed, 3 oom, 1 pending`."""
        states = ", ".join(f"{number} {one_line(state)}" for state, number in self.sweep["states"].items())
        return f"sweep {one_line(self.sweep['id'])}, {len(self.sweep['cells'])} cells: {states or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: {runs: [...]}, and a key for everything else that was asked for."""
        document: dict[str, Any] = {"runs": self.runs}
        document |= {"sweep": self.sweep} if self.sweep else {}
        return document | ({"comparison": self.comparison.to_dict()} if self.comparison is not None else {})


def build_report(
    runs_dir: Path,
    names: Sequence[str] = (),
    *,
    latest: bool = False,
    sweep: str | None = None,
    compared: tuple[str, str] | None = None,
    effective: bool = False,
) -> Report:
    """The whole report as a value. Raises ConfigError for what was typed; damaged runs only make warnings."""
    if sweep is not None and (names or latest):
        raise ConfigError("--sweep shows all cells of a sweep: leave out runs and --latest")
    sides = [choose_run(name, runs_dir) for name in compared or ()]
    found: Mapping[str, Any] = {}
    if sweep is not None:
        records, found = _read_sweep(runs_dir, sweep)
    else:
        runs = select_runs(runs_dir, names or [str(run.path) for run in sides])
        records = [_record(run) for run in ({run.exp: run for run in runs}.values() if latest else runs)]
    records = with_hardware(records)
    if effective:
        records = [
            {**one, **effective_time(RunFolder(Path(one["path"])))} if one.get("path") else one for one in records
        ]
    return Report(
        runs_dir=runs_dir,
        records=tuple(records),
        groups=tuple(_groups(records)),
        sweep=found,
        comparison=compare(*with_hardware([_record(run) for run in sides])) if sides else None,
        warnings=tuple(_warnings(records)),
    )


def _record(run: RunFolder) -> dict[str, Any]:
    return {**read_record(run), "settings": read_settings(run.path)}


def _groups(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Groups in the order of their first runs, which keep their order."""
    names = ("exp", "model", "world_size", "hardware")
    found = grouped((tuple(text(record, name) for name in names), record) for record in records)
    for (exp, model, ranks, hardware), rows in found.items():
        devices = f"{ranks or '?'} × {hardware or 'unknown hardware'}"
        title = " · ".join(filter(None, dict.fromkeys((exp or "?", model, devices))))
        parts = _by_data(rows)
        data = data_names(parts) if len(parts) > 1 else [""]
        for name, part in zip(data, parts, strict=True):
            yield " · ".join(filter(None, (title, name))), with_differences(part)


def _by_data(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Those that read the same data together; what is not known of goes with the others where these are one group."""
    found = grouped(zip(data_keys(records), records, strict=True))
    if len(found) == 2 and None in found:
        return [list(records)]
    return list(found.values())


def _read_sweep(runs_dir: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a record for every cell of the sweep that `name` means, run or not; what it is, see `Report`)."""
    folder = find_sweep(runs_dir, name)
    try:
        records = [_cell_record(cell, folder.run_of(cell)) for cell in folder.cells()]
    except SweepError as error:
        raise ConfigError(f"--sweep: {error}") from error
    shown = [{key: record.get(key) for key in ("cell", "status", "run_id", "path")} for record in records]
    states = dict(Counter(record["status"] for record in records))
    return records, {"id": folder.sweep_id, "path": str(folder.path), "states": states, "cells": shown}


def _cell_record(cell: Mapping[str, Any], run: RunFolder | None) -> dict[str, Any]:
    """That of its run; of a cell without one why it did not run."""
    values = " ".join(f"{key}={value}" for key, value in table(cell, "values").items())
    own = {"cell": str(cell.get("id")), "cell_values": values or None}
    if run is not None:
        return {**_record(run), **own}
    return {
        **table(cell, "facts"),
        **own,
        "run_id": None,
        "status": cell["state"],
        "path": None,
        "exp": word(cell, "exp") or "?",
        "failure_text": word(cell["result"], "message"),
        "settings": {key: str(value) for key, value in table(cell, "values").items() if "." in key},
    }


def _warnings(records: Iterable[Record]) -> list[str]:
    """What is damaged, lost or impossible."""
    found: list[str] = []
    for record in records:
        found += map(str, record.get("problems", ()))
        if record.get("lost"):
            found.append(f"{record['exp']}/{record['run_id']} says {record['status']}, but its process is gone")
    return [one_line(warning) for warning in found]
