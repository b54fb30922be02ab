"""The offload benchmark runs anywhere, at a tiny size, and one failing case does not end the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.offload import bench_offload, default_sizes

CPU = torch.device("cpu")


def test_every_case_gives_rows_with_plain_values() -> None:
    sizes = default_sizes(CPU)
    threads = torch.get_num_threads()
    rows = bench_offload(CPU, sizes)
    assert not [row for row in rows if "error" in row]
    cases = [row["case"] for row in rows]
    assert cases == ["copy"] * 3 + ["overlap"] * 2 + ["store"] + ["adam"] * len(sizes.threads)
    assert all(isinstance(value, str | int | float | None) for row in rows for value in row.values())
    assert all(row["gb_per_s"] > 0 for row in rows if row["case"] in ("copy", "adam"))
    (store,) = (row for row in rows if row["case"] == "store")
    assert store["offload_bytes"] == 2 * sizes.layers * sizes.layer_bytes  # there and back
    assert (store["offload_exposed_s"], store["exposed_share"]) == (None, None)  # a CPU has no streams
    assert store["idle_wire_s"] > 0
    assert torch.get_num_threads() == threads


def test_a_case_that_fails_is_a_row_with_its_error() -> None:
    rows = bench_offload(CPU, replace(default_sizes(CPU), attention_rows=-1))
    (failed,) = (row for row in rows if "error" in row)
    assert failed["case"] == "overlap"
    assert "-1" in failed["error"]
    assert {row["case"] for row in rows} == {"copy", "overlap", "store", "adam"}


@pytest.mark.gpu
def test_on_a_gpu_copies_hide_behind_compute() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    small = replace(default_sizes(device), copy_bytes=1 << 28, layer_bytes=1 << 26, adam_parameters=1 << 22)
    rows = bench_offload(device, small)
    assert not [row for row in rows if "error" in row]
    assert min(row["hidden"] for row in rows if row["case"] == "overlap" and row["work"] == "matmul") > 0.5
    assert next(row for row in rows if row["case"] == "store")["exposed_share"] < 0.5
