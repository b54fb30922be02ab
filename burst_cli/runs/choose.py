"""Which runs a verb means: those that are named, else the newest; for verbs about what lives, the one that lives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from burst_cli.runs.read import read_table
from cluster.remote_text import table
from engine.config.errors import ConfigError
from engine.config.schema import nearest
from engine.runs.folder import RUNS_DIR_VARIABLE, RunFolder, RunFolderError, list_runs

SWEEPS = "sweeps"  # a folder beside the experiments that holds sweeps, whatever they are called
_NAMED = 8


def select_runs(runs_dir: Path, names: Sequence[str]) -> list[RunFolder]:
    """The runs that `names` mean, oldest first; no names: all of them.

    A name is an experiment, a run id, its beginning or its six digits, exp/run id, or the path of a run folder. Raises
    ConfigError with every name that means nothing.
    """
    runs = [run for run in list_runs(runs_dir) if run.exp != SWEEPS]
    if not names:
        return runs
    meant = {name: _meant(name, runs) for name in names}
    if problems := [_unknown(name, runs, runs_dir) for name, found in meant.items() if not found]:
        raise ConfigError(problems)
    chosen = {run.path: run for found in meant.values() for run in found}
    return sorted(chosen.values(), key=lambda run: (run.run_id, str(run.path)))


def choose_run(name: str | None, runs_dir: Path, *, living: bool = False) -> RunFolder:
    """The run of that name (of an experiment: its newest); without a name the newest of all. The newest is one that
    trained, not an evaluation of it, which is meant where its own run id is given, or while it runs.

    living: without a name, the one run that has not ended; if all have ended, the newest. Raises ConfigError when
    there is none, when several live, and for the beginning of several.
    """
    found = select_runs(runs_dir, [] if name is None else [name])
    if not found:
        raise ConfigError(
            f"{runs_dir.absolute()} holds no runs.{elsewhere_text()} Start one with `burst launch exp=tiny`."
        )
    if name is None:
        alive = living_runs(found) if living else []
        if len(alive) > 1:
            raise ConfigError(
                f"{len(alive)} runs have not ended: {_listed(alive)}. Say which one: its last six digits are enough."
            )
        return alive[-1] if alive else _newest(found)
    if len({run.run_id for run in found}) > 1 and all(run.exp != name for run in found):
        raise ConfigError(
            f"{name}: {len(found)} runs begin so: {_listed(found)}. Give more of the run id, or its last six digits."
        )
    return _newest(found)


def _newest(runs: Sequence[RunFolder]) -> RunFolder:
    """The newest one that trains: an evaluation, which has no weights of its own, only where all are evaluations."""
    return next((run for run in reversed(runs) if not _is_evaluation(run)), runs[-1])


def _is_evaluation(run: RunFolder) -> bool:
    return table(read_table(run.path / "config.yaml"), "train").get("evaluate_only") is True


def choose_runs(names: Sequence[str], runs_dir: Path) -> list[RunFolder]:
    """The newest run that each name means; without names the one that lives, or the newest."""
    chosen = (choose_run(name, runs_dir, living=True) for name in names or (None,))
    return list({run.path: run for run in chosen}.values())


def living_runs(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Those that have begun and not ended, as far as their run.json says."""
    return [run for run in runs if state_of(run) in ("starting", "running")]


def state_of(run: RunFolder) -> str | None:
    """What run.json says; None as long as there is none, or it cannot be read."""
    try:
        return str(run.read_state()["state"]) if (run.path / "run.json").exists() else None
    except RunFolderError:
        return None


def _meant(name: str, runs: Sequence[RunFolder]) -> list[RunFolder]:
    exp, _, run_id = name.rstrip("/").rpartition("/")
    if exp:
        found = [run for run in runs if run.exp == exp and run.run_id.startswith(run_id)]
    else:  # the six random digits alone are what people copy
        ends, is_long = f"-{name}", len(name) >= 6
        found = [
            run
            for run in runs
            if run.exp == name or (is_long and (run.run_id.startswith(name) or run.run_id.endswith(ends)))
        ]
    is_folder = not found and (Path(name) / "run.json").is_file()
    return [RunFolder(Path(name).absolute())] if is_folder else found


def _unknown(name: str, runs: Sequence[RunFolder], runs_dir: Path) -> str:
    known = sorted({run.exp for run in runs})
    if not known:
        return f"{name}: no such run or experiment; {runs_dir.absolute()} holds no runs at all.{elsewhere_text()}"
    near = nearest(name, [*known, *(run.run_id for run in runs)])
    advice = f"did you mean {near}? " if near else ""
    return f"{name}: no such run or experiment in {runs_dir.absolute()}; {advice}Experiments: {', '.join(known)}"


def elsewhere_text() -> str:
    """Where runs may be instead: which folder is looked into depends on where a command is typed."""
    if os.environ.get(RUNS_DIR_VARIABLE):
        return ""
    return (
        f" Runs that were started in another folder are in its runs/: name it with --runs-dir or {RUNS_DIR_VARIABLE}."
    )


def _listed(runs: Sequence[RunFolder]) -> str:
    names = [f"{run.exp}/{run.run_id}" for run in reversed(runs)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
