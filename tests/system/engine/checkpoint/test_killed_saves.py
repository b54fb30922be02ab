"""SIGKILL at any moment of a save, again and again: what was committed stays, what was not is never taken."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from testkit.ranks import fork_server
from testkit.saved_checkpoints import newest_verified
from torch import nn

from engine.checkpoint.checkpointer import Checkpointer, Snapshot
from engine.checkpoint.state import training_tensors
from engine.config.settings import CheckpointConfig
from engine.runs.checkpoints import Checkpoint

LANES = 2


def save_for_ever(root: str, told: Connection, *, background: bool) -> None:
    """Take up what is there, then save step after step, every number of which is the step; tell what is committed."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = CheckpointConfig(every_steps=1, keep_last=2, in_background=background)
    checkpointer = Checkpointer(config, Path(root), {}, told.send)
    training = training_tensors(model, optimizer)
    manifest = checkpointer.restore(training, lambda _: None)
    step = 0 if manifest is None else manifest.step
    if any(bool((tensor != step).any()) for tensor in training.tensors.values()) and step:
        told.send(f"what was restored is not step {step}")
    told.send("ready")
    while True:
        step += 1
        for tensor in training.tensors.values():
            tensor.fill_(step)
        for saved in checkpointer.save(Snapshot(step, training.tensors, {"updates": step})):
            told.send(saved.step)


def messages(pipe: Connection) -> Iterator[object]:
    """All that a process said before it died."""
    try:
        while True:
            yield pipe.recv()
    except (EOFError, ConnectionResetError):
        return


class Killer:
    """Starts processes that save under `root` and kills them; `committed`: the last step that one said was."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.committed = root, 0
        self._random = random.Random(seed)
        self._save_s = 0.05  # what a save takes, as last seen

    def kill(self) -> None:
        """Start one, let it save up to twice, and kill it at any moment of the save that follows."""
        here, there = multiprocessing.Pipe(duplex=False)
        background = self._random.random() < 0.5
        process = fork_server().Process(
            target=save_for_ever, args=(str(self.root), there), kwargs={"background": background}, daemon=True
        )
        process.start()
        there.close()
        said = messages(here)
        assert next(said, "died at once") == "ready"
        saves, begin = self._random.randrange(3), time.monotonic()
        steps = [next(said) for _ in range(saves)]
        if saves:
            self._save_s = (time.monotonic() - begin) / saves
        time.sleep(self._random.uniform(0, self._save_s))
        process.kill()
        process.join()
        steps += said
        here.close()
        for step in steps:
            assert isinstance(step, int), step
            self.committed = max(self.committed, step)


def refuse(checkpoint: Checkpoint, why: str) -> None:
    raise AssertionError(f"{checkpoint} is damaged: {why}")


def kill_again_and_again(root: Path, seed: int, kills: int) -> tuple[int, int]:
    """(step that the last checkpoint holds, kills that left a save or a removal half done)."""
    killer, half_done = Killer(root, seed), 0
    for _ in range(kills):
        killer.kill()
        half_done += any(".tmp-" in path.name or ".gone-" in path.name for path in root.iterdir())
        found = newest_verified(root, on_bad=refuse)
        if found is None:
            assert killer.committed == 0
            continue
        assert killer.committed <= found[0].step <= killer.committed + 2  # one may have ended, and one in between
        checkpoint, manifest = found
        tensors = [tensor for name in manifest.files for tensor in load_file(checkpoint.path / name).values()]
        assert all(bool((tensor == checkpoint.step).all()) for tensor in tensors)
        killer.committed = found[0].step
    return killer.committed, half_done


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [60, pytest.param(1000, marks=pytest.mark.thorough)])
def test_kills_preserve_exactly_the_committed_saves(tmp_path: Path, kills: int) -> None:
    with ThreadPoolExecutor(LANES) as lanes:
        roots = [tmp_path / str(lane) for lane in range(LANES)]
        ended = list(lanes.map(kill_again_and_again, roots, range(LANES), [kills // LANES] * LANES))
    assert all(step > kills // LANES for step, _ in ended), ended  # they did save
    assert sum(half_done for _, half_done in ended) > kills // 10, ended  # and were killed while they did
