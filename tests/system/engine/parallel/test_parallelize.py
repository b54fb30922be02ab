"""The order of composition: what is checkpointed, compiled and sharded, and that none of it changes a loss."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.operations import Operations
from testkit.ranks import Pools
from testkit.tiny_training import TINY, TINY_MODEL, own_part, random_batches, start_run, tiny_config, train_losses
from torch.distributed.tensor import DTensor

from engine.config.errors import ConfigError
from engine.config.settings import LossConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.model.llama import LlamaModel
from engine.parallel.parallelize import compile_layers

CPU = torch.device("cpu")


def losses_when_compiled() -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own ways
        return train_losses(tiny_config(train={"compile": True}), 2, 2)


def tracked_and_local_bytes() -> tuple[int, int]:
    """(bytes the tracker sees while sharded weights are scaled, bytes of this rank's shards)."""
    run = start_run(tiny_config(parallel={"dp_shard_size": 2}))
    locals_ = [p.to_local() for p in run.model.parameters() if isinstance(p, DTensor)]
    shards = sum(local.untyped_storage().nbytes() for local in locals_)
    with LiveTensorTracker() as tracker, torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1.0)
    return tracker.live_bytes, shards


def test_a_sharded_weight_counts_as_the_part_of_its_rank(ranks: Pools) -> None:
    for tracked, shards in ranks(2).run(tracked_and_local_bytes):
        assert tracked == shards


@pytest.mark.needs("g++")
@pytest.mark.thorough
def test_compiled_layers_give_the_same_losses(ranks: Pools) -> None:
    expected = ranks(1).run(train_losses, TINY, 2, 2)[0]
    assert ranks(1).run(losses_when_compiled, timeout_s=280)[0] == pytest.approx(expected, rel=1e-5)


def test_compiling_without_a_compiler_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match="neither g\\+\\+ nor clang\\+\\+"):
        compile_layers(LlamaModel(TINY_MODEL, LossConfig()), CPU)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
@pytest.mark.parametrize(
    ("given", "is_kept"), [(None, False), ("/tmp/torchinductor_me", False), ("{}/given/by/a/person", True)]
)
def test_compiling_on_a_cpu_avoids_the_shared_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, is_kept: bool
) -> None:
    given = given and given.format(tmp_path)
    monkeypatch.setenv("CXX", sys.executable)  # one is there; nothing is compiled yet
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given or "")  # also what is restored afterwards
    if given is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_layers(LlamaModel(TINY_MODEL, TINY.loss), CPU)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert (str(folder) == given) == is_kept
    if not is_kept:
        assert folder.name.startswith("burst-compiled-")
        assert folder.stat().st_mode & 0o777 == 0o700


def collectives(micro_steps: int, **parallel: int) -> list[tuple[str, int]]:
    """(kind, numbers of its result on this rank) of every collective over parameters or gradients of one step."""
    run = start_run(tiny_config(parallel=parallel))
    batch, seen = random_batches(0, sequences=2 * micro_steps), list[tuple[str, int]]()

    def see(func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = str(func).removeprefix("c10d.").partition(".")[0]
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            seen.append((name.strip("_").removesuffix("_base"), args[0].numel()))
        elif name == "allreduce_" and args[0][0].numel() > TINY_MODEL.num_layers:
            seen.append(("allreduce", args[0][0].numel()))

    with Operations(see):
        run.train_step(0, own_part(batch, run.mesh, micro_steps=micro_steps))
    return seen


def test_every_unit_has_its_collectives_in_every_micro_step(ranks: Pools) -> None:
    vocabulary, layer, norm = 64 * 32, 9280, 32
    for micro_steps in (1, 3):
        seen = ranks(2).run(collectives, micro_steps, dp_shard_size=2)[0]
        forward, backward = [norm, vocabulary, layer, layer, vocabulary], [vocabulary, norm, layer, layer, vocabulary]
        assert [size for kind, size in seen if kind == "allgather"] == [*forward, *backward] * micro_steps
        reduced = [vocabulary, layer, layer, norm, vocabulary] * micro_steps
        assert [2 * size for kind, size in seen if kind == "reduce_scatter"] == reduced
