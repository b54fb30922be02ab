"""The cells of a sweep as rows of a report: those with a run, and those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_cli.report.values import one_line
from engine.config_schema import nearest
from engine.errors import ConfigError
from engine.run.records import read_json_object
from engine.runs import RunFolder

NOT_RUN, MISSING = "not run", "missing"  # waits for its turn; is said to have run, but its folder is gone
# What a swept setting is called in a record.
_RECORD_KEYS = {
    "train.seq_len": "seq_len",
    "attention": "attention_preset",
    "attention.preset": "attention_preset",
    "memory": "memory_policy",
    "model": "model",
    "exp": "exp",
}


@dataclass(frozen=True)
class Sweep:
    """A sweep as its sweep.json tells it. states: how many cells are in which state; problems: of its reading."""

    sweep_id: str
    path: Path
    records: tuple[dict[str, Any], ...]
    states: Mapping[str, int]
    problems: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """`24 cells: 20 completed, 3 oom, 1 not run`."""
        states = ", ".join(f"{number} {one_line(state)}" for state, number in self.states.items())
        return f"sweep {one_line(self.sweep_id)}, {len(self.records)} cells: {states or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a cell without a run has run_id null."""
        cells = [{key: record.get(key) for key in ("cell", "status", "run_id", "path")} for record in self.records]
        return {"id": self.sweep_id, "path": str(self.path), "states": dict(self.states), "cells": cells}


def read_sweep(runs_dir: Path, name: str, read: Callable[[RunFolder], dict[str, Any]]) -> Sweep:
    """The sweep whose id is `name`, or begins or ends with it. Raises ConfigError; damaged cells are problems."""
    path = _find(runs_dir / "sweeps", name)
    try:
        document = read_json_object(path / "sweep.json")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--sweep: {path / 'sweep.json'} is damaged: {error}") from error
    cells = (document or {}).get("cells")
    if not isinstance(cells, list):
        raise ConfigError(f"--sweep: {path / 'sweep.json'} lists no cells")
    good = [cell for cell in cells if isinstance(cell, dict)]
    problems = [f"{path / 'sweep.json'}: {len(cells) - len(good)} cells are damaged"] if len(good) < len(cells) else []
    records = _alike([_record(cell, runs_dir, read) for cell in good])
    states: dict[str, int] = {}
    for record in records:
        states[record["status"]] = states.get(record["status"], 0) + 1
    return Sweep(path.name, path, records, states, tuple(problems))


def _find(folder: Path, name: str) -> Path:
    known = sorted(file.parent.name for file in folder.glob("*/sweep.json"))
    found = [one for one in known if one == name] or [
        one for one in known if one.startswith(name) or one.endswith(name)
    ]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise ConfigError(f"--sweep {name}: {len(found)} sweeps are meant: {', '.join(found)}")
    near = nearest(name, known)
    advice = f"did you mean {near}?" if near else f"there are: {', '.join(known) or 'none'}"
    raise ConfigError(f"--sweep {name}: not in {folder.absolute()}; {advice}")


def _record(cell: Mapping[str, Any], runs_dir: Path, read: Callable[[RunFolder], dict[str, Any]]) -> dict[str, Any]:
    run = _run(cell.get("run_path"), runs_dir)
    facts = {"cell": str(cell.get("id"))}
    if run is not None:
        return {**read(run), **facts}
    state = str(cell.get("state") or "pending")
    status = {"pending": NOT_RUN, "running": MISSING, "completed": MISSING}.get(state, state)
    result = cell.get("result")
    message = result.get("message") if isinstance(result, dict) else None
    values = _values(cell)
    return {
        "run_id": None,
        "exp": str(cell.get("exp") or values.get("exp") or "?"),
        "status": status,
        "path": None,
        **facts,
        **{key: value for key, value in values.items() if key != "exp"},
        "failure_text": one_line(str(message)) if message else None,
        "overrides": " ".join(map(str, cell["overrides"])) if isinstance(cell.get("overrides"), list) else None,
    }


def _alike(records: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Cells without a run get what they do not say from runs of their experiment, where those agree."""
    for name in ("model", "world_size", "memory_policy"):
        known: dict[str, set[Any]] = {}
        for record in records:
            if record.get("run_id") is not None and record.get(name) is not None:
                known.setdefault(record["exp"], set()).add(one_line(str(record[name])))
        for record in records:
            values = known.get(record["exp"], set())
            if record.get(name) is None and len(values) == 1:
                record[name] = next(iter(values))
    return tuple(records)


def _run(path: Any, runs_dir: Path) -> RunFolder | None:
    """The run of a cell, when its folder was made; a relative path counts from the folder of all runs."""
    if not isinstance(path, str) or not path:
        return None
    for folder in (Path(path), runs_dir / path, runs_dir.parent / path):
        if (folder / "run.json").is_file():
            return RunFolder(folder.absolute())
    return None


def _values(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What the overrides of a cell say about its run, under the names of a record."""
    words = cell.get("overrides")
    pairs = [str(word).lstrip("+").partition("=") for word in words] if isinstance(words, list) else []
    found: dict[str, Any] = {}
    for key, _, value in pairs:
        if name := _RECORD_KEYS.get(key):
            found[name] = int(value) if name == "seq_len" and value.isdecimal() else value.strip("'\"")
    return found
