"""The pool of ranks itself: results in order, failures named, hung ranks killed, next use works."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.ranks import MAX_WORKERS, Pools, RankFailedError


def sum_of_ranks(start: int) -> tuple[int, float]:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("words before the fault")
        raise ValueError("rank 1 broke")
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def process_id() -> int:
    return os.getpid()


def return_a_function() -> Any:
    return lambda: None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_runs_the_function_in_one_group(ranks: Pools) -> None:
    assert ranks(2).run(sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_a_pool_is_reused(ranks: Pools) -> None:
    assert ranks(2).run(process_id) == ranks(2).run(process_id)


def test_a_failing_rank_is_named_with_its_traceback_and_output(ranks: Pools) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 raised") as caught:
        ranks(2).run(fail_on_rank_1)
    assert caught.value.rank == 1
    assert "ValueError: rank 1 broke" in str(caught.value)
    assert "in fail_on_rank_1" in str(caught.value)
    assert "words before the fault" in str(caught.value)
    assert ranks(2).run(sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hanging_rank_is_killed_and_its_stack_shown(ranks: Pools) -> None:
    workers = ranks(2).run(process_id)
    with pytest.raises(RankFailedError, match="rank 0 of 2 had not answered") as caught:
        ranks(2).run(hang_on_rank_0, timeout_s=5.0)  # it is there by then, also on a machine that is busy
    assert "in hang_on_rank_0" in str(caught.value)
    assert not any(is_alive(pid) for pid in workers)
    assert ranks(2).run(sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_a_dead_rank_is_reported(ranks: Pools) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 died with exit code 7"):
        ranks(2).run(die_on_rank_1)


def test_a_result_that_cannot_travel_is_an_error(ranks: Pools) -> None:
    with pytest.raises(RankFailedError, match="pickle"):
        ranks(1).run(return_a_function)


def test_the_pool_used_least_recently_is_closed_when_there_are_too_many_workers() -> None:
    pools = Pools()
    first = pools(1)
    pools(2)
    pools(1)
    assert pools(1) is first
    pools(MAX_WORKERS - 1)
    assert sorted(pools._pools) == [1, MAX_WORKERS - 1]
