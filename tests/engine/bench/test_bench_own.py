"""The runs whose predicted steps are compared with measured ones: legal ones."""

from __future__ import annotations

import pytest

from benchmarks.bench_own import CASES, COMMON, Case
from burst_cli.compose import compose


@pytest.mark.parametrize("case", [case for case in CASES if case.nodes == 1], ids=str)
def test_every_run_is_legal(case: Case) -> None:
    config = compose([*COMMON, *case.overrides]).config
    assert (config.cluster.world_size, config.train.seq_len) == (case.ranks, case.seq_len)
