"""Runs as flat records: what `burst report` shows and `--json` prints. Reads run folders, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burst_cli.run_facts import is_lost
from engine.config import TrainConfig, load_config
from engine.config_schema import nearest
from engine.errors import ConfigError
from engine.run.summary import config_facts, summarise
from engine.runs import RunFolder, RunFolderError, list_runs

UNREADABLE = "unreadable"
SWEEPS = "sweeps"  # a folder beside the experiments that holds sweeps, whatever they are called
_STATE_FACTS = ("started_at", "ended_at", "exit_code", "failure")


def run_record(run: RunFolder) -> dict[str, Any]:
    """{run_id, exp, status, path, ...summary}; `problems` names what is damaged, `lost` says that nobody leads the run.

    A run without summary.json (it failed, or still runs) has its figures computed from metrics.jsonl.
    """
    record: dict[str, Any] = {
        "run_id": run.run_id,
        "exp": run.exp,
        "status": UNREADABLE,
        "path": str(run.path),
        "lost": False,
    }
    own = frozenset(record)
    problems: list[str] = []
    summary: dict[str, Any] = {}
    try:
        summary = run.read_summary() or {}
    except RunFolderError as error:
        problems.append(str(error))
    if not summary:
        summary = _summary_from_metrics(run, problems)
    try:
        state = run.read_state()
    except RunFolderError as error:
        return {**record, **_without(summary, own), "problems": [str(error), *problems]}
    record["status"] = state["state"]
    record["lost"] = is_lost(run, state)
    facts = {name: state.get(name) for name in _STATE_FACTS}
    if summary.get("world_size") is None:
        summary["world_size"] = state.get("world_size")
    return {**record, **_without(summary, own), **facts, **({"problems": problems} if problems else {})}


def select_runs(runs_dir: Path, names: Sequence[str], *, latest: bool = False) -> list[RunFolder]:
    """The runs that `names` mean, oldest first; no names: all of them. `latest` keeps the newest per experiment.

    A name is an experiment, a run id or its beginning, exp/run id, or the path of a run folder. Raises ConfigError
    with every name that means nothing.
    """
    runs = [run for run in list_runs(runs_dir) if run.exp != SWEEPS]
    if names:
        runs = _named(runs, runs_dir, names)
    if latest:
        runs = list({run.exp: run for run in runs}.values())
    return runs


def _named(runs: Sequence[RunFolder], runs_dir: Path, names: Sequence[str]) -> list[RunFolder]:
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


def _means(name: str, run: RunFolder) -> bool:
    exp, _, run_id = name.rstrip("/").rpartition("/")
    if exp:
        return exp == run.exp and run.run_id.startswith(run_id)
    # The six random digits alone are what people copy.
    return run.exp == name or (len(name) >= 6 and (run.run_id.startswith(name) or run.run_id.endswith(f"-{name}")))


def _unknown(name: str, runs: Sequence[RunFolder], runs_dir: Path) -> str:
    known = sorted({run.exp for run in runs})
    if not known:
        return f"{name}: no such run or experiment; {Path(runs_dir).absolute()} holds no runs at all (--runs-dir)"
    near = nearest(name, [*known, *(run.run_id for run in runs)])
    advice = f"did you mean {near}? " if near else ""
    return f"{name}: no such run or experiment in {Path(runs_dir).absolute()}; {advice}Experiments: {', '.join(known)}"


def _without(summary: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in names}


def _summary_from_metrics(run: RunFolder, problems: list[str]) -> dict[str, Any]:
    """The summary that the trainer would have written from what it recorded so far."""
    warmup, facts = TrainConfig().warmup_metric_steps, {}
    try:
        config = load_config(run.path / "config.yaml")
        warmup, facts = config.train.warmup_metric_steps, config_facts(config)
    except ConfigError as error:
        problems.extend(error.problems)
    try:
        rows = run.read_metrics()
    except OSError as error:
        problems.append(f"{run.path / 'metrics.jsonl'}: {error.strerror}")
        rows = []
    return {**facts, **summarise(rows, warmup)}
