"""The runs whose predicted steps are compared with measured ones: as many as claimed, and legal."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.bench_own import CASES, COMMON, Case
from burst_cli.compose import compose


def test_there_are_twelve_runs_of_one_to_eight_ranks_four_of_them_between_nodes() -> None:
    assert len(set(CASES)) == 12
    assert Counter(case.nodes for case in CASES) == {1: 8, 2: 4}
    assert {case.ranks for case in CASES} == {1, 2, 4, 8}


@pytest.mark.parametrize("case", [case for case in CASES if case.nodes == 1], ids=str)
def test_every_run_is_legal(case: Case) -> None:
    config = compose([*COMMON, *case.overrides]).config
    assert (config.cluster.world_size, config.train.seq_len) == (case.ranks, case.seq_len)
