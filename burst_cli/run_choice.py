"""Which run a verb means: the one that is named, else the newest; for verbs about what lives, the one that lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError
from engine.runs import FINAL_STATES, RunFolder, RunFolderError, default_runs_dir, list_runs

_NAMED = 8


def choose_run(name: str | None, runs_dir: Path | None, *, living: bool = False) -> RunFolder:
    """The run of that name (of an experiment: its newest); without a name the newest of all.

    living: without a name, the one run that has not ended; if all have ended, the newest. Raises ConfigError when
    there is none, and when several live.
    """
    root = runs_dir or default_runs_dir()
    if name is not None:
        return _named(name, root)
    runs = list_runs(root)
    if not runs:
        raise ConfigError(
            f"{root.absolute()} holds no runs. Start one with `burst launch exp=tiny`, or give --runs-dir."
        )
    if living:
        alive = living_runs(runs)
        if len(alive) > 1:
            raise ConfigError(_several(alive))
        if alive:
            return alive[0]
    return runs[-1]


def choose_runs(names: Sequence[str], runs_dir: Path | None) -> list[RunFolder]:
    """The newest run that each name means; without names the one that lives, or the newest."""
    if not names:
        return [choose_run(None, runs_dir, living=True)]
    chosen = {run.path: run for run in (choose_run(name, runs_dir) for name in names)}
    return list(chosen.values())


def living_runs(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Those that have begun and not ended, as far as their run.json says."""
    return [run for run in runs if _state(run) in ("starting", "running")]


def _named(name: str, root: Path) -> RunFolder:
    from burst_cli.run_records import select_runs

    found = select_runs(root, [name])
    ids = {run.run_id for run in found}
    exact = [run for run in found if name.rstrip("/").rpartition("/")[2] == run.run_id]
    is_exp = any(run.exp == name for run in found)
    if len(ids) > 1 and not exact and not is_exp:
        raise ConfigError(
            f"{name}: {len(found)} runs begin so: {_listed(found)}. Give more of the run id, or its last six digits."
        )
    return (exact or found)[-1]


def _several(alive: Sequence[RunFolder]) -> str:
    return f"{len(alive)} runs have not ended: {_listed(alive)}. Say which one: its last six digits are enough."


def _listed(runs: Sequence[RunFolder]) -> str:
    names = [f"{run.exp}/{run.run_id}" for run in reversed(runs)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _state(run: RunFolder) -> str:
    try:
        return str(run.read_state()["state"])
    except RunFolderError:
        return "unreadable"


def is_final(state: str) -> bool:
    """Whether a run in this state has ended."""
    return state in FINAL_STATES
