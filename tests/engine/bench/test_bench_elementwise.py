"""Every kernel is measured against torch; without a GPU torch's side alone is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.elementwise import TINY, bench_elementwise

CPU = torch.device("cpu")
KERNELS = {
    *("rms_norm", "rms_norm backward", "add_rms_norm", "add_rms_norm backward", "rope", "rope backward"),
    *("swiglu", "swiglu backward", "cross_entropy", "cross_entropy with gradient"),
    *("merge_tile", "add_kv", "backward_stats", "surrogate_out"),
}


def test_a_cpu_measures_torch_alone() -> None:
    rows = bench_elementwise(CPU)
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        assert set(row["seconds"]) == {"torch"}
        assert row["gb_per_s"]["torch"] == pytest.approx(row["moved_bytes"] / row["seconds"]["torch"] / 1e9)
        assert row["speedup"] is None


def test_a_size_that_cannot_be_had_is_a_row_with_its_error() -> None:
    rows = bench_elementwise(CPU, replace(TINY, head_dim=7))
    failed = {row["kernel"] for row in rows if "error" in row}
    assert failed == {"rope", "rope backward"}
