"""From what was typed to a `Report`, a plain value that every writer reads: which runs, in which order and groups.

Reads run.json, summary.json and provenance.json of every run, the rest if asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from burst_cli.figures import grouped
from burst_cli.report.against import (
    OWN_BASELINE,
    Baseline,
    Gate,
    Verdict,
    check_metrics,
    find_baseline,
    judge,
    parse_gates,
    with_ratios,
)
from burst_cli.report.columns import (
    ALIASES,
    BY_KEY,
    UNASKED,
    Column,
    choose_columns,
    filled,
    unknown_column,
)
from burst_cli.report.compare import Comparison, compare
from burst_cli.report.records import EFFECTIVE_KEYS, Record, effective_time, read_record, with_hardware
from burst_cli.runs.choose import select_runs
from burst_cli.sweep.store import SweepError, cell_now, find_sweep
from cluster.remote_text import one_line
from cluster.values import age_s, number, table, text, word
from engine.config.errors import ConfigError
from engine.runs.folder import STATES, RunFolder

EFFECTIVE_UNASKED = 40  # runs; every file of each is read for it
# A cell of a sweep that waits for its turn; one that is said to have run, but has no folder.
NOT_RUN, MISSING = "not run", "missing"
_STAMP = "%Y%m%d-%H%M%S"


@dataclass(frozen=True)
class Request:
    """What was typed."""

    runs_dir: Path
    names: Sequence[str] = ()
    exps: Sequence[str] = ()
    statuses: Sequence[str] = ()
    since: str | None = None
    latest: bool = False
    limit: int | None = None
    columns: Sequence[str] = ()
    sort: str | None = None
    sweep: str | None = None
    baseline: str | None = None
    compare: tuple[str, str] | None = None
    fail_below: Sequence[str] = ()
    fail_above: Sequence[str] = ()
    effective: bool = False
    is_page: bool = False  # which shows more than a table


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: same experiment, model, number of ranks and hardware."""

    exp: str
    model: str | None
    world_size: str | None
    hardware: str | None
    records: tuple[dict[str, Any], ...]

    @property
    def title(self) -> str:
        """One line, such as `llama7b_1m · 7b · 32 × NVIDIA H100`."""
        devices = f"{self.world_size or '?'} × {self.hardware or 'unknown hardware'}"
        model = self.model if self.model != self.exp else None
        return " · ".join(part for part in (self.exp, model, devices) if part)

    @property
    def by_age(self) -> list[dict[str, Any]]:
        """Its records, the oldest first, however they are sorted for people; cells without a run before them."""
        return sorted(self.records, key=lambda record: str(record["run_id"] or ""))


@dataclass(frozen=True)
class Report:
    """runs_dir: where it looked; columns: to show; warnings: sentences about damaged or lost runs and the like.

    sweep: {id, path, states: how many cells are in which state, cells}; empty unless it is of one.
    """

    runs_dir: Path
    records: tuple[dict[str, Any], ...]
    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    are_columns_chosen: bool = False
    sweep: Mapping[str, Any] = field(default_factory=dict)
    baseline: Baseline | None = None
    comparison: Comparison | None = None
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The records that are runs; cells of a sweep that have none are left out."""
        return [record for record in self.records if record.get("run_id") is not None]

    def columns_of(self, records: Sequence[Record]) -> Sequence[Column]:
        """Those to show of these records: but for chosen ones none that is empty in all of them."""
        return self.columns if self.are_columns_chosen else filled(self.columns, records)

    @property
    def failed_gates(self) -> list[Verdict]:
        """The conditions that do not hold."""
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def sweep_line(self) -> str:
        """`sweep lengths-12ab, 24 cells: 20 completed, 3 oom, 1 not run`."""
        states = ", ".join(f"{number} {one_line(state)}" for state, number in self.sweep["states"].items())
        return f"sweep {one_line(self.sweep['id'])}, {len(self.sweep['cells'])} cells: {states or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: {runs: [...]}, and a key for everything else that was asked for."""
        document: dict[str, Any] = {"runs": self.runs}
        document |= {"sweep": self.sweep} if self.sweep else {}
        if self.baseline is not None:
            document["baseline"] = {"name": self.baseline.name}
        if self.comparison is not None:
            document["comparison"] = self.comparison.to_dict()
        return document | ({"gates": [asdict(verdict) for verdict in self.verdicts]} if self.verdicts else {})


def build_report(request: Request) -> Report:
    """The whole report as a value. Raises ConfigError for what was typed; damaged runs only make warnings."""
    gates = parse_gates(request.fail_below, request.fail_above)
    chosen = choose_columns(request.columns) if request.columns else None
    records, sweep, problems = _records(request)
    records = with_hardware(records)
    asked = {column.key for column in chosen or ()} | {(request.sort or "").removeprefix("-")}
    is_unasked = request.is_page and chosen is None and len(records) <= EFFECTIVE_UNASKED
    if request.effective or is_unasked or not asked.isdisjoint(EFFECTIVE_KEYS):
        records = [
            {**one, **effective_time(RunFolder(Path(one["path"])))} if one.get("path") else one for one in records
        ]
    records = _sorted(records, request.sort)
    check_metrics(gates, records)
    baselines = _baselines(request, gates, records)
    baseline = baselines.get(OWN_BASELINE)
    warnings = [*_warnings(records), *problems]
    if baseline is not None:
        records, incomparable = with_ratios(records, baseline)
        warnings += incomparable
    return Report(
        runs_dir=request.runs_dir,
        records=tuple(records),
        groups=_groups(records),
        columns=chosen or UNASKED,
        are_columns_chosen=chosen is not None,
        sweep=sweep,
        baseline=baseline,
        comparison=_comparison(request, records),
        verdicts=tuple(one for gate in gates for one in judge(gate, records, baselines.get(gate.of or ""))),
        warnings=tuple(warnings),
    )


# --- which runs -------------------------------------------------------------------------------------------------------


def _records(request: Request) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """(the records that were asked for, the sweep that they are the cells of, what is damaged of it)."""
    since, statuses = parse_since(request.since, datetime.now(UTC)), _statuses(request.statuses)
    if request.sweep is not None:
        if request.names or request.exps or request.since or request.latest or request.limit is not None:
            raise ConfigError(
                "--sweep shows all cells of a sweep: leave out runs, --exp, --since, --latest and --limit"
            )
        records, sweep, problems = _read_sweep(request.runs_dir, request.sweep)
        return [record for record in records if not statuses or record["status"] in statuses], sweep, problems
    compared = () if any("=" in name for name in request.compare or ()) else request.compare or ()
    runs = [
        run
        for run in select_runs(request.runs_dir, request.names or compared)
        if (not request.exps or any(fnmatchcase(run.exp, pattern) for pattern in request.exps))
        and (since is None or _created(run) >= since)
    ]
    if request.latest:
        runs = list({run.exp: run for run in runs}.values())
    kept: list[dict[str, Any]] = []
    for run in reversed(runs):  # the newest `limit` of them; no more are read
        if request.limit is not None and len(kept) >= request.limit:
            break
        record = read_record(run)
        if not statuses or record["status"] in statuses:
            kept.append(record)
    return kept[::-1], {}, []


def parse_since(value: str | None, now: datetime) -> datetime | None:
    """2026-01-31, 2026-01-31T12:00 (UTC) or an age such as 90m, 12h, 7d, 2w. Raises ConfigError."""
    if value is None:
        return None
    age = None if value.isdigit() else age_s(value)
    if age is not None:
        try:
            return now - timedelta(seconds=age)
        except OverflowError:
            return datetime.min.replace(tzinfo=UTC)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigError(
            f"--since: got {value!r}; expected a date such as 2026-01-31 or 2026-01-31T12:00, "
            "or an age such as 90m, 12h, 7d, 2w"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _statuses(names: Sequence[str]) -> tuple[str, ...]:
    """The statuses of --status, comma-separated or repeated. Raises ConfigError that lists the legal ones."""
    wanted = tuple(name for entry in names for name in entry.replace(" ", "").split(",") if name)
    legal = (*STATES, "unreadable")
    problems = [f"--status: got {name!r}; legal: {', '.join(legal)}" for name in wanted if name not in legal]
    if problems:
        raise ConfigError(problems)
    return wanted


def _created(run: RunFolder) -> datetime:
    """When a run was made, as its id says; a folder with another name counts as new."""
    try:
        return datetime.strptime(run.run_id[:15], _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)


def _sorted(records: list[dict[str, Any]], key: str | None) -> list[dict[str, Any]]:
    """By a column (`mfu` upwards, `-mfu` downwards), unknown values last; None: as they are. Raises ConfigError."""
    if key is None:
        return records
    name = ALIASES.get(key.removeprefix("-"), key.removeprefix("-"))
    if name not in BY_KEY:
        raise ConfigError(unknown_column("--sort", name))
    name = {"run": "run_id"}.get(name, name)

    def order(record: Record) -> tuple[bool, float, str]:
        value = number(record, name)
        return (value is None, value or 0.0, text(record, name) or "")

    known = [record for record in records if record.get(name) is not None]
    unknown = [record for record in records if record.get(name) is None]
    return sorted(known, key=order, reverse=key.startswith("-")) + unknown


def _groups(records: Iterable[dict[str, Any]]) -> tuple[Group, ...]:
    """Groups in the order of their first runs, which keep their order."""
    names = ("exp", "model", "world_size", "hardware")
    found = grouped((tuple(text(record, name) for name in names), record) for record in records)
    return tuple(
        Group(exp or "?", model, ranks, hardware, tuple(rows)) for (exp, model, ranks, hardware), rows in found.items()
    )


# --- cells of a sweep -------------------------------------------------------------------------------------------------


def _read_sweep(runs_dir: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """(a record for every cell of the sweep that `name` means, run or not; what it is, see `Report`; its problems)."""
    folder = find_sweep(runs_dir, name)
    try:
        cells = folder.read()["cells"]
    except SweepError as error:
        raise ConfigError(f"--sweep: {error}") from error
    records = [_cell_record(cell, runs_dir) for cell in cells if isinstance(cell, dict)]
    lost = len(cells) - len(records)
    shown = [{key: record.get(key) for key in ("cell", "status", "run_id", "path")} for record in records]
    states = dict(Counter(record["status"] for record in records))
    sweep = {"id": folder.sweep_id, "path": str(folder.path), "states": states, "cells": shown}
    return records, sweep, [f"{folder.path / 'sweep.json'}: {lost} cells are damaged"] if lost else []


def _cell_record(cell: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    """That of its run, which may have moved with all others; of a cell without one why it did not run."""
    path = Path(word(cell, "run_path", 4096) or "/")
    for folder in (path, runs_dir.joinpath(*path.parts[-2:])):
        if (folder / "run.json").is_file():
            return {**read_record(RunFolder(folder.absolute())), "cell": str(cell.get("id"))}
    now = cell_now(cell)
    state = {"pending": NOT_RUN, "running": MISSING}.get(now["state"], now["state"])
    return {
        **table(cell, "facts"),
        "cell": str(cell.get("id")),
        "run_id": None,
        "status": MISSING if cell.get("run_path") and state == NOT_RUN else state,
        "path": None,
        "exp": word(cell, "exp") or "?",
        "failure_text": word(now["result"], "message"),
    }


# --- what else was asked for ------------------------------------------------------------------------------------------


def _baselines(request: Request, gates: Iterable[Gate], records: Sequence[Record]) -> dict[str, Baseline]:
    """The baseline of --baseline under the name `baseline`, and every one that a gate names."""
    read = _reader(request)
    found: dict[str, Baseline] = {}
    if request.baseline is not None:
        found[OWN_BASELINE] = find_baseline(request.baseline, records, read)
    for gate in gates:
        if gate.of is None or gate.of in found:
            continue
        if gate.of == OWN_BASELINE:
            raise ConfigError(f"{gate.words}: there is no baseline; give one with --baseline METHOD or RUN")
        found[gate.of] = find_baseline(gate.of, records, read)
    return found


def _reader(request: Request) -> Callable[[str], list[dict[str, Any]]]:
    """Reads the runs that a name means."""
    return lambda name: with_hardware([read_record(run) for run in select_runs(request.runs_dir, [name])])


def _comparison(request: Request, records: Sequence[dict[str, Any]]) -> Comparison | None:
    """Between the runs that two names mean, or those of the report in which a figure is, or begins with, a value."""
    if request.compare is None:
        return None
    read = _reader(request)
    a, b = ((name, _with_value(name, records) if "=" in name else read(name)) for name in request.compare)
    same = {str(record["path"]) for record in a[1]} & {str(record["path"]) for record in b[1]}
    if same:
        raise ConfigError(f"--compare: {a[0]} and {b[0]} both mean {min(same)}")
    return compare(a, b)


def _with_value(given: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by, _, wanted = given.partition("=")
    key = ALIASES.get(by, by)
    known = sorted({value for record in records if record.get("path") and (value := text(record, key)) is not None})
    meant = [value for value in known if value == wanted] or [value for value in known if value.startswith(wanted)]
    if not meant:
        raise ConfigError(f"--compare: no run has {given}; values of {by}: {', '.join(known[:12]) or 'none'}")
    return [record for record in records if record.get("path") and text(record, key) in meant]


def _warnings(records: Iterable[dict[str, Any]]) -> list[str]:
    """What is damaged, lost or impossible."""
    found: list[str] = []
    for record in records:
        found += map(str, record.get("problems", ()))
        if record.get("lost"):
            found.append(f"{record['exp']}/{record['run_id']} says {record['status']}, but its process is gone")
    return [one_line(warning) for warning in found]
