"""Measuring attention: what counts, in turn, what the slowest rank says. What is measured: test_bench_command.py."""

from __future__ import annotations

import time

import torch
from testkit.ranks import Pools
from torch import Tensor

from engine.bench.attention import timed_pass
from engine.bench.layers import without_compute
from engine.bench.measure import turns
from engine.bench.spec import AttentionCell, HeadShape, RankSetup, Rounds
from engine.planning.methods.grid import divide_sequence
from engine.planning.methods.methods import plan_method
from engine.planning.methods.resolve import resolve_attention
from engine.planning.methods.topology import Topology
from engine.planning.sequence.mask import Mask

ROWS, VARIANT = 64, "burst:backward_circulates=q"


def test_emptied_plans_keep_every_transfer_and_nothing_else() -> None:
    shape, rounds = HeadShape(4, 2, 16), Rounds(repeats=3, warmup=0)
    cell = AttentionCell("exchange", (VARIANT,), "full", ROWS, RankSetup(ranks=2), shape, rounds)
    method = resolve_attention(cell.run_config(VARIANT), Topology(1, 2))
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
