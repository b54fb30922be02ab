"""memory=auto: the fastest policy that fits, what it was chosen from, and what helps when none does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from memory_cases import EIGHT_B, WORLD, seven_b

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.memory.auto import INDIFFERENCE, MOST_VERIFIED, MemoryChoice, advice_for, settle_memory, settle_run
from engine.memory.candidate import MARGIN
from engine.memory.capacity import Capacity
from engine.memory.fit import Prediction, estimate_on, fit_of, with_ranks
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import find_machine
from engine.planning.time.step_time import plain_step_seconds

GB = 10**9
H100 = find_machine("h100")


def capacity(device_gb: float, host_gb: float | None = 2000, *, shared: bool = False) -> Capacity:
    host = None if host_gb is None else round(host_gb * GB)
    return Capacity("test device", round(device_gb * GB), "test", host, "test", WORLD.local_ranks, shared)


def auto(device_gb: float, host_gb: float | None = 2000, *, length: int = 2**20, **memory: Any) -> MemoryChoice:
    config = seven_b(memory={"activation_checkpoint": "auto", **memory}, train={"seq_len": length})
    return settle_memory(config, WORLD, capacity(device_gb, host_gb), H100)


def test_with_plenty_of_memory_everything_is_kept() -> None:
    chosen = auto(2000).config.memory
    assert (chosen.activation_checkpoint, chosen.activation_store) == ("none", "device")
    assert (chosen.tile_tokens, chosen.optimizer_store) == (None, "device")


def test_less_memory_never_makes_a_step_faster() -> None:
    extra = [auto(size).candidates[0].extra_s for size in (2000, 400, 200, 100, 60, 40)]
    assert extra[0] < extra[-1]
    step_s = plain_step_seconds(seven_b(train={"seq_len": 2**20}), WORLD, H100)
    assert all(later >= earlier - INDIFFERENCE * step_s for earlier, later in pairwise(extra))


@pytest.mark.parametrize("size", [400, 100, 60])
def test_the_chosen_one_fits_and_nothing_that_fits_is_faster(size: float) -> None:
    choice = auto(size)
    best = choice.candidates[0]
    assert best.memory == choice.config.memory
    assert best.estimate.needed_bytes * (1 + MARGIN) <= size * GB
    least = min(candidate.extra_s for candidate in choice.candidates if candidate.fits)
    assert best.extra_s - least <= INDIFFERENCE * plain_step_seconds(choice.config, WORLD, H100)
    for candidate in choice.candidates:
        fits = candidate.estimate.needed_bytes * (1 + MARGIN) <= size * GB
        assert candidate.fits == (fits and candidate.estimate.host_peak_bytes * (1 + MARGIN) * 8 <= 2000 * GB)


def test_of_policies_that_take_alike_the_simplest_is_chosen() -> None:
    """On the host everything can be kept, for a percent less time and hundreds of gigabytes of copies."""
    choice = auto(100)
    assert choice.candidates[0].extra_s > min(one.extra_s for one in choice.candidates if one.fits)
    assert choice.config.memory.activation_checkpoint == "attn_out"


def test_candidates_are_all_policies_on_both_stores_with_and_without_tiles() -> None:
    choice = auto(100)
    names = [candidate.name for candidate in choice.candidates]
    assert len(names) == len(set(names)) == 2 * 2 * 9
    unsplit = {re.sub(r"\d+ layers? ", "", name) for name in names}
    assert {"none, on device", "seq_fraction 0.25, on host", "attn_out_every 8, on host, tiles of 4096"} <= unsplit


def test_a_small_host_keeps_checkpoints_on_the_device() -> None:
    assert auto(100).config.memory.activation_store == "host"
    assert auto(100, host_gb=10).config.memory.activation_store == "device"


def test_host_memory_of_unknown_size_is_not_used() -> None:
    assert {one.memory.activation_store for one in auto(100, host_gb=None).candidates} == {"device"}
    assert "memory.host_bytes=BYTES" in auto(SHORT, host_gb=None, length=2**22).advice[0]


def test_what_the_configuration_says_is_kept() -> None:
    memory = auto(100, activation_store="device", tile_tokens=2048).config.memory
    assert (memory.activation_store, memory.tile_tokens) == ("device", 2048)
    configured = seven_b(memory={"activation_checkpoint": "full"})
    assert settle_memory(configured, WORLD, capacity(1), H100) == MemoryChoice(configured, (), "as configured")


def test_the_optimizer_leaves_the_device_when_nothing_else_fits() -> None:
    choice = auto(14, length=2**17)
    assert choice.fits
    assert choice.config.memory.optimizer_store == "host"
    assert any(candidate.memory.optimizer_store == "device" for candidate in choice.candidates)


def test_on_a_cpu_nothing_is_moved_to_the_host() -> None:
    config = seven_b(memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**17}, cluster={"backend": "gloo"})
    choice = settle_memory(config, WORLD, capacity(100, 800, shared=True), find_machine("cpu"))
    assert choice.fits
    assert {candidate.memory.activation_store for candidate in choice.candidates} == {"device"}


def test_attention_auto_is_settled_first() -> None:
    config = seven_b(attention={"preset": "auto"}, memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**17})
    attention, memory = settle_run(config, Topology(1, 4), capacity(80), H100)
    assert memory.config.attention == attention.config.attention
    assert memory.config.attention.preset != "auto"
    assert memory.config.memory.activation_checkpoint != "auto"


@dataclass
class FakePrediction:
    """An exact prediction that differs from the closed form by a factor."""

    estimate: Prediction
    factor: float
    phase: str = "backward"
    components: dict[str, dict[str, int]] = field(default_factory=lambda: {"device": {}, "host": {}})

    @property
    def device_peak_bytes(self) -> int:
        return round(self.estimate.device_peak_bytes * self.factor)

    @property
    def needed_bytes(self) -> int:
        return round(self.estimate.needed_bytes * self.factor)

    @property
    def host_peak_bytes(self) -> int:
        return self.estimate.host_peak_bytes

    def to_dict(self) -> dict[str, Any]:
        return {"device_peak_bytes": self.device_peak_bytes, "host_peak_bytes": self.host_peak_bytes}


def predictor(factor: Callable[[RunConfig], float]) -> tuple[Callable[[RunConfig, Topology], Prediction], list[str]]:
    """(verify, the policies that it was asked about)."""
    asked: list[str] = []

    def verify(config: RunConfig, world: Topology) -> Prediction:
        asked.append(config.memory.activation_checkpoint)
        return FakePrediction(estimate_on(config, world), factor(config))

    return verify, asked


AUTO = seven_b(memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**20})


def test_one_exact_prediction_confirms_the_choice() -> None:
    verify, asked = predictor(lambda config: 1.0)
    choice = settle_memory(AUTO, WORLD, capacity(100), H100, verify)
    assert len(asked) == 1
    assert choice.candidates[0].to_dict()["by"] == "fake_step"
    assert choice.candidates[1].to_dict()["by"] == "closed_form"


def test_a_refuted_candidate_gives_way_to_the_next() -> None:
    refuted = settle_memory(AUTO, WORLD, capacity(100), H100).config.memory
    verify, asked = predictor(lambda config: 3.0 if config.memory == refuted else 1.0)
    choice = settle_memory(AUTO, WORLD, capacity(100), H100, verify)
    assert len(asked) == 2
    assert choice.fits
    assert choice.config.memory != refuted
    assert not choice.candidates[0].fits


def test_when_all_are_refuted_none_fits() -> None:
    verify, asked = predictor(lambda config: 30.0)
    choice = settle_memory(AUTO, WORLD, capacity(100), H100, verify)
    assert len(asked) == MOST_VERIFIED
    assert not choice.fits


def test_few_candidates_are_predicted_exactly() -> None:
    verify, asked = predictor(lambda config: 1.0 + MARGIN * 1.2)
    tight = settle_memory(AUTO, WORLD, capacity(100), H100).candidates[0].estimate.needed_bytes
    settle_memory(AUTO, WORLD, capacity(tight * (1 + MARGIN) / GB), H100, verify)
    assert 1 <= len(asked) <= MOST_VERIFIED


def test_a_margin_alone_refuses_nothing() -> None:
    """Where only the margin is missing the exact prediction decides."""
    best = settle_memory(AUTO, WORLD, capacity(20), H100).candidates[0]
    barely = capacity(best.estimate.needed_bytes * (1 + MARGIN / 2) / GB)
    assert not settle_memory(AUTO, WORLD, barely, H100).fits
    verify, _ = predictor(lambda config: 1.0)
    assert settle_memory(AUTO, WORLD, barely, H100, verify).fits


SHORT = 12.0  # GB of a device on which nothing fits


def test_when_nothing_fits_the_error_says_what_is_missing_and_what_helps() -> None:
    choice = auto(SHORT, length=2**22)
    assert not choice.fits
    with pytest.raises(ConfigError) as caught:
        choice.require()
    first, *advice = caught.value.problems
    assert "no policy fits on test device" in first
    assert re.search(r"lacks [\d.]+ GB", first)
    assert advice == list(choice.advice)
    assert any("ranks" in text for text in advice)
    assert any("train.seq_len=" in text for text in advice)


def test_the_number_of_ranks_advised_is_the_smallest_that_fits() -> None:
    choice = auto(SHORT, length=2**22)
    (text,) = [text for text in choice.advice if "instead of 8 would fit" in text]
    ranks = int(text.split()[0])

    def fits(size: int) -> bool:
        world = Topology(size // 8, 8)
        config = with_ranks(choice.config, WORLD, world)
        return fit_of(estimate_on(config, world), capacity(SHORT), MARGIN).fits

    assert fits(ranks)
    assert not fits(ranks - 8)


def test_the_length_advised_fits_and_a_thirty_second_more_does_not() -> None:
    choice = auto(SHORT, length=2**22)
    (text,) = [text for text in choice.advice if "train.seq_len=" in text]
    length = int(re.search(r"=(\d+)", text)[1])  # type: ignore[index]

    def fits(tokens: int) -> bool:
        config = replace(choice.config, train=replace(choice.config.train, seq_len=tokens))
        return fit_of(estimate_on(config, WORLD), capacity(SHORT), MARGIN).fits

    assert fits(length)
    assert not fits(length + 2**22 // 32)


def on_cpu(gib: int) -> list[str]:
    """The advice for an 8B model and a short sequence on a machine without GPUs."""
    host = Capacity("cpu", gib * 2**30, "MemTotal", gib * 2**30, "MemTotal", 1, host_is_device=True)
    return advice_for(replace(seven_b(train={"seq_len": 1024}), model=EIGHT_B), Topology(1, 1), host)


def test_shorter_sequence_is_not_advised_where_the_model_alone_is_too_large() -> None:
    ranks, model = on_cpu(23)
    # 16 bytes for each of 8.03 billion weights are 120 GiB; the last layer's gradients are not there yet at the peak.
    assert model.startswith("a smaller model: weights, gradients and optimizer states alone take 118 GiB of a rank, ")
    assert re.match(r"\d+ ranks \(\d+ nodes of 1\) instead of 1 would fit", ranks)


def test_eight_bit_moments_are_advised_where_they_are_enough() -> None:
    assert "memory.moments_dtype=int8 would fit on the same ranks, under memory=auto" in on_cpu(90)
    assert not any("moments" in text for text in on_cpu(23))


def test_advice_for_a_policy_that_does_not_fit_names_one_that_does() -> None:
    config = seven_b(memory={"activation_checkpoint": "none"}, train={"seq_len": 2**20})
    (text,) = advice_for(config, WORLD, capacity(80), H100)
    assert text.startswith("memory=auto would fit with ")
    assert "memory.activation_store=host" in text


def test_copies_that_compute_cannot_hide_are_counted() -> None:
    slow = replace(H100, host_bytes_per_s=1e8)
    config = replace(seven_b(memory={"activation_checkpoint": "auto"}, train={"seq_len": 2**17}), model=EIGHT_B)
    found = {
        machine.host_bytes_per_s: {
            c.name: c.extra_s for c in settle_memory(config, WORLD, capacity(40), machine).candidates
        }
        for machine in (H100, slow)
    }
    assert found[1e8]["full, on host"] > 2 * found[H100.host_bytes_per_s]["full, on host"]
    assert found[1e8]["full, on device"] == found[H100.host_bytes_per_s]["full, on device"]
