"""memory=auto: the fastest policy that fits, what it was chosen from, and what helps when none does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from testkit.memory_cases import EIGHT_B, WORLD, prediction_of, seven_b
from testkit.resolved import step_of

from engine.config.settings import RunConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.machine import find_machine
from engine.predict.memory import Capacity, MemoryPrediction
from engine.predict.policy_cost import policy_cost
from engine.resolve.decisions import Rule
from engine.resolve.legality import method_on
from engine.resolve.memory import MemoryCandidate
from engine.resolve.recommend import Adviser, with_ranks
from engine.resolve.run import ResolvedRun, resolve_run

GB = 10**9
H100, RAILS = find_machine("h100"), find_machine("h100", {"inter_bytes_per_s": 5e9})


class Predictor:
    """Predicts what a rank has at least and a working set, which tiles bound; remembers who asked."""

    def __init__(self, factor: Callable[[RunConfig], float] = lambda config: 1.0, least_gb: float = 0.0) -> None:
        self._factor, self._least_gb = factor, least_gb
        self.asked: list[str] = []

    def __call__(self, config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
        self.asked.append(config.memory.activation_checkpoint)
        device, host = policy_cost(config, method).least
        rows = config.train.seq_len // method.cp_size
        working = 150_000 * min(rows, config.memory.tile_tokens or rows) + 20_000 * rows
        least = self._least_gb * GB * (config.memory.activation_checkpoint == "none")
        return prediction_of(round(max(least, self._factor(config) * (device + working))), host)


PREDICT = Predictor()


def capacity(device_gb: float, host_gb: float | None = 2000, *, shared: bool = False) -> Capacity:
    host = None if host_gb is None else round(host_gb * GB)
    return Capacity("test device", round(device_gb * GB), "test", host, "test", WORLD.local_ranks, shared)


def open_config(length: int = 2**20, **changes: Any) -> RunConfig:
    memory = {"activation_checkpoint": "auto", **changes.pop("memory", {})}
    return seven_b(memory=memory, train={"seq_len": length}, **changes)


def fits(config: RunConfig, room: Capacity, world: Topology = WORLD) -> bool:
    return room.fit(*PREDICT(config, method_on(config, world), world).needs).fits


POLICY = "memory.activation_checkpoint"


def candidates_of(run: ResolvedRun) -> tuple[MemoryCandidate, ...]:
    return run.decision(POLICY).candidates


@cache
def auto(device_gb: float, host_gb: float | None = 2000, *, length: int = 2**20, **memory: Any) -> ResolvedRun:
    """What is chosen with at most 8 predictions: what one needs tells of those like it."""
    predict = Predictor()
    choice = resolve_run(open_config(length, memory=memory), WORLD, H100, capacity(device_gb, host_gb), predict)
    assert len(predict.asked) <= 8
    return choice


# What there is and is asked for; what is chosen; rows of a tile: 7B layers are 4,096 wide, and a row takes 6 * 11,008 *
# 2 bytes of a tile: 8,192 rows 1.08 GB, a hundredth of 110 GB; there are 8 ranks, whose rows are eight tiles at least.
KEPT_ON_HOST = {"activation_store": "host"}
EVERYTHING = {"activation_checkpoint": "none", "activation_store": "device", "tile_tokens": None}
RESULTS = {"activation_checkpoint": "attn_out", "activation_store": "device"}
CHOICES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"device_gb": 2000}, {**EVERYTHING, "optimizer_store": "device"}, 16384),
    ({"device_gb": 400}, {}, 16384),
    ({"device_gb": 220}, {}, 16384),
    ({"device_gb": 150}, {}, 8192),
    ({"device_gb": 120}, RESULTS, 8192),
    ({"device_gb": 110, "length": 2**18}, {}, 4096),
    ({"device_gb": 100}, {}, 4096),
    ({"device_gb": 90}, RESULTS, 4096),  # and not everything on the host, which takes alike
    ({"device_gb": 100, "host_gb": None}, {"activation_store": "device", "optimizer_store": "device"}, 4096),
    ({"device_gb": 100, "activation_store": "device"}, {}, 4096),
    ({"device_gb": 70, **KEPT_ON_HOST}, {}, 4096),
    ({"device_gb": 60}, {}, 4096),
    ({"device_gb": 60, **KEPT_ON_HOST, "host_layers": 7, "length": 2**18}, {}, 4096),
    ({"device_gb": 40}, {}, 4096),
    ({"device_gb": 40, **KEPT_ON_HOST}, {}, 4096),
    ({"device_gb": 20}, {}, 4096),
    # With the optimizer on the host there is room for a faster policy than beside it.
    ({"device_gb": 20, "length": 2**18, "activation_store": "device"}, {**RESULTS, "optimizer_store": "host"}, 4096),
    ({"device_gb": 12}, {}, 4096),
    ({"device_gb": 9, "length": 2**17}, {"optimizer_store": "host"}, 4096),  # nothing else fits
]


@pytest.mark.parametrize(("asked", "expected", "tile_tokens"), CHOICES, ids=[str(case[0]) for case in CHOICES])
def test_auto_selects_the_fastest_policy_that_fits(
    asked: dict[str, Any], expected: dict[str, Any], tile_tokens: int
) -> None:
    """All others are predicted here, with as many layers on the host as were considered."""
    choice, room = auto(**asked), capacity(asked["device_gb"], asked.get("host_gb", 2000))
    best, chosen = candidates_of(choice)[0], choice.config.memory
    said = {name: value for name, value in asked.items() if hasattr(chosen, name)}
    assert asdict(chosen).items() >= {**said, **expected}.items()
    assert choice.memory_fits
    assert choice.prediction == best.prediction
    assert best.memory == chosen
    assert {one.memory.tile_tokens for one in candidates_of(choice)} == {None, tile_tokens}
    # The optimizer on the host is weighed unless the best policy costs nothing.
    costs = best.cost.recompute_flops + best.cost.moved_bytes > 0
    weighed = "host" in {one.memory.optimizer_store for one in candidates_of(choice)}
    assert weighed is (costs and asked.get("host_gb", 2000) is not None)
    assert best.step_s is not None
    assert fits(choice.config, room)
    for candidate in candidates_of(choice):
        config = replace(choice.config, memory=candidate.memory)
        if fits(config, room):
            assert best.step_s * 0.99 <= step_of(config, WORLD, H100).seconds
    if chosen.host_layers is not None and "host_layers" not in said:
        fewer = replace(chosen, host_layers=chosen.host_layers - 1)
        assert not fits(replace(choice.config, memory=fewer), room)


def test_less_memory_never_makes_a_step_faster() -> None:
    steps = [candidates_of(auto(size))[0].step_s for size in (2000, 400, 100, 60, 40)]
    assert steps[0] < steps[-1]
    assert all(later >= earlier * 0.99 for earlier, later in pairwise(steps))


def test_a_tie_goes_to_the_simplest_policy() -> None:
    # Of those alike the simplest: on the host everything can be kept, for a percent less time and many copies.
    assert candidates_of(auto(120))[0].step_s > min(one.step_s for one in candidates_of(auto(120)) if one.step_s)


def resolved(predict: Predictor, room: Capacity, **memory: Any) -> ResolvedRun:
    return resolve_run(open_config(memory=memory), WORLD, H100, room, predict)


def test_with_plenty_of_memory_one_prediction_is_enough() -> None:
    predict = Predictor()
    choice = resolved(predict, capacity(2000))
    assert predict.asked == ["none"]
    assert {one.memory.host_layers for one in candidates_of(choice)} == {None}  # none need lie there
    first, second, *_ = [candidate.to_dict() for candidate in candidates_of(choice)]
    assert first["fits"] is True
    assert first["fits_device"] is True
    assert first["fits_host"] is True
    assert first["needed_bytes"] == (choice.prediction and choice.prediction.needed_bytes)
    unknown = ("fits", "fits_device", "fits_host", "device_peak_bytes", "needed_bytes", "host_peak_bytes", "step_s")
    assert [second[name] for name in unknown] == [None] * len(unknown)
    cost = candidates_of(choice)[1].cost
    again = {"recompute_linear_flops": cost.linear_flops, "recompute_attention_flops": cost.attention_flops}
    assert second.items() >= {"saved_bytes": cost.saved_bytes, "moved_bytes": cost.moved_bytes, **again}.items()


def test_memory_of_one_policy_is_not_charged_to_another() -> None:
    full = resolved(Predictor(lambda c: 1.0 if c.memory.activation_checkpoint == "full" else 20.0), capacity(60, None))
    assert full.memory_fits
    assert full.config.memory.activation_checkpoint == "full"


def test_policy_is_left_once_layers_on_the_host_do_not_lower_its_peak() -> None:
    high = Predictor(least_gb=41)
    assert resolved(high, capacity(40), tile_tokens=4096).memory_fits
    assert high.asked.count("none") == 3


def test_policy_that_a_prediction_refutes_is_not_chosen() -> None:
    refuted = auto(150).config.memory
    choice = resolved(Predictor(lambda config: 3.0 if config.memory == refuted else 1.0), capacity(150))
    assert choice.memory_fits
    assert choice.config.memory != refuted
    assert [one.fits for one in candidates_of(choice) if one.memory == refuted] == [False]


def test_search_ends_after_two_predictions_per_policy() -> None:
    never = Predictor(lambda config: 30.0)
    assert resolved(never, capacity(100)).memory_fits is False
    assert len(never.asked) <= 2 * 12


def test_named_settings_are_not_changed() -> None:
    configured = seven_b(memory={"activation_checkpoint": "full"})
    run = resolve_run(configured, WORLD, H100, capacity(1), PREDICT)
    assert run.config == configured
    assert run.decision(POLICY).rule == Rule.CONFIGURED
    assert auto(100, activation_store="device", tile_tokens=2048).config.memory.tile_tokens == 2048


def test_on_a_cpu_nothing_is_moved_to_the_host() -> None:
    on_cpu = open_config(2**17, cluster={"backend": "gloo"})
    choice = resolve_run(on_cpu, WORLD, find_machine("cpu"), capacity(100, 800, shared=True), PREDICT)
    assert choice.memory_fits
    assert {candidate.memory.activation_store for candidate in candidates_of(choice)} == {"device"}


def test_host_memory_of_unknown_size_is_not_used() -> None:
    candidates = candidates_of(auto(100, None))
    assert {candidate.memory.activation_store for candidate in candidates} == {"device"}


SHORT = 2.0  # GB of a device on which nothing fits


def advice(room: Capacity, config: RunConfig, machine: str = "h100", world: Topology = WORLD) -> list[str]:
    return Adviser(room, find_machine(machine), PREDICT).remedies(config, world)


def test_a_policy_that_does_not_fit_reports_missing_bytes() -> None:
    choice = auto(SHORT)
    assert not choice.memory_fits
    assert choice.decision(POLICY).figures["headroom_bytes"] < 0, "nothing fits, but no byte is missing"


def test_advice_names_the_smallest_sufficient_number_of_ranks() -> None:
    choice = auto(SHORT)
    found = advice(capacity(SHORT), seven_b(train={"seq_len": 2**20}))
    (ranks,) = [int(text.split()[0]) for text in found if "instead of 8 would fit" in text]
    for size, enough in ((ranks, True), (ranks // 2, False)):
        world = Topology(size // 8, 8)
        assert fits(with_ranks(choice.config, WORLD, world), capacity(SHORT), world) is enough


def test_advice_names_host_memory_of_unknown_size() -> None:
    assert "memory.host_bytes=" in advice(capacity(SHORT, None), seven_b(train={"seq_len": 2**20}))[0]


def test_an_open_policy_is_rated_as_saving_everything() -> None:
    """It would save 3% on one node; one that computes again what it can would save nothing there."""
    asked, world, machine = open_config(2**17), Topology(2, 4), find_machine("h100", {"inter_bytes_per_s": 20e9})
    resolved = replace(asked, memory=replace(asked.memory, activation_checkpoint="none", activation_store="device"))
    found = Adviser(capacity(2000), machine, PREDICT).recommend(asked, resolved, world)
    steps = [step_of(resolved, one, machine).device_s_per_token for one in (world, Topology(1, 4))]
    assert found is not None
    assert found.change == "--ranks 4 --nodes 1"
    assert found.saving == pytest.approx(1 - steps[1] / steps[0])


def test_of_methods_the_fastest_is_advised() -> None:
    ring, world = open_config(2**17, memory={"activation_checkpoint": "full"}), Topology(2, 4)
    ring = replace(ring, attention=replace(ring.attention, preset="ring"))

    def predict(config: RunConfig, method: AttentionMethod, on: Topology) -> MemoryPrediction:  # nothing else fits
        return prediction_of(1 if (config.memory, on) == (ring.memory, world) else 10**15)

    found = Adviser(capacity(2000), RAILS, predict).recommend(ring, ring, world)
    assert (found and found.change) == "attention=burst"


def test_shorter_sequence_is_not_advised_where_the_model_alone_is_too_large() -> None:
    host = Capacity("cpu", 60 * 2**30, "MemTotal", 60 * 2**30, "MemTotal", 1, host_is_device=True)
    config = replace(seven_b(train={"seq_len": 1024}, cluster={"backend": "gloo"}), model=EIGHT_B)
    ranks, moments, model = advice(host, config, "cpu", Topology(1, 1))
    # 16 bytes for each of 8.03 billion weights.
    assert model.startswith("a smaller model: weights, gradients and optimizer states alone take 120 GiB of a rank, ")
    assert re.match(r"\d+ ranks \(\d+ nodes of 1\) instead of 1 would fit", ranks)
    assert moments.startswith("memory.moments_dtype=int8 would fit on the same ranks, with ")


def test_advice_for_a_policy_that_does_not_fit_names_one_that_does() -> None:
    config = seven_b(memory={"activation_checkpoint": "none"}, train={"seq_len": 2**20})
    (text,) = advice(capacity(50), config)
    assert text.startswith("memory=auto would fit with ")
    assert "memory.activation_store=host" in text
