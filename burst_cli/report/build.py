"""From what was typed to a `Report`. Reads run.json, summary.json, provenance.json of every run, the rest if asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from burst_cli.report.baseline import Baseline, find_baseline, with_ratios
from burst_cli.report.columns import ALIASES, EFFECTIVE_KEYS, Column, choose_columns, default_columns
from burst_cli.report.compare import Comparison, compare
from burst_cli.report.effective import effective_time
from burst_cli.report.gates import Gate, Verdict, check_metrics, judge, parse_gates
from burst_cli.report.model import Report
from burst_cli.report.provenance import provenance_facts, with_hardware
from burst_cli.report.published import load_published
from burst_cli.report.select import (
    Filters,
    check_statuses,
    group_records,
    keep_newest,
    keep_runs,
    parse_since,
    sort_records,
)
from burst_cli.report.sweep_cells import Sweep, read_sweep
from burst_cli.report.values import one_line, text
from burst_cli.run_records import run_record, select_runs
from engine.config_schema import nearest
from engine.errors import ConfigError
from engine.runs import RunFolder

EFFECTIVE_UNASKED = 40  # runs; every file of each is read for it
_OWN_BASELINE = "baseline"


@dataclass(frozen=True)
class Request:
    """What was typed."""

    runs_dir: Path
    names: tuple[str, ...] = ()
    exps: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    since: str | None = None
    latest: bool = False
    limit: int | None = None
    columns: tuple[str, ...] = ()
    sort: str | None = None
    sweep: str | None = None
    baseline: str | None = None
    compare: tuple[str, str] | None = None
    by: str | None = None
    fail_below: tuple[str, ...] = ()
    fail_above: tuple[str, ...] = ()
    published: str | None = None
    effective: bool = False
    is_page: bool = False


def build_report(request: Request) -> Report:
    """The whole report as a value. Raises ConfigError for what was typed; damaged runs only make warnings."""
    gates = parse_gates(request.fail_below, request.fail_above)
    chosen = choose_columns(request.columns) if request.columns else None
    published = load_published(request.published) if request.published else ()
    records, sweep = _records(request)
    records = with_hardware(records)
    is_effective = _wants_effective(request, chosen, len(records))
    if is_effective:
        records = [_with_effective_time(record) for record in records]
    records = sort_records(records, request.sort)
    check_metrics(gates, records)
    baselines = _baselines(request, gates, records)
    warnings = [*_warnings(records), *(sweep.problems if sweep is not None else ())]
    baseline = baselines.get(_OWN_BASELINE)
    if baseline is not None:
        records, warning = with_ratios(records, baseline)
        warnings += [warning] if warning else []
    default = default_columns(baseline=baseline is not None, effective=is_effective, records=records)
    return Report(
        runs_dir=request.runs_dir,
        records=tuple(records),
        groups=group_records(records),
        columns=chosen or default,
        are_columns_chosen=chosen is not None,
        is_effective=is_effective,
        sweep=sweep,
        baseline=baseline,
        comparison=_comparison(request, records),
        published=published,
        verdicts=_verdicts(gates, records, baselines),
        warnings=tuple(warnings),
    )


def read_record(run: RunFolder) -> dict[str, Any]:
    """The record of a run with where it comes from; never raises."""
    record = run_record(run)
    failure = record.get("failure")
    message = failure.get("message") if isinstance(failure, dict) else None
    return {**provenance_facts(run.path), **record, "failure_text": one_line(str(message)) if message else None}


def _records(request: Request) -> tuple[list[dict[str, Any]], Sweep | None]:
    now = datetime.now(UTC)
    since, statuses = parse_since(request.since, now), check_statuses(request.statuses)
    filters = Filters(request.exps, statuses, since, request.limit)
    if request.sweep is None:
        compared = request.compare if request.compare is not None and request.by is None else ()
        runs = select_runs(request.runs_dir, request.names or compared, latest=False)
        runs = keep_runs(runs, filters)
        if request.latest:
            runs = list({run.exp: run for run in runs}.values())
        return keep_newest(runs, filters, read_record), None
    if request.names or request.exps or request.since or request.latest or request.limit is not None:
        raise ConfigError("--sweep shows all cells of a sweep: leave out runs, --exp, --since, --latest and --limit")
    sweep = read_sweep(request.runs_dir, request.sweep, read_record)
    records = [record for record in sweep.records if not statuses or record["status"] in statuses]
    return records, sweep


def _wants_effective(request: Request, chosen: Sequence[Column] | None, runs: int) -> bool:
    asked = {ALIASES.get(name, name) for entry in request.columns for name in entry.split(",")}
    if request.effective or asked & set(EFFECTIVE_KEYS) or (request.sort or "").lstrip("-") in EFFECTIVE_KEYS:
        return True
    return request.is_page and chosen is None and runs <= EFFECTIVE_UNASKED


def _with_effective_time(record: dict[str, Any]) -> dict[str, Any]:
    if record.get("path") is None:
        return record
    return {**record, **effective_time(RunFolder(Path(record["path"])))}


def _baselines(request: Request, gates: Iterable[Gate], records: Sequence[dict[str, Any]]) -> dict[str, Baseline]:
    """The baseline of --baseline under the name `baseline`, and every one that a gate names."""

    def runs(name: str) -> list[dict[str, Any]]:
        return with_hardware([read_record(run) for run in select_runs(request.runs_dir, [name])])

    found: dict[str, Baseline] = {}
    if request.baseline is not None:
        found[_OWN_BASELINE] = find_baseline(request.baseline, records, runs)
    for gate in gates:
        if gate.of is None or gate.of in found:
            continue
        if gate.of == _OWN_BASELINE:
            raise ConfigError(f"{gate.words}: there is no baseline; give one with --baseline METHOD or RUN")
        found[gate.of] = find_baseline(gate.of, records, runs)
    return found


def _verdicts(
    gates: Sequence[Gate], records: Sequence[dict[str, Any]], baselines: dict[str, Baseline]
) -> tuple[Verdict, ...]:
    """A gate against a baseline judges the other runs: what it is measured against always passes or always fails."""
    found: list[Verdict] = []
    for gate in gates:
        baseline = baselines.get(gate.of or "")
        own = {run["run_id"] for runs in baseline.cells.values() for run in runs} if baseline is not None else set()
        found += judge([gate], [record for record in records if record["run_id"] not in own], baselines)
    return tuple(found)


def _comparison(request: Request, records: Sequence[dict[str, Any]]) -> Comparison | None:
    if request.compare is None:
        if request.by is not None:
            raise ConfigError("--by names what two groups differ in: give their values with --compare A B")
        return None
    sides = [_side(request, name, records) for name in request.compare]
    same = {str(record["path"]) for record in sides[0][1]} & {str(record["path"]) for record in sides[1][1]}
    if same:
        raise ConfigError(f"--compare: {request.compare[0]} and {request.compare[1]} both mean {sorted(same)[0]}")
    return compare(*sides)


def _side(request: Request, name: str, records: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Without --by the runs that `name` means; with it those of the report whose KEY is, or begins with, `name`."""
    if request.by is None:
        runs = [read_record(run) for run in select_runs(request.runs_dir, [name])]
        return name, with_hardware(runs)
    key = ALIASES.get(request.by, request.by)
    known = {value for record in records if (value := text(record, key)) is not None}
    if not known:
        keys = sorted({key for record in records for key in record if text(record, key) is not None})
        near = nearest(request.by, keys)
        raise ConfigError(f"--by: no run has {request.by!r}; {f'did you mean {near}?' if near else ', '.join(keys)}")
    exact = name in known
    found = [r for r in records if (v := text(r, key)) is not None and (v == name if exact else v.startswith(name))]
    found = [record for record in found if record.get("path") is not None]
    if not found:
        raise ConfigError(f"--compare: no run has {request.by} {name!r}; there are: {', '.join(sorted(known)[:12])}")
    return f"{request.by} {name}", found


def _warnings(records: Iterable[dict[str, Any]]) -> list[str]:
    """What is damaged, lost or impossible."""
    found: list[str] = []
    for record in records:
        name = f"{record['exp']}/{record['run_id']}"
        found += map(str, record.get("problems", ()))
        if record.get("alive") is False:
            found.append(f"{name} says {record['status']}, but its process is gone")
    return [one_line(warning) for warning in found]


def with_page(request: Request) -> Request:
    """The same request for a page, which shows more than a table."""
    return replace(request, is_page=True)
