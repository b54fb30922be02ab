"""What others published, and their code: what is compared, and how near predictions come."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench_published import Row, compare, published_rows
from benchmarks.peers.methods import COUNTERPARTS, PEERS
from engine.bench.spec import check_points
from engine.predict.memory import shared_predictor


def row(model: str, method: str, seq_len: int) -> Row:
    (found,) = [one for one in published_rows() if (one.model, one.method, one.seq_len) == (model, method, seq_len)]
    return found


def test_every_published_speed_is_compared_once() -> None:
    rows = published_rows()
    assert len(rows) == len(set(rows)) == 38
    assert {one.hardware for one in rows} == {"A800-80GB", "8xH100"}


def test_published_run_on_one_rank_is_planned_as_its_source_ran_it() -> None:
    config = row("14b", "burst", 32768).config
    assert config.attention.preset == "single"
    assert config.memory.activation_checkpoint == "attn_out"
    assert config.memory.optimizer_store == "host"
    assert config.train.compute_dtype == "bfloat16"


def test_published_run_on_32_ranks_is_planned_as_its_source_ran_it() -> None:
    half = row("7b", "burst/seq_fraction_0.5", 2**21)
    assert half.config.memory.saved_fraction == 0.5
    assert half.world.nodes == 4
    assert half.world.local_ranks == 8


def test_whole_logits_count_only_for_sources_without_a_fused_loss() -> None:
    assert row("7b", "burst/seq_fraction_0.5", 2**21).whole_logits_gb == 0.0
    assert row("14b", "loongtrain_usp/attn_out", 2**20).whole_logits_gb == 4 * 32768 * 120_000 / 1e9


def test_attention_alone_is_compared_in_flops_of_the_causal_half() -> None:
    """3.5 forward passes of 4 H D per pair: at the kernels' own rates it would be 40 heads' worth of them."""
    one = row("attention, 40 heads of 128", "burst", 2**20)
    machine = one.machine
    ideal = 3.5 / (1 / machine.forward_flops_per_s + 2.5 / machine.backward_flops_per_s) / 1e12
    assert 0.9 * ideal < one.predicted_speed() < ideal


def test_published_steps_of_one_node_are_predicted() -> None:
    for seq_len in (32768, 262144):
        one = row("14b", "burst", seq_len)
        assert 0.88 < one.speed / one.predicted_speed() < 1.05


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    """All published rows compared with predictions."""
    return compare(published_rows(), shared_predictor().predict)


@pytest.mark.thorough
@pytest.mark.parametrize("figure", ["time", "peak"])
def test_median_error_of_published_figures_is_below_a_tenth(comparison: dict[str, Any], figure: str) -> None:
    assert max(comparison[f"median_{figure}_error"].values()) < 0.1


@pytest.mark.thorough
def test_published_methods_are_predicted_in_the_right_order(comparison: dict[str, Any]) -> None:
    assert comparison["orders"]["right"] >= 0.85 * comparison["orders"]["pairs"]


def test_every_peer_has_a_counterpart_that_can_be_configured() -> None:
    assert set(COUNTERPARTS) == set(PEERS)
    check_points(COUNTERPARTS.values(), ["causal"])
