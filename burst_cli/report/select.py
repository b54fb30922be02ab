"""Which runs, in which order, in which groups. Pure but for the clock that `since` is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from burst_cli.report.columns import ALIASES, BY_KEY, unknown_column
from burst_cli.report.values import Record, number, text
from engine.errors import ConfigError
from engine.runs import STATES, RunFolder

_AGE = re.compile(r"(\d+)([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_STAMP = "%Y%m%d-%H%M%S"


@dataclass(frozen=True)
class Filters:
    """What is left out. exps: globs of experiments; statuses: any of these; since: not older; limit: the newest."""

    exps: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    since: datetime | None = None
    limit: int | None = None


def parse_since(value: str | None, now: datetime) -> datetime | None:
    """2026-01-31, 2026-01-31T12:00 (UTC) or an age such as 90m, 12h, 7d, 2w. Raises ConfigError."""
    if value is None:
        return None
    if found := _AGE.fullmatch(value):
        try:
            return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
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


def check_statuses(names: Sequence[str]) -> tuple[str, ...]:
    """The statuses of --status, comma-separated or repeated. Raises ConfigError that lists the legal ones."""
    wanted = tuple(name for entry in names for name in entry.replace(" ", "").split(",") if name)
    legal = (*STATES, "unreadable")
    problems = [f"--status: got {name!r}; legal: {', '.join(legal)}" for name in wanted if name not in legal]
    if problems:
        raise ConfigError(problems)
    return wanted


def keep_runs(runs: Iterable[RunFolder], filters: Filters) -> list[RunFolder]:
    """The runs that pass by name and age alone, before anything of them is read."""
    return [
        run
        for run in runs
        if (not filters.exps or any(fnmatchcase(run.exp, pattern) for pattern in filters.exps))
        and (filters.since is None or _created(run) >= filters.since)
    ]


def keep_newest(
    runs: Sequence[RunFolder], filters: Filters, read: Callable[[RunFolder], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Records of the runs that have the right status, the newest `limit` of them, oldest first."""
    kept: list[dict[str, Any]] = []
    for run in reversed(runs):
        if filters.limit is not None and len(kept) >= filters.limit:
            break
        record = read(run)
        if not filters.statuses or record["status"] in filters.statuses:
            kept.append(record)
    return kept[::-1]


def sort_records(records: list[dict[str, Any]], key: str | None) -> list[dict[str, Any]]:
    """Sorted by a column (`mfu` upwards, `-mfu` downwards), unknown values last; None: as they are.

    Raises ConfigError for a name that no column has.
    """
    if key is None:
        return records
    name = ALIASES.get(key.removeprefix("-"), key.removeprefix("-"))
    if name not in BY_KEY:
        raise ConfigError(unknown_column("--sort", name))
    name = {"run": "run_id"}.get(name, name)
    known = [record for record in records if record.get(name) is not None]
    unknown = [record for record in records if record.get(name) is None]
    return sorted(known, key=lambda r: _order(r, name), reverse=key.startswith("-")) + unknown


def _order(record: Record, name: str) -> tuple[bool, float, str]:
    value = number(record, name)
    return (value is None, value or 0.0, text(record, name) or "")


def _created(run: RunFolder) -> datetime:
    """When a run was made, as its id says; a folder with another name counts as new."""
    try:
        return datetime.strptime(run.run_id[:15], _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)


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


def group_records(records: Iterable[dict[str, Any]]) -> tuple[Group, ...]:
    """Groups in the order of their first runs, which keep their order."""
    found: dict[tuple[str | None, ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(text(record, name) for name in ("exp", "model", "world_size", "hardware"))
        found.setdefault(key, []).append(record)
    return tuple(
        Group(exp or "?", model, ranks, hardware, tuple(rows)) for (exp, model, ranks, hardware), rows in found.items()
    )
