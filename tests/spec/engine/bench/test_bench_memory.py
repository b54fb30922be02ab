"""The comparison of memory policies: what it counts, what it concludes, and a whole run at tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_memory import main
from benchmarks.memory.cell import MemoryCell
from benchmarks.memory.report import claims, complete_rows, loss_spread
from engine.config.settings import ModelConfig

LENGTH, RANKS, HEADS, WIDTH, LAYERS = 64, 2, 2, 16, 4
POLICIES = ("none", "full", "seq_fraction:saved_fraction=0.5", "attn_out", "attn_out_every:every_layers=4")
MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=HEADS * WIDTH,
    ffn_hidden_size=64,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=WIDTH,
)
CELL = MemoryCell(POLICIES, LENGTH, MODEL)


def measured_row(policy: str, seconds: list[float], *, kept: int = 1, again: float = 0.0) -> dict[str, Any]:
    """What a rank might have measured; `again` is a share of causal attention."""
    flops = CELL.attention_flops()
    timing = {"median_s": sorted(seconds)[len(seconds) // 2], "min_s": min(seconds), "max_s": max(seconds)}
    return {
        "policy": policy,
        "step": timing,
        "seconds": seconds,
        "losses": [1.0] * len(seconds),
        "peak_tensor_bytes": 1000,
        "kept_bytes": kept,
        "attention": {
            "forward_flops": flops,
            "recomputed_flops": int(again * flops),
            "recomputed_tiles": 3 if again else 0,
            "recomputed_s": timing,
        },
    }


@pytest.mark.thorough
def test_a_run_measures_every_policy_as_it_promises(tmp_path: Path) -> None:
    """Real training steps of two ranks."""
    sizes = ["--heads", str(HEADS), "--head-dim", str(WIDTH), "--layers", str(LAYERS), "--vocab-size", "256"]
    argv = ["--seq-lens", str(LENGTH), "--ranks", str(RANKS), "--repeats", "1", "--warmup", "1", *sizes]
    assert main([*argv, "--output", str(tmp_path / "memory.json")]) == 0
    document = json.loads((tmp_path / "memory.json").read_text())
    assert {"command", "date", "device", "cores", "torch", "python"} <= document["environment"].keys()
    rows, half = document["results"], LENGTH // 2
    assert tuple(row["policy"] for row in rows) == POLICIES
    again = dict.fromkeys(POLICIES, 0.0) | {"full": 1.0, POLICIES[2]: half * (half + 1) / (LENGTH * (LENGTH + 1))}
    assert {row["policy"]: row["attention"]["recomputed_share"] for row in rows} == pytest.approx(again)
    for row in rows:
        assert row["step"]["repeats"] == len(row["seconds"]) == 1
        assert row["peak_tensor_bytes"] > row["kept_bytes"] > 0
        assert row["attention"]["forward_share"] == 1.0
        if row["policy"] != "none":  # single numbers weigh more than 1% of what tiny layers keep
            assert row["kept_bytes"] == pytest.approx(row["promised_bytes"], abs=64)
    assert loss_spread(rows) < 1e-3
    first, second = rows[0]["losses"]
    assert first != second


def test_extra_time_is_taken_within_a_round() -> None:
    """A slow second round meets all policies; the medians alone would say 2.5 s for full."""
    rows = complete_rows(
        [
            measured_row("none", [1.0, 9.0, 1.0]),
            measured_row("full", [3.0, 11.0, 3.5]),
            measured_row("seq_fraction:saved_fraction=0.5", [1.5, 9.5, 1.5]),
        ],
        CELL,
        64,
    )
    assert [row["extra_s"] for row in rows] == [0.0, 2.0, 0.5]
    assert [row["extra_over_full"] for row in rows] == [0.0, 1.0, 0.25]


def test_claims_report_whether_they_are_met() -> None:
    x = 64 * 32 * 2 * LAYERS
    half = "seq_fraction:saved_fraction=0.5"
    rows = [
        measured_row("none", [1.0]),
        measured_row("full", [2.0], kept=x, again=1.0),
        measured_row(half, [1.6], kept=x, again=0.25),
        measured_row("attn_out", [1.1], kept=100 * x, again=0.5),
    ]
    found = {(claim.policy, claim.claim.split(" (")[0]): claim.met for claim in claims(complete_rows(rows, CELL, 64))}
    assert found == {
        ("full", "bytes kept over bytes promised"): True,
        (half, "bytes kept over bytes promised"): True,
        (half, "attention computed again, of causal"): True,
        (half, "extra time over that of full"): False,
        ("attn_out", "bytes kept over bytes promised"): False,
        ("attn_out", "attention tiles computed again"): False,
    }
