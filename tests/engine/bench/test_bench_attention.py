"""Measuring attention: what counts, in turn, what the slowest rank says. What is measured: test_bench_command.py."""

from __future__ import annotations

import time

import torch
from testkit.ranks import Pools
from torch import Tensor

from engine.bench.attention import timed_pass
from engine.bench.measure import turns
from engine.bench.spec import Rounds

ROWS, VARIANT = 64, "burst:backward_circulates=q"


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
