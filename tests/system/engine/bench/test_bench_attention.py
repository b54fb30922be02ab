"""Measuring attention: what counts, in turn, what the slowest rank says, what is left of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from torch import Tensor

from engine.bench.attention import measure, timed_pass
from engine.bench.measure import turns
from engine.bench.spec import AttentionCell, HeadShape, RankSetup, Rounds

ROWS, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
CELL = AttentionCell(
    ("ring", "ring:kernel=aten_flash", "fpdt:chunk_tokens=8"),
    "full",
    ROWS,
    RankSetup(2, 2),
    HeadShape(HEADS, KV_HEADS, HEAD_DIM),
    Rounds(repeats=3),
)


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


def test_warm_up_calls_do_not_count() -> None:
    calls = list(turns("abc", Rounds(repeats=3, warmup=1)))
    assert [counts for counts, _ in calls] == [False] * 3 + [True] * 9


def test_each_round_starts_with_another_item() -> None:
    calls = list(turns("abc", Rounds(repeats=3, warmup=1)))
    rounds = [[item for _, item in calls[start : start + 3]] for start in range(0, 12, 3)]
    assert all(sorted(members) == ["a", "b", "c"] for members in rounds)
    assert {members[0] for members in rounds} == {"a", "b", "c"}


@pytest.fixture(scope="module")
def document(ranks: Pools) -> dict[str, Any]:
    """The results of CELL, measured on two ranks."""
    measured: dict[str, Any] = ranks(2).run(measure, CELL, torch.device("cpu"))[0]
    return measured


def test_unavailable_kernel_is_skipped_with_its_reason(document: dict[str, Any]) -> None:
    ((name, reason),) = document["skipped"].items()
    assert name == "ring:kernel=aten_flash"
    assert reason.startswith("attention.kernel=aten_flash: no kernel")


def test_results_carry_their_settings(document: dict[str, Any]) -> None:
    chunks = document["results"][1]
    assert chunks["variant"] == "fpdt:chunk_tokens=8"
    assert chunks["mask"] == "full"
    assert chunks["seq_len"] == ROWS
    assert chunks["method"]["chunk_tokens"] == 8


def test_ring_reports_the_bytes_of_its_plan(document: dict[str, Any]) -> None:
    """K,V once in forward; in backward K,V once and the fp32 dK,dV back to their owner."""
    block = (ROWS // 2) * 2 * KV_HEADS * HEAD_DIM * 2
    sent = {"intra": 0, "inter": 8 * block, "host": 0, "forward": 2 * block, "backward": 6 * block}
    assert document["results"][0]["sent_bytes_all_ranks"] == sent


def test_chunked_attention_reports_bytes_moved_to_the_host(document: dict[str, Any]) -> None:
    assert document["results"][1]["sent_bytes_all_ranks"]["host"] > 0


def test_time_ratio_is_relative_to_the_first_result(document: dict[str, Any]) -> None:
    ring, chunks = document["results"]
    assert ring["time_over_first"] == 1.0
    assert chunks["time_over_first"] == chunks["total"]["median_s"] / ring["total"]["median_s"]


def test_timings_are_ordered(document: dict[str, Any]) -> None:
    for row in document["results"]:
        for name in ("forward", "backward", "total", "without_communication"):
            timing = row[name]
            assert 0 < timing["min_s"] <= timing["median_s"] <= timing["max_s"]
            assert timing["repeats"] == 3


def test_total_time_is_within_its_bounds(document: dict[str, Any]) -> None:
    for row in document["results"]:
        longer = max(row["forward"]["min_s"], row["backward"]["min_s"])
        assert longer < row["total"]["max_s"] <= row["forward"]["max_s"] + row["backward"]["max_s"] + 1e-9


def test_exposed_communication_is_the_total_minus_compute_alone(document: dict[str, Any]) -> None:
    for row in document["results"]:
        assert row["exposed_s"] == row["total"]["median_s"] - row["without_communication"]["median_s"]
