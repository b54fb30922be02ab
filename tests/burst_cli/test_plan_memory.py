"""The memory part of a plan: exact beside closed form, the bar, the sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, Group

from burst_cli.compose import compose
from burst_cli.plan_memory import MemoryReport, memory_view, report_memory
from engine.config.settings import ModelConfig, RunConfig
from engine.memory.auto import MemoryChoice, settle_memory
from engine.memory.capacity import Capacity
from engine.memory.estimate import COMPONENTS
from engine.memory.fit import Prediction, estimate_on, fit_of
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import find_machine

GIB = 2**30
WORLD = Topology(1, 4)
H100 = find_machine("h100")
MODEL = ModelConfig(
    name="1b", vocab_size=32000, hidden_size=2048, ffn_hidden_size=5632, num_layers=16, num_heads=16, num_kv_heads=16,
    head_dim=128,
)  # fmt: skip


def config(**memory: Any) -> RunConfig:
    base = RunConfig()
    return replace(
        base,
        model=MODEL,
        attention=replace(base.attention, preset="burst"),
        memory=replace(base.memory, **memory),
        train=replace(base.train, seq_len=2**18),
    )


def capacity(gib: float) -> Capacity:
    return Capacity("test device", round(gib * GIB), "test", 512 * GIB, "test", 4)


@dataclass(frozen=True)
class FakePrediction:
    """So many GiB, all of them checkpoints, and one of reserve."""

    gib: int
    host_peak_bytes: int = 0
    phase: str = "loss"

    @property
    def device_peak_bytes(self) -> int:
        return self.gib * GIB

    @property
    def needed_bytes(self) -> int:
        return (self.gib + 1) * GIB

    @property
    def components(self) -> dict[str, dict[str, int]]:
        zeros = dict.fromkeys(COMPONENTS, 0)
        return {
            "device": zeros | {"checkpoints": self.device_peak_bytes},
            "host": zeros | {"optimizer": self.host_peak_bytes},
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "device_peak_bytes": self.device_peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "components": self.components,
        }


def report(gib: float, prediction: Prediction | None = None, **memory: Any) -> MemoryReport:
    choice = MemoryChoice(config(**memory), (), "as configured")
    predict = None if prediction is None else lambda config, world: prediction
    return report_memory(choice, WORLD, capacity(gib), H100, predict)


def shown(found: MemoryReport, width: int = 200) -> str:
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(Group(*memory_view(found)))
    return stream.getvalue()


def test_the_exact_prediction_counts_and_the_closed_form_stands_beside_it() -> None:
    found = report(80, FakePrediction(50))
    plain = found.to_dict()
    assert (plain["by"], plain["device_peak_bytes"], plain["fits"]) == ("fake_step", 50 * GIB, True)
    assert plain["closed_form"]["device_peak_bytes"] == estimate_on(config(), WORLD).device_peak_bytes
    text = shown(found)
    assert "device, predicted" in text
    assert "device, closed form" in text
    assert "51 GiB of 80 GiB on test device" in text
    assert "29 GiB stay free; predicted by a rehearsal of the step" in text


def test_without_it_the_closed_form_counts_and_says_so() -> None:
    found = report(80)
    assert found.to_dict()["by"] == "closed_form"
    assert "predicted" not in shown(found)
    assert "in closed form, about a tenth off" in shown(found)


def test_a_prediction_refutes_a_closed_form_that_fits() -> None:
    found = report(80, FakePrediction(90))
    assert not found.fit.fits
    text = shown(found)
    assert "does not fit" in text
    assert "11 GiB per rank are missing in the device" in text
    assert "capacity ends at" in text


def test_host_memory_can_be_what_is_missing() -> None:
    found = report(80, FakePrediction(50, host_peak_bytes=200 * GIB))
    text = shown(found)
    assert "800 GiB of 512 GiB of host memory per node" in text
    assert "72 GiB per rank are missing in host memory" in text
    assert "host, predicted" in text


def test_the_bar_is_as_long_as_the_capacity() -> None:
    (line,) = [line for line in shown(report(80, FakePrediction(39))).splitlines() if line.startswith("device  ")]
    bar = line[line.index("[") + 1 : line.index("]")]
    assert (bar.count("█"), bar.count("·")) == (30, 30)


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
    assert report(80, **memory).policy == words


def test_auto_predicts_the_chosen_policy_once() -> None:
    asked = []

    def predict(config: RunConfig, world: Topology) -> Prediction:
        asked.append(config)
        return FakePrediction(10)

    auto = config(activation_checkpoint="auto")
    choice = settle_memory(auto, WORLD, capacity(80), H100, predict)
    found = report_memory(choice, WORLD, capacity(80), H100, predict)
    assert len(asked) == 1
    assert found.to_dict()["by"] == "fake_step"
    assert "memory=auto, best first" in shown(found)


def test_eight_billion_parameters_and_half_a_million_tokens_fit_on_one_gpu_and_its_host() -> None:
    """The closed form a tenth off on the device, as predictions are: memory=auto moves layers until it fits."""

    def predict(config: RunConfig, world: Topology) -> Prediction:
        estimate = estimate_on(config, world)
        return replace(estimate, device_peak_bytes=round(estimate.device_peak_bytes * 0.94))

    room = Capacity("h200", 136 * 10**9, "test", 120 * 10**9, "test", 1)
    settings = compose(["exp=llama8b_512k"]).config
    choice = settle_memory(settings, Topology(1, 1), room, find_machine("h200"), predict)
    assert choice.fits
    memory = choice.config.memory
    assert (memory.activation_checkpoint, memory.activation_store) == ("full", "host")
    assert 1 < (memory.host_layers or 32) < 32
    assert fit_of(predict(choice.config, Topology(1, 1)), room).fits
