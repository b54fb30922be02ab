"""Rates from first principles, figures that are unknown, the largest over ranks, and which steps are traced."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.metered import meter_of, metered_rows
from testkit.ranks import Pools
from testkit.tiny_training import TINY_MODEL, own_part, random_batches, start_run, tiny_config
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from engine.distributed.collectives import max_over_ranks
from engine.distributed.waits import WaitClock
from engine.planning.methods.layers import AttendedPairs
from engine.predict.flops import Flops
from engine.predict.machine import Peak
from engine.training.metrics import PeakMemory, StepCost, StepProfiler, peak_pinned_bytes
from engine.training.train_step import StepResult

FLOPS = Flops(4 * 10**12, 6 * 10**12, 5 * 10**12)
BATCH = random_batches(0, sequences=1)


@pytest.mark.parametrize(("peak", "shares"), [(2e12, (0.25, 0.375, 0.3125)), (None, (None, None, None))])
def test_rates_follow_from_the_seconds_of_a_step(peak: float | None, shares: tuple[Any, ...]) -> None:
    cost = StepCost(TINY_MODEL, seq_len=250, sequences=4, recomputed_matrices=0, peak=Peak(peak, "test"))
    speeds = {"tokens_per_s": 500.0, "tokens_per_s_per_device": 125.0, "model_tflops_per_device": 0.5}
    expected = speeds | dict(zip(("mfu", "mfu_full_attention", "hfu"), shares, strict=True))
    assert cost.rates(FLOPS, 2.0, 4) == expected


def largest(values: list[list[float | None]]) -> list[float | None]:
    return max_over_ranks(values[dist.get_rank()], torch.device("cpu"))


def test_maxima_over_ranks_are_none_where_no_rank_has_a_value(ranks: Pools) -> None:
    found = ranks(2).run(largest, [[1.0, None, None, 2.0**50], [3.0, 0.0, None, 5.0]])
    assert found == [[3.0, 0.0, None, 2.0**50]] * 2


def measured_step(stop_rank: int) -> tuple[dict[str, Any], bool, int]:
    """(row, stop, own bytes sent) of one measured step of a context-parallel run on two nodes."""
    run = start_run(tiny_config(attention={"preset": "burst"}, cluster={"topology_nodes": 2}))
    meter, batch = meter_of(run), own_part(BATCH, run.mesh)
    run.train_step(0, batch)  # bytes of an earlier step must not count
    meter.start()
    result = run.train_step(1, batch)
    sent = run.attention.traffic().inter_bytes
    return *meter.finish(2, result, stop=run.mesh.rank == stop_rank), sent


def test_all_ranks_agree_on_a_measured_step(ranks: Pools) -> None:
    results = ranks(2).run(measured_step, stop_rank=1)
    row = results[0][0]
    assert row == results[1][0]
    assert row["step_time_s"] > 0
    assert row["comm_inter_bytes"] == max(sent for _, _, sent in results) > 0
    assert row["comm_intra_bytes"] == 0  # one rank per node: measured, and nothing was sent
    assert row["comm_exposed_s"] is None
    assert all(isinstance(row[name], int | None) for name in row if name.endswith("_bytes"))
    assert all(stop for _, stop, _ in results)


def warnings(utilisations: list[float | None]) -> list[str | None]:
    """Of rows with these shares of the peak."""
    meter = meter_of(start_run(tiny_config()))
    return [meter.warning({"hfu": share}) for share in utilisations]


def test_a_step_faster_than_the_device_is_warned_of(ranks: Pools) -> None:
    *fine, warning = ranks(1).run(warnings, [None, 1.0, 1.01])[0]
    assert fine == [None, None]
    assert "hardware FLOPs is 0.00101 TFLOP/s per device, above the peak of 0.001 (test)" in warning


@pytest.mark.parametrize(("policy", "store"), [("full", "device"), ("attn_out", "host")])
def test_the_first_steps_of_a_cpu_run_count_their_tensors(ranks: Pools, policy: str, store: str) -> None:
    config = tiny_config(memory={"activation_checkpoint": policy, "activation_store": store})
    rows = ranks(1).run(metered_rows, config, BATCH, 3, tracked_steps=2)[0]
    assert rows[1]["peak_tensor_bytes"] > rows[0]["peak_tensor_bytes"]  # the optimizer's state is there from its start
    kept_bytes = (
        TINY_MODEL.num_layers * 30 * 4 * (2 * TINY_MODEL.hidden_size + TINY_MODEL.num_heads)
    )  # x, out, lse: fp32
    kept_bytes *= store == "host"
    assert [row["peak_host_bytes"] for row in rows] == [kept_bytes, kept_bytes, None]
    assert rows[2]["peak_tensor_bytes"] is None


def fail_in_a_step(memory: PeakMemory) -> None:
    with memory.count_tensors():
        raise ValueError(f"failed after {torch.zeros(10).numel()}")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_failed_step_leaves_no_tracker_active(device: str) -> None:
    memory = PeakMemory(torch.device(device), tracked_steps=1)
    with pytest.raises(ValueError, match="failed"):
        fail_in_a_step(memory)
    assert not _get_current_dispatch_mode_stack()
    peaks = memory.read()
    expected = (None, peak_pinned_bytes()) if device == "cuda" else (40, 0)
    assert (peaks["peak_tensor_bytes"], peaks["peak_host_bytes"]) == expected


@pytest.mark.parametrize("store", ["host", "device"])
def test_offloaded_bytes_are_counted(ranks: Pools, store: str) -> None:
    memory = {"activation_checkpoint": "full", "activation_store": store}
    config = tiny_config(attention={"preset": "burst"}, memory=memory)
    row = ranks(2).run(metered_rows, config, BATCH, 2)[0][1]
    inputs = config.model.num_layers * 16 * config.model.hidden_size * 4  # 30 tokens in blocks of 16, fp32
    assert row["offload_bytes"] == (2 * inputs if store == "host" else None)  # there and back
    assert row["offload_copy_s"] is None
    assert row["offload_exposed_s"] is None
    assert row["comm_exposed_s"] is None


def waits_in_steps() -> list[float]:
    """What this rank waited in a step without waits, but with some before it; in a step that has some; for batches."""
    waits, found = WaitClock(), []
    meter = meter_of(start_run(tiny_config()), waits=waits)

    def wait() -> None:
        with waits.waiting("all_reduce"):
            time.sleep(0.01)

    for acts in ((wait, meter.start), (meter.start, wait)):  # before a step, as a validation does, and in one
        for act in acts:
            act()
        meter.have_batches()
        row, _ = meter.finish(1, StepResult(1.0, 1.0, 1e-3, AttendedPairs(0, 0)))
        found.append(row["rank_wait_s_max"])
    return [*found, row["batch_wait_s"]]


def test_what_is_waited_between_steps_belongs_to_no_step(ranks: Pools) -> None:
    ((before, inside, for_batches),) = ranks(1).run(waits_in_steps)
    assert before == 0.0
    assert inside >= 0.01
    assert 0.01 <= for_batches < 60.0


@pytest.mark.parametrize(
    ("profile", "steps", "traced"),
    [("2:4", 5, ["step 2", "step 3"]), ("2:9", 3, ["step 2", "step 3"]), (None, 2, None)],
    ids=["whole", "cut short", "none"],
)
def test_the_trace_holds_exactly_the_chosen_steps(
    tmp_path: Path, profile: str | None, steps: int, traced: list[str] | None
) -> None:
    profiler, path = StepProfiler(profile, tmp_path / "profile", rank=3), tmp_path / "profile" / "rank0003.json"
    for step in range(1, steps + 1):
        with profiler.step(step):
            torch.ones(4).sum()
    assert path.exists() == (profile == "2:4")
    profiler.close()
    events = json.loads(path.read_text())["traceEvents"] if path.exists() else []
    names = {event["name"] for event in events if str(event.get("name")).startswith("step ")}
    assert (sorted(names) or None) == traced
    assert any(event["name"] == "[memory]" for event in events) == (traced is not None)
