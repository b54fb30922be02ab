"""Measuring attention: what counts, what travels, what the slowest rank says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from torch import Tensor

from engine.attention.mask import Mask
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.presets import resolve_attention
from engine.attention.topology import Topology
from engine.bench.attention import timed_pass
from engine.bench.layers import without_compute
from engine.bench.measure import measure_in_turn, summarise, turns
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import AttentionCell, HeadShape, LossCell, RankSetup, Rounds

ROWS, HEADS, KV_HEADS, WIDTH = 64, 4, 2, 16
PARTS = ("forward", "backward")


def cell(measured: Any) -> AttentionCell:
    variants = ("ring", "ring:layout=striped", "burst:backward_circulates=q", "ring:kernel=aten_flash")
    shape = HeadShape(HEADS, KV_HEADS, WIDTH)
    return AttentionCell(measured, variants, "full", ROWS, RankSetup(ranks=2), shape, Rounds(repeats=3, warmup=0))


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Results of both kinds of measurement over real processes."""
    program = RankProgram("engine.bench.attention")
    return {kind: measure_cell(cell(kind), program, cell(kind).setup) for kind in ("attention", "exchange")}


def test_sent_bytes_follow_the_formulas(measured: dict[str, Any]) -> None:
    """2 ranks, full mask: each sends K,V once forward; in backward K,V once and the other's fp32 dK,dV home."""
    block = (ROWS // 2) * 2 * KV_HEADS * WIDTH * 2
    for kind in ("attention", "exchange"):
        for row in measured[kind]["results"][:2]:
            sent = row["sent_bytes_all_ranks"]
            assert (sent["forward"], sent["backward"]) == (2 * block, 2 * (block + 2 * block))
            assert (sent["intra"], sent["inter"]) == (sent["forward"] + sent["backward"], 0)


def test_the_exchange_alone_moves_the_same_bytes_as_attention(measured: dict[str, Any]) -> None:
    sent = {kind: [row["sent_bytes_all_ranks"] for row in measured[kind]["results"]] for kind in measured}
    assert sent["attention"] == sent["exchange"]


def test_rows_hold_times_of_every_repeat(measured: dict[str, Any]) -> None:
    for row in measured["attention"]["results"]:
        for part in (*PARTS, "total", "without_communication"):
            timing = row[part]
            assert timing["repeats"] == 3
            assert 0 < timing["min_s"] <= timing["median_s"] <= timing["max_s"]
        assert row["exposed_s"] == row["total"]["median_s"] - row["without_communication"]["median_s"]
    assert measured["attention"]["results"][0]["time_over_first"] == 1.0


def test_exchange_rows_hold_the_speed_of_a_rank(measured: dict[str, Any]) -> None:
    for row in measured["exchange"]["results"]:
        for part in PARTS:
            mega_bytes = row["sent_bytes_all_ranks"][part] / 2 / 1e6
            assert row[part]["mb_per_s_per_rank"] == pytest.approx(mega_bytes / row[part]["median_s"])


def test_a_variant_that_its_ranks_refuse_is_skipped_with_the_reason(measured: dict[str, Any]) -> None:
    result = measured["attention"]
    assert len(result["results"]) == 3
    assert "cuda" in result["skipped"]["ring:kernel=aten_flash"]


def test_emptied_plans_keep_every_transfer_and_nothing_else() -> None:
    config = cell("exchange").run_config("burst:backward_circulates=q")
    method = resolve_attention(config, Topology(1, 2))
    mask = Mask(ROWS, causal=False)
    blocks = divide_sequence(method, ROWS, [mask])
    plan = plan_method(method, mask, blocks, 0).backward.ranks[0]
    empty = without_compute(plan)
    assert list(empty.transfers()) == list(plan.transfers()) != []
    assert [step.wait for step in empty.steps] == [step.wait for step in plan.steps]
    assert list(plan.tiles())
    assert not any(step.pre or step.tiles or step.after for step in empty.steps)


def slow_on_rank_1(seconds: float, passes: int) -> list[dict[str, float]]:
    import torch.distributed as dist

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time.sleep(seconds if dist.get_rank() == 1 else 0.0)
        return q + k + v

    return [timed_pass(attention, [torch.ones(2)] * 4, torch.device("cpu")) for _ in range(passes)]


def test_the_slowest_rank_counts(ranks: Pools) -> None:
    for passes in ranks(2).run(slow_on_rank_1, 0.2, 3):
        assert all(min(times["forward"], times["total"]) >= 0.2 for times in passes)
        # The best of several: a machine that is busy with something else may slow any one of them.
        assert min(times["backward"] for times in passes) < 0.2


def test_turns_are_fair_and_warm_up_does_not_count() -> None:
    calls = list(turns("abc", Rounds(repeats=3, warmup=1)))
    assert [counts for counts, _ in calls] == [False] * 3 + [True] * 9
    rounds = [[item for _, item in calls[start : start + 3]] for start in range(0, 12, 3)]
    assert all(sorted(members) == ["a", "b", "c"] for members in rounds)
    assert {members[0] for members in rounds} == {"a", "b", "c"}


def test_measuring_in_turn_leaves_warm_up_out() -> None:
    calls: list[str] = []
    pauses, now_s = iter([0.05, 0.0, 0.0]), [0.0]

    def slow_first() -> None:
        calls.append("slow first")
        now_s[0] += next(pauses)

    rounds = Rounds(repeats=2, warmup=1)
    timings = measure_in_turn({"slow first": slow_first}, torch.device("cpu"), rounds, clock=lambda: now_s[0])
    assert len(calls) == 3
    assert timings["slow first"].max_s < 0.05


def test_summary_is_median_and_spread() -> None:
    timing = summarise([3.0, 1.0, 10.0])
    assert (timing.median_s, timing.min_s, timing.max_s, timing.repeats) == (3.0, 1.0, 10.0, 3)


def test_loss_needs_less_memory_fused_and_leaves_plain_out_above_its_limit() -> None:
    losses = LossCell((256, 512), 16, 1024, "float32", 64, 256, 1, Rounds(1, 0))
    result = measure_cell(losses, RankProgram("engine.bench.loss"), RankSetup(ranks=1))
    short, long = result["results"]
    assert short["peak_extra_bytes"]["plain"] >= 256 * 1024 * 4 > short["peak_extra_bytes"]["fused"]
    assert set(long["timings"]) == {"fused"}
    assert "time_ratio" not in long
