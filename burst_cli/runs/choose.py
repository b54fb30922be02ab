"""Which runs a verb means: those that are named, else the newest; for verbs about what lives, the one that lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config.errors import ConfigError
from engine.config.schema import nearest
from engine.runs.folder import RunFolder, RunFolderError, list_runs

SWEEPS = "sweeps"  # a folder beside the experiments that holds sweeps, whatever they are called
_NAMED = 8


def select_runs(runs_dir: Path, names: Sequence[str]) -> list[RunFolder]:
    """The runs that `names` mean, oldest first; no names: all of them.

    A name is an experiment, a run id or its beginning, exp/run id, or the path of a run folder. Raises ConfigError
    with every name that means nothing.
    """
    runs = [run for run in list_runs(runs_dir) if run.exp != SWEEPS]
    if not names:
        return runs
    chosen: dict[Path, RunFolder] = {}
    problems = []
    for name in names:
        found = [run for run in runs if _means(name, run)]
        if not found and (Path(name) / "run.json").is_file():
            found = [RunFolder(Path(name).absolute())]
        if not found:
            problems.append(_unknown(name, runs, runs_dir))
        chosen.update((run.path, run) for run in found)
    if problems:
        raise ConfigError(problems)
    return sorted(chosen.values(), key=lambda run: (run.run_id, str(run.path)))


def choose_run(name: str | None, runs_dir: Path, *, living: bool = False) -> RunFolder:
    """The run of that name (of an experiment: its newest); without a name the newest of all.

    living: without a name, the one run that has not ended; if all have ended, the newest. Raises ConfigError when
    there is none, and when several live.
    """
    if name is not None:
        return _named(name, runs_dir)
    runs = select_runs(runs_dir, ())
    if not runs:
        raise ConfigError(
            f"{runs_dir.absolute()} holds no runs. Start one with `burst launch exp=tiny`, or give --runs-dir."
        )
    alive = living_runs(runs) if living else []
    if len(alive) > 1:
        raise ConfigError(
            f"{len(alive)} runs have not ended: {_listed(alive)}. Say which one: its last six digits are enough."
        )
    return (alive or runs)[-1]


def choose_runs(names: Sequence[str], runs_dir: Path) -> list[RunFolder]:
    """The newest run that each name means; without names the one that lives, or the newest."""
    if not names:
        return [choose_run(None, runs_dir, living=True)]
    return list({run.path: run for run in (choose_run(name, runs_dir) for name in names)}.values())


def living_runs(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Those that have begun and not ended, as far as their run.json says."""
    return [run for run in runs if state_of(run) in ("starting", "running")]


def state_of(run: RunFolder) -> str | None:
    """What run.json says; None as long as there is none, or it cannot be read."""
    try:
        return str(run.read_state()["state"]) if (run.path / "run.json").exists() else None
    except RunFolderError:
        return None


def _named(name: str, root: Path) -> RunFolder:
    found = select_runs(root, [name])
    exact = [run for run in found if name.rstrip("/").rpartition("/")[2] == run.run_id]
    is_exp = any(run.exp == name for run in found)
    if len({run.run_id for run in found}) > 1 and not exact and not is_exp:
        raise ConfigError(
            f"{name}: {len(found)} runs begin so: {_listed(found)}. Give more of the run id, or its last six digits."
        )
    return (exact or found)[-1]


def _means(name: str, run: RunFolder) -> bool:
    exp, _, run_id = name.rstrip("/").rpartition("/")
    if exp:
        return exp == run.exp and run.run_id.startswith(run_id)
    # The six random digits alone are what people copy.
    return run.exp == name or (len(name) >= 6 and (run.run_id.startswith(name) or run.run_id.endswith(f"-{name}")))


def _unknown(name: str, runs: Sequence[RunFolder], runs_dir: Path) -> str:
    known = sorted({run.exp for run in runs})
    if not known:
        return f"{name}: no such run or experiment; {runs_dir.absolute()} holds no runs at all (--runs-dir)"
    near = nearest(name, [*known, *(run.run_id for run in runs)])
    advice = f"did you mean {near}? " if near else ""
    return f"{name}: no such run or experiment in {runs_dir.absolute()}; {advice}Experiments: {', '.join(known)}"


def _listed(runs: Sequence[RunFolder]) -> str:
    names = [f"{run.exp}/{run.run_id}" for run in reversed(runs)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
