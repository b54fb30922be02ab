"""memory=auto: the fastest policy that fits, what it was chosen from, and what helps when none does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from memory_cases import EIGHT_B, WORLD, prediction_of, seven_b

from engine.config.settings import RunConfig
from engine.planning.memory.auto import INDIFFERENCE, MOST_GUESSES, MOST_PREDICTED, settle_memory, settle_run
from engine.planning.memory.capacity import Capacity
from engine.planning.memory.cost import method_on, policy_cost
from engine.planning.memory.predictor import MemoryChoice, MemoryPrediction
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import find_machine
from engine.planning.time.recommend import Adviser, with_ranks
from engine.planning.time.step_time import predict_step

GB = 10**9
H100 = find_machine("h100")


class Predictor:
    """Predicts what a rank has at least and a working set, which tiles bound; remembers who asked."""

    def __init__(self, factor: Callable[[RunConfig], float] = lambda config: 1.0) -> None:
        self._factor = factor
        self.asked: list[str] = []

    def __call__(self, config: RunConfig, world: Topology) -> MemoryPrediction:
        self.asked.append(config.memory.activation_checkpoint)
        method = method_on(config, world)
        device, host = policy_cost(config, method).least
        rows = config.train.seq_len // method.cp_size
        working = 150_000 * min(rows, config.memory.tile_tokens or rows) + 20_000 * rows
        return prediction_of(round(self._factor(config) * (device + working)), host)


PREDICT = Predictor()


def capacity(device_gb: float, host_gb: float | None = 2000, *, shared: bool = False) -> Capacity:
    host = None if host_gb is None else round(host_gb * GB)
    return Capacity("test device", round(device_gb * GB), "test", host, "test", WORLD.local_ranks, shared)


def auto(device_gb: float, host_gb: float | None = 2000, *, length: int = 2**20, **memory: Any) -> MemoryChoice:
    config = seven_b(memory={"activation_checkpoint": "auto", **memory}, train={"seq_len": length})
    return settle_memory(config, WORLD, capacity(device_gb, host_gb), PREDICT, H100)


def test_less_memory_never_makes_a_step_faster() -> None:
    steps = [auto(size).candidates[0].step_s for size in (2000, 400, 200, 100, 60, 40)]
    assert steps[0] < steps[-1]
    assert all(later >= earlier * (1 - INDIFFERENCE) for earlier, later in pairwise(steps))


@pytest.mark.parametrize("size", [400, 100, 60])
def test_the_chosen_one_fits_and_nothing_that_fits_is_faster(size: float) -> None:
    """All others are predicted here, with as many layers on the host as were considered."""
    choice = auto(size)
    best = choice.candidates[0]
    assert best.memory == choice.config.memory
    assert choice.prediction is not None
    assert choice.prediction.needed_bytes <= size * GB
    for candidate in choice.candidates:
        config = replace(choice.config, memory=candidate.memory)
        if capacity(size).fit(*PREDICT(config, WORLD).needs).fits:
            assert best.step_s * (1 - INDIFFERENCE) <= predict_step(config, WORLD, H100).seconds


def test_of_policies_that_take_alike_the_simplest_is_chosen() -> None:
    """On the host everything can be kept, for a percent less time and hundreds of gigabytes of copies."""
    choice = auto(120)
    assert choice.candidates[0].step_s > min(one.step_s for one in choice.candidates if one.step_s)
    assert (choice.config.memory.activation_checkpoint, choice.config.memory.activation_store) == ("attn_out", "device")


def test_what_one_policy_works_with_is_not_charged_to_another() -> None:
    """Others fail by far here, and only the one that takes most time fits."""
    greedy = Predictor(lambda config: 1.0 if config.memory.activation_checkpoint == "full" else 20.0)
    config = seven_b(memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**20})
    choice = settle_memory(config, WORLD, capacity(60, None), greedy, H100)
    assert choice.fits
    assert choice.config.memory.activation_checkpoint == "full"


def test_host_memory_of_unknown_size_is_not_used() -> None:
    assert {one.memory.activation_store for one in auto(100, host_gb=None).candidates} == {"device"}
    assert "memory.host_bytes=BYTES" in advice(host_gb=None)[0]


def test_what_the_configuration_says_is_kept() -> None:
    memory = auto(100, activation_store="device", tile_tokens=2048).config.memory
    assert (memory.activation_store, memory.tile_tokens) == ("device", 2048)
    assert auto(60, activation_store="host", host_layers=7, length=2**18).config.memory.host_layers == 7
    configured = seven_b(memory={"activation_checkpoint": "full"})
    assert settle_memory(configured, WORLD, capacity(1), PREDICT, H100) == MemoryChoice(configured, (), "as configured")


@pytest.mark.parametrize(
    ("device_gb", "length", "tile_tokens"),
    # 7B layers are 4,096 wide, and a row takes 6 * 11,008 * 2 bytes of a tile: 8,192 rows 1.08 GB; there are 8 ranks.
    [(100, 2**20, 4096), (110, 2**20, 8192), (110, 2**18, 4096), (220, 2**20, 16384), (2000, 2**20, 16384)],
)
def test_tiles_are_larger_where_a_hundredth_of_the_device_and_an_eighth_of_the_rows_allow(
    device_gb: float, length: int, tile_tokens: int
) -> None:
    tiled = {one.memory.tile_tokens for one in auto(device_gb, length=length).candidates}
    assert tiled == {None, tile_tokens}


def test_the_optimizer_leaves_the_device_when_nothing_else_fits() -> None:
    choice = auto(9, length=2**17)
    assert choice.fits
    assert choice.config.memory.optimizer_store == "host"
    assert any(candidate.memory.optimizer_store == "device" for candidate in choice.candidates)


def test_the_optimizer_leaves_the_device_where_that_saves_more_than_it_costs() -> None:
    choice = auto(20, length=2**18, activation_store="device")
    best = choice.candidates[0]
    assert (best.memory.activation_checkpoint, best.memory.optimizer_store) == ("attn_out", "host")
    (on_device,) = (one for one in choice.candidates if one.fits and one.memory.optimizer_store == "device")
    assert best.step_s < on_device.step_s * (1 - INDIFFERENCE)


def test_beside_a_policy_that_costs_nothing_the_optimizer_on_the_host_is_not_weighed() -> None:
    choice = auto(2000)
    assert choice.config.memory.activation_checkpoint == "none"
    assert {one.memory.optimizer_store for one in choice.candidates} == {"device"}


def test_a_peak_that_layers_on_the_host_do_not_lower_takes_few_predictions() -> None:
    asked = []

    def predict(config: RunConfig, world: Topology) -> MemoryPrediction:
        found = PREDICT(config, world)
        if config.memory.activation_checkpoint != "none":
            return found
        asked.append(config.memory)
        return prediction_of(max(found.device_peak_bytes, 41 * GB), found.host_peak_bytes)

    config = seven_b(memory={"activation_checkpoint": "auto", "tile_tokens": 4096}, train={"seq_len": 2**20})
    assert settle_memory(config, WORLD, capacity(40), predict, H100).fits
    assert len(asked) == MOST_GUESSES + 1


def test_on_a_cpu_nothing_is_moved_to_the_host() -> None:
    config = seven_b(memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**17}, cluster={"backend": "gloo"})
    choice = settle_memory(config, WORLD, capacity(100, 800, shared=True), PREDICT, find_machine("cpu"))
    assert choice.fits
    assert {candidate.memory.activation_store for candidate in choice.candidates} == {"device"}


def test_attention_auto_is_settled_first() -> None:
    config = seven_b(attention={"preset": "auto"}, memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**17})
    attention, memory = settle_run(config, Topology(1, 4), capacity(80), PREDICT, H100)
    assert memory.config.attention == attention.config.attention
    assert memory.config.attention.preset != "auto"
    assert memory.config.memory.activation_checkpoint != "auto"


@pytest.mark.parametrize("device_gb", [40, 60, 70])
def test_no_fewer_layers_on_the_host_would_leave_the_device_room(device_gb: float) -> None:
    memory = auto(device_gb, activation_store="host").config.memory
    assert memory.host_layers is not None
    config = seven_b(train={"seq_len": 2**20})
    fewer = replace(config, memory=replace(memory, host_layers=memory.host_layers - 1))
    assert PREDICT(fewer, WORLD).needed_bytes > device_gb * GB


AUTO = seven_b(memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**20})


def test_with_plenty_of_memory_everything_is_kept_and_one_prediction_is_enough() -> None:
    predict = Predictor()
    choice = settle_memory(AUTO, WORLD, capacity(2000), predict, H100)
    chosen = choice.config.memory
    assert (chosen.activation_checkpoint, chosen.activation_store) == ("none", "device")
    assert (chosen.tile_tokens, chosen.optimizer_store) == (None, "device")
    assert predict.asked == ["none"]
    first, second, *_ = [candidate.to_dict() for candidate in choice.candidates]
    assert first["fits"]
    assert first["needed_bytes"] == choice.prediction.needed_bytes  # type: ignore[union-attr]
    assert (second["fits"], second["needed_bytes"]) == (None, None)


@pytest.mark.parametrize("device_gb", [12, 20, 40, 60, 100, 150, 300])
def test_few_are_predicted_for_what_one_needs_tells_of_those_like_it(device_gb: float) -> None:
    predict = Predictor()
    settle_memory(AUTO, WORLD, capacity(device_gb), predict, H100)
    assert len(predict.asked) <= 8


def test_a_refuted_candidate_gives_way_to_the_next() -> None:
    refuted = settle_memory(AUTO, WORLD, capacity(150), PREDICT, H100).config.memory
    choice = settle_memory(
        AUTO, WORLD, capacity(150), Predictor(lambda config: 3.0 if config.memory == refuted else 1.0), H100
    )
    assert choice.fits
    assert choice.config.memory != refuted
    assert [one.fits for one in choice.candidates if one.memory == refuted] == [False]


def test_when_all_are_refuted_none_fits() -> None:
    predict = Predictor(lambda config: 30.0)
    choice = settle_memory(AUTO, WORLD, capacity(100), predict, H100)
    assert len(predict.asked) <= 2 * MOST_PREDICTED
    assert not choice.fits


SHORT = 4.0  # GB of a device on which nothing fits


def advice(host_gb: float | None = 2000) -> list[str]:
    return Adviser(capacity(SHORT, host_gb), H100, PREDICT).remedies(seven_b(train={"seq_len": 2**22}), WORLD)


def test_when_nothing_fits_the_reason_says_what_is_missing() -> None:
    choice = auto(SHORT, length=2**22)
    assert not choice.fits
    assert "no policy fits on test device" in choice.reason
    assert re.search(r"lacks [\d.]+ GiB", choice.reason)


def test_the_number_of_ranks_advised_fits_and_half_of_it_does_not() -> None:
    choice = auto(SHORT, length=2**22)
    (text,) = [text for text in advice() if "instead of 8 would fit" in text]
    ranks = int(text.split()[0])

    def fits(size: int) -> bool:
        world = Topology(size // 8, 8)
        return capacity(SHORT).fit(*PREDICT(with_ranks(choice.config, WORLD, world), world).needs).fits

    assert fits(ranks)
    assert not fits(ranks // 2)


def on_cpu(gib: int) -> list[str]:
    """The advice for an 8B model and a short sequence on a machine without GPUs."""
    host = Capacity("cpu", gib * 2**30, "MemTotal", gib * 2**30, "MemTotal", 1, host_is_device=True)
    config = replace(seven_b(train={"seq_len": 1024}, cluster={"backend": "gloo"}), model=EIGHT_B)
    return Adviser(host, find_machine("cpu"), PREDICT).remedies(config, Topology(1, 1))


def test_shorter_sequence_is_not_advised_where_the_model_alone_is_too_large() -> None:
    ranks, moments, model = on_cpu(60)
    # 16 bytes for each of 8.03 billion weights.
    assert model.startswith("a smaller model: weights, gradients and optimizer states alone take 120 GiB of a rank, ")
    assert re.match(r"\d+ ranks \(\d+ nodes of 1\) instead of 1 would fit", ranks)
    assert moments.startswith("memory.moments_dtype=int8 would fit on the same ranks, with ")


def test_advice_for_a_policy_that_does_not_fit_names_one_that_does() -> None:
    config = seven_b(memory={"activation_checkpoint": "none"}, train={"seq_len": 2**20})
    (text,) = Adviser(capacity(50), H100, PREDICT).remedies(config, WORLD)
    assert text.startswith("memory=auto would fit with ")
    assert "memory.activation_store=host" in text
