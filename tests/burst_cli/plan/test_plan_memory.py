"""The memory part of a plan: exact beside closed form, the bar, the sentence."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, Group
from testkit.sections import changed

from burst_cli.compose import compose
from burst_cli.plan.memory_check import MemoryCheck, with_remedies
from burst_cli.plan.table import memory_view
from engine.config.settings import ModelConfig, RunConfig
from engine.planning.memory.auto import MemoryChoice, settle_memory
from engine.planning.memory.capacity import Capacity
from engine.planning.memory.predictor import MemoryPrediction, shared_predictor
from engine.planning.methods.topology import Topology
from engine.planning.time.devices import find_machine

GIB = 2**30
WORLD = Topology(1, 4)
H100 = find_machine("h100")
MODEL = ModelConfig(
    name="1b", vocab_size=32000, hidden_size=2048, ffn_hidden_size=5632, num_layers=16, num_heads=16, num_kv_heads=16,
    head_dim=128,
)  # fmt: skip


def config(**memory: Any) -> RunConfig:
    return changed(RunConfig(), model=MODEL, attention={"preset": "burst"}, memory=memory, train={"seq_len": 2**18})


def capacity(gib: float) -> Capacity:
    return Capacity("test device", round(gib * GIB), "test", 512 * GIB, "test", 4)


def prediction(gib: int, host_gib: int = 0) -> MemoryPrediction:
    """So many GiB, all of them checkpoints, and one of reserve."""
    zeros = dict.fromkeys(("checkpoints", "optimizer"), 0)
    components = {"device": zeros | {"checkpoints": gib * GIB}, "host": zeros | {"optimizer": host_gib * GIB}}
    return MemoryPrediction(
        "cuda", 4, 0, gib * GIB, host_gib * GIB, "loss", components, {}, reserve_bytes=GIB, seconds=0.0
    )


def report(gib: float, found: MemoryPrediction, **memory: Any) -> MemoryCheck:
    asked = config(**memory)
    check = MemoryCheck(asked, capacity(gib), found, MemoryChoice(asked, (), "as configured"))
    return with_remedies(check, WORLD, lambda config, world: found, H100)


def shown(found: MemoryCheck, width: int = 200) -> str:
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(Group(*memory_view(found)))
    return stream.getvalue()


def test_host_memory_can_be_what_is_missing() -> None:
    text = shown(report(80, prediction(50, host_gib=200)))
    assert "800 GiB of 512 GiB of host memory per node" in text
    assert "72 GiB per rank are missing in host memory" in text


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"activation_checkpoint": "full"}, "full"),
        ({"activation_checkpoint": "seq_fraction", "kept_fraction": 0.25}, "seq_fraction 0.25"),
        ({"activation_checkpoint": "attn_out_every", "activation_store": "host"}, "attn_out_every 4, on host"),
        ({"checkpoint_layers": ("full", "none")}, "full/none"),
        ({"tile_tokens": 512, "optimizer_store": "host"}, "full, tiles of 512, optimizer on host"),
    ],
)
def test_policies_are_named_by_their_settings(memory: dict[str, Any], words: str) -> None:
    assert report(80, prediction(1), **memory).policy == words


def test_on_the_cpu_what_is_needed_counts_both_memories() -> None:
    """6 GiB of tensors and 3 GiB of stores do not fit into 8 GiB, and are not told as 6 of 8."""
    together = replace(capacity(8), host_is_device=True)
    needs = replace(prediction(5, host_gib=3), reserve_bytes=0)
    asked = config()
    check = MemoryCheck(asked, together, needs, MemoryChoice(asked, (), "as configured"))
    assert (check.needs, check.fits) == ("8 GiB of 8 GiB on test device", True)
    over = replace(check, prediction=replace(needs, device_peak_bytes=6 * GIB))
    assert (over.needs, over.fits) == ("9 GiB of 8 GiB on test device", False)


@pytest.mark.thorough
def test_eight_billion_parameters_and_half_a_million_tokens_fit_on_one_gpu_and_its_host() -> None:
    room = Capacity("h200", 136 * 10**9, "test", 120 * 10**9, "test", 1)
    settings = compose(["exp=llama8b_512k"]).config
    choice = settle_memory(settings, Topology(1, 1), room, shared_predictor().predict, find_machine("h200"))
    assert choice.fits
    memory = choice.config.memory
    assert (memory.activation_checkpoint, memory.activation_store) == ("full", "host")
    assert 1 < (memory.host_layers or 32) < 32
