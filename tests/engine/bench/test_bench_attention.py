"""Measuring attention: what counts, in turn, what the slowest rank says, what is left of it."""

from __future__ import annotations

import time
from typing import Any

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


def test_turns_are_fair_and_warm_up_does_not_count() -> None:
    calls = list(turns("abc", Rounds(repeats=3, warmup=1)))
    assert [counts for counts, _ in calls] == [False] * 3 + [True] * 9
    rounds = [[item for _, item in calls[start : start + 3]] for start in range(0, 12, 3)]
    assert all(sorted(members) == ["a", "b", "c"] for members in rounds)
    assert {members[0] for members in rounds} == {"a", "b", "c"}


def test_what_is_left_are_seconds_bytes_and_reasons(ranks: Pools) -> None:
    """A ring sends K,V once forward; in backward K,V once and the other's fp32 dK,dV home. Chunks go to the host."""
    document, _ = ranks(2).run(measure, CELL, torch.device("cpu"))
    ring, chunks = document["results"]
    assert {name: reason.split(": no kernel")[0] for name, reason in document["skipped"].items()} == {
        "ring:kernel=aten_flash": "attention.kernel=aten_flash"
    }
    block = (ROWS // 2) * 2 * KV_HEADS * HEAD_DIM * 2
    sent = {"intra": 0, "inter": 8 * block, "host": 0, "forward": 2 * block, "backward": 6 * block}
    assert ring["sent_bytes_all_ranks"] == sent
    assert chunks["sent_bytes_all_ranks"]["host"] > 0
    assert ring["time_over_first"] == 1.0
    assert chunks["time_over_first"] == chunks["total"]["median_s"] / ring["total"]["median_s"]
    for row in (ring, chunks):
        timings: dict[str, Any] = {name: row.pop(name) for name in ("forward", "backward", "total")}
        alone = row.pop("without_communication")
        for timing in (*timings.values(), alone):
            assert 0 < timing["min_s"] <= timing["median_s"] <= timing["max_s"]
            assert timing["repeats"] == 3
        total, forward, backward = (timings[name]["max_s"] for name in ("total", "forward", "backward"))
        assert max(timings["forward"]["min_s"], timings["backward"]["min_s"]) < total <= forward + backward + 1e-9
        assert row["exposed_s"] == timings["total"]["median_s"] - alone["median_s"]
    shown = {"variant", "mask", "seq_len", "sent_bytes_all_ranks", "exposed_s", "method", "time_over_first"}
    assert set(ring) == set(chunks) == shown
    assert chunks["variant"] == "fpdt:chunk_tokens=8"
    assert chunks["mask"] == "full"
    assert chunks["seq_len"] == ROWS
    assert chunks["method"]["preset"] == "fpdt"
    assert chunks["method"]["chunk_tokens"] == 8
    assert {"date", "device", "cores", "threads", "load", "platform", "python", "torch"} == set(document["environment"])
