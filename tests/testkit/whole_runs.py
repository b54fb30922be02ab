"""Whole training runs on ranks of a pool: a small corpus, a run folder, and how each rank ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config.settings import DataConfig, RunConfig, dump_config
from engine.runs.folder import RunFolder, create_run
from engine.training.rank.faults import FindFaults, read_faults
from engine.training.rank.process import RankStatus, run_rank
from engine.training.trainer import run_training
from testkit.corpora import text_corpus
from testkit.ranks import Pools
from testkit.tiny_training import tiny_config


def small_corpus(folder: Path) -> DataConfig:
    """A text in `folder`, which the first run prepares there."""
    return text_corpus(folder, "the quick brown fox jumps over the lazy dog\n" * 200)


def whole_config(data: DataConfig, *, model: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A few steps on a corpus of bytes; nothing is measured but what `sections` ask for."""
    train = {"eval_samples": 1, "peak_flops_per_device": 1e12, **sections.pop("train", {})}
    return tiny_config(data=data, model={"vocab_size": 320, **(model or {})}, train=train, **sections)


def create_run_of(config: RunConfig, folder: Path, name: str = "abcdef") -> RunFolder:
    """The folder of a run whose id ends with `name`."""
    return create_run(folder / "test" / f"20260101-000000-{name}", {"config.yaml": dump_config(config)})


def train_on_rank(path: str, config: RunConfig, find_faults: FindFaults = read_faults) -> int:
    """Exit code of this rank, as engine.train would end."""
    run = RunFolder(Path(path))
    return run_rank(run, lambda status: run_training(config, run, status, find_faults))


def ended(
    ranks: Pools, size: int, config: RunConfig, folder: Path, find_faults: FindFaults = read_faults
) -> tuple[RunFolder, list[int]]:
    """(the folder of a run on so many ranks, their exit codes)."""
    run = create_run_of(config, folder)
    return run, ranks(size).run(train_on_rank, str(run.path), config, find_faults)


def trained(ranks: Pools, size: int, config: RunConfig, folder: Path, name: str = "abcdef") -> RunFolder:
    """The folder of a run that so many ranks have ended well."""
    run = create_run_of(config, folder, name)
    assert ranks(size).run(train_on_rank, str(run.path), config) == [0] * size, run.rank_errors()
    return run


def train_until_error(path: str, config: RunConfig, find_faults: FindFaults = read_faults) -> str:
    """The error of this rank, as text; the call of a library user, without the frame of a rank."""
    try:
        run_training(config, RunFolder(Path(path)), RankStatus(), find_faults)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def events_of(run: RunFolder, kind: str, fact: str) -> list[Any]:
    """One fact of every event of a kind."""
    return [event[fact] for event in run.read_events() if event["kind"] == kind]
