"""What a launch resolves once: complete, read back unchanged, and obeyed by all ranks or by none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from testkit.ranks import Pools
from testkit.tiny_training import tiny_config
from testkit.whole_runs import create_run_of, small_corpus, train_on_rank, train_until_error, whole_config

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.planning.topology import Topology
from engine.predict.machine import find_machine
from engine.predict.memory import Capacity, MemoryPrediction
from engine.resolve.decisions import Rule
from engine.resolve.run import ResolvedRun, read_resolved, resolve_run, resolved_text
from engine.runs.folder import RESOLVED_FILE, RunFolder

OPEN = tiny_config(attention={"preset": "auto"}, memory={"activation_checkpoint": "auto"})
WORLD, MACHINE = Topology(2, 4), find_machine("cpu")
AMPLE = Capacity("cpu", 2**40, "test", 2**43, "test", 4, host_is_device=True)


def predict(*_: object) -> MemoryPrediction:
    return MemoryPrediction("cpu", 8, 0, 2**20, 0, "loss", {"device": {}, "host": {}}, {}, 0, 0.0)


def resolved_of(config: RunConfig = OPEN, world: Topology = WORLD) -> ResolvedRun:
    return resolve_run(config, world, MACHINE, AMPLE, predict)


def lay(run: RunFolder, resolved: ResolvedRun) -> Path:
    """The file that ranks read, in the folder of a run."""
    file = run.path / RESOLVED_FILE
    file.write_text(resolved_text(resolved))
    return file


def test_nothing_is_left_open() -> None:
    config = resolved_of().config
    assert "auto" not in (config.attention.preset, config.memory.activation_checkpoint)


@pytest.mark.parametrize("setting", ["attention.preset", "memory.activation_checkpoint"])
def test_every_open_setting_has_its_decision(setting: str) -> None:
    decision = resolved_of().decision(setting)
    assert decision.rule in (Rule.FASTEST, Rule.FASTEST_THAT_FITS)
    assert len(decision.candidates) > 1, "it was chosen from nothing"


def test_open_policy_is_refused_where_memory_is_unknown() -> None:
    with pytest.raises(ConfigError, match="resolved by `burst launch`"):
        resolve_run(OPEN, WORLD, MACHINE)


def test_ranks_read_what_the_launch_resolved(tmp_path: Path) -> None:
    run, resolved = create_run_of(OPEN, tmp_path), resolved_of()
    lay(run, resolved)
    found = read_resolved(run.path, OPEN)
    assert found == resolved
    assert found.hash == resolved.hash, "the same run has another hash once it was read"


def test_run_that_no_launch_resolved_is_none(tmp_path: Path) -> None:
    assert read_resolved(create_run_of(OPEN, tmp_path).path, OPEN) is None


def test_settings_that_were_changed_after_the_launch_are_refused(tmp_path: Path) -> None:
    run = create_run_of(OPEN, tmp_path)
    lay(run, resolved_of())
    with pytest.raises(ConfigError, match=r"was not made from .*config\.yaml"):
        read_resolved(run.path, replace(OPEN, seed=OPEN.seed + 1))


@pytest.mark.parametrize("key", ["method", "config", "decisions"])
def test_resolved_file_that_was_changed_or_damaged_is_refused(tmp_path: Path, key: str) -> None:
    run = create_run_of(OPEN, tmp_path)
    file = lay(run, resolved_of())
    document = json.loads(file.read_text())
    document["run"][key] = None
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"resolved\.json: damaged, or changed"):
        read_resolved(run.path, OPEN)


def test_torn_resolved_file_is_refused(tmp_path: Path) -> None:
    run = create_run_of(OPEN, tmp_path)
    file = lay(run, resolved_of())
    file.write_text(file.read_text()[:1000])
    with pytest.raises(ConfigError, match=r"resolved\.json: damaged, or changed"):
        read_resolved(run.path, OPEN)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def run_of(folder: Path) -> tuple[RunFolder, RunConfig]:
    config = whole_config(small_corpus(folder), train={"steps": 1}, attention={"preset": "ring"})
    return create_run_of(config, folder), config


def test_ranks_use_the_method_that_the_launch_resolved(ranks: Pools, tmp_path: Path) -> None:
    """The file names a method that ranks would not choose themselves."""
    run, config = run_of(tmp_path)
    resolved = resolved_of(config, Topology(1, 2))
    lay(run, replace(resolved, method=replace(resolved.method, layout="striped")))
    assert ranks(2).run(train_on_rank, str(run.path), config) == [0, 0], run.rank_errors()
    summary = run.read_summary()
    assert summary is not None
    assert summary["attention"]["layout"] == "striped"


def test_ranks_that_read_different_runs_refuse(ranks: Pools, tmp_path: Path) -> None:
    """As nodes whose own folders hold files of two launches."""
    first, config = run_of(tmp_path / "one")
    second = create_run_of(config, tmp_path / "two")
    resolved = resolved_of(config, Topology(1, 2))
    lay(first, resolved)
    lay(second, replace(resolved, method=replace(resolved.method, layout="striped")))
    errors = ranks(2).run(error_of_own, (str(first.path), str(second.path)), config)
    assert all("the ranks have read different ones" in error for error in errors), errors


def error_of_own(paths: tuple[str, str], config: RunConfig) -> str:
    return train_until_error(paths[dist.get_rank()], config)


def test_ranks_that_are_not_as_many_as_were_resolved_refuse(ranks: Pools, tmp_path: Path) -> None:
    run, config = run_of(tmp_path)
    lay(run, resolved_of(config, Topology(1, 4)))
    errors = ranks(2).run(train_until_error, str(run.path), config)
    assert all("made for 4 ranks, but 2 were started" in error for error in errors), errors
