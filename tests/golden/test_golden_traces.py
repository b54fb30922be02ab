"""What rank 0 of every preset sends, receives and computes on two nodes of two ranks: `burst plan --trace 0`."""

from __future__ import annotations

import pytest
from testkit.command_line import Burst
from testkit.golden import FOLDER, Golden

ON_FOUR_RANKS = ["exp=tiny", "train.seq_len=16", "--ranks", "4", "--nodes", "2", "--device", "cpu", "--trace", "0"]
CASES = {
    "burst_q": ["attention=burst", "attention.backward_circulates=q"],
    "burst_kv": ["attention=burst", "attention.backward_circulates=kv"],
    **{
        name: [f"attention={name}"]
        for name in (
            "ring",
            "striped",
            "burst_ulysses",
            "ulysses",
            "loongtrain",
            "usp",
            "megatron_cp",
            "megatron_allgather",
            "megatron_hierarchical",
            "fpdt",
            "alst",
        )
    },
    "single": ["attention=single", "parallel.cp_size=1", "parallel.dp_shard_size=4"],
    "megatron_tp": ["attention=megatron_tp", "parallel.tp_size=2", "parallel.cp_size=1", "parallel.dp_shard_size=2"],
    "window": ["attention=burst", "attention.mask=window", "attention.window_tokens=3"],
    "chunks": ["attention=fpdt", "attention.chunk_tokens=4", "train.seq_len=32"],
    "recompute": ["attention=burst", "memory=seq_fraction", "attention.backward_circulates=q"],
}


@pytest.mark.parametrize("case", CASES)
def test_trace_of_rank_0(case: str, burst: Burst, golden: Golden) -> None:
    result = burst("plan", *ON_FOUR_RANKS, *CASES[case])

    assert result.code == 0, result.err
    golden(f"traces/{case}.txt", result.out)


def test_docs_show_the_golden_trace_of_burst() -> None:
    passes = (FOLDER / "traces/burst_q.txt").read_text(encoding="utf-8").split("\n\n")[1:]
    docs = (FOLDER.parents[1] / "docs/attention.md").read_text(encoding="utf-8")

    for one in passes:
        steps = one.strip().split("\n", 1)[1]
        assert steps in docs, "docs/attention.md shows another trace than tests/golden/traces/burst_q.txt"
