"""Rates from first principles, figures that are unknown, and the largest over ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import TINY_MODEL, own_part, random_batches, start_run, tiny_config
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from engine.config.settings import RunConfig
from engine.parallel.collectives import max_over_ranks
from engine.parallel.waits import WaitClock
from engine.planning.sequence.layers import AttendedPairs
from engine.planning.time.flops import Flops
from engine.planning.time.machine import Peak
from engine.training.metrics import StepCost, StepMeter, TensorMemory, peak_pinned_bytes
from engine.training.train_step import StepResult

COST = StepCost(TINY_MODEL, seq_len=250, sequences=4, recomputed_matrices=0, peak=Peak(2e12, "test"))
FLOPS = Flops(4 * 10**12, 6 * 10**12, 5 * 10**12)


def test_rates_are_per_second_per_device_and_against_the_peak() -> None:
    assert COST.rates(FLOPS, 2.0, 4) == {
        "tokens_per_s": 500.0,
        "tokens_per_s_per_device": 125.0,
        "model_tflops_per_device": 0.5,
        "mfu": 0.25,
        "mfu_full_attention": 0.375,
        "hfu": 0.3125,
    }
    rates = replace(COST, peak=Peak(None, "unknown device")).rates(FLOPS, 2.0, 4)
    assert (rates["mfu"], rates["mfu_full_attention"], rates["hfu"]) == (None, None, None)
    assert rates["tokens_per_s"] == 500.0


def largest(values: list[list[float | None]]) -> list[float | None]:
    import torch.distributed as dist

    return max_over_ranks(values[dist.get_rank()], torch.device("cpu"))


def test_maxima_over_ranks_keep_what_no_rank_knows_unknown(ranks: Pools) -> None:
    found = ranks(2).run(largest, [[1.0, None, None, 2.0**50], [3.0, 0.0, None, 5.0]])
    assert found == [[3.0, 0.0, None, 2.0**50]] * 2


def measured_step(stop_rank: int) -> tuple[dict[str, Any], bool, tuple[int, int]]:
    """(row, stop, own bytes sent) of one measured step of a context-parallel run on two nodes."""
    config = tiny_config(attention={"preset": "burst"}, cluster={"topology_nodes": 2})
    run = start_run(config)
    meter = StepMeter(run.mesh, run.attention, COST)
    batch = own_part(random_batches(0, sequences=1), run.mesh)
    run.train_step(0, batch)  # bytes of an earlier step must not count
    meter.start()
    result = run.train_step(1, batch)
    traffic = run.attention.traffic()
    row, stop = meter.finish(2, result, stop=run.mesh.rank == stop_rank)
    return row, stop, (traffic.intra_bytes, traffic.inter_bytes)


def test_a_measured_step_agrees_on_all_ranks_and_so_does_a_stop_asked_of_one(ranks: Pools) -> None:
    results = ranks(2).run(measured_step, stop_rank=1)
    rows = [row for row, _, _ in results]
    assert rows[0] == rows[1]
    assert rows[0]["step_time_s"] > 0
    assert rows[0]["comm_inter_bytes"] == max(sent[1] for _, _, sent in results) > 0
    assert rows[0]["comm_intra_bytes"] == 0  # one rank per node: measured, and nothing was sent
    assert rows[0]["comm_exposed_s"] is None
    assert all(stop for _, stop, _ in results)


def warnings(utilisations: list[float | None]) -> list[str | None]:
    """Of rows with these shares of the peak."""
    run = start_run(tiny_config())
    meter = StepMeter(run.mesh, run.attention, COST)
    return [meter.warning({"hfu": share}) for share in utilisations]


def test_a_step_faster_than_the_device_is_warned_of(ranks: Pools) -> None:
    *fine, warning = ranks(1).run(warnings, [None, 1.0, 1.01])[0]
    assert fine == [None, None]
    assert "hardware FLOPs is 2.02 TFLOP/s per device, above the peak of 2 (test)" in warning


def tracked_rows(policy: str, store: str) -> list[dict[str, Any]]:
    """Rows of three steps, the first two of which count their tensors."""
    config = tiny_config(memory={"activation_checkpoint": policy, "activation_store": store})
    run = start_run(config)
    meter = StepMeter(run.mesh, run.attention, COST, tracked_steps=2)
    batch = own_part(random_batches(0, sequences=1), run.mesh)
    rows = []
    for step in range(3):
        meter.start()
        with meter.count_tensors():
            result = run.train_step(step, batch)
        row, stop = meter.finish(step + 1, result)
        rows.append(row)
        assert not stop
    return rows


def test_the_first_steps_of_a_cpu_run_count_their_tensors(ranks: Pools) -> None:
    rows = ranks(1).run(tracked_rows, "full", "device")[0]
    assert rows[1]["peak_tensor_bytes"] > rows[0]["peak_tensor_bytes"]  # the optimizer's state is there from its start
    assert [row["peak_host_bytes"] for row in rows] == [0, 0, None]
    assert rows[2]["peak_tensor_bytes"] is None


def test_host_memory_of_a_cpu_run_counts_apart(ranks: Pools) -> None:
    row = ranks(1).run(tracked_rows, "attn_out", "host")[0][1]
    model = TINY_MODEL
    kept_bytes = model.num_layers * 30 * 4 * (2 * model.hidden_size + model.num_heads)  # x and out, and lse, fp32
    assert row["peak_host_bytes"] == kept_bytes


def test_the_tensors_of_a_gpu_run_are_its_allocators_to_count() -> None:
    memory = TensorMemory(torch.device("cuda"), steps=3)
    with memory.count():
        torch.zeros(10)
    assert memory.read() == (None, peak_pinned_bytes())


def test_a_step_that_fails_leaves_no_tracker_behind() -> None:
    memory = TensorMemory(torch.device("cpu"), steps=1)
    with pytest.raises(ValueError, match="failed"), memory.count():
        raise ValueError("failed")
    assert not _get_current_dispatch_mode_stack()


def offloaded(config: RunConfig) -> dict[str, Any]:
    """A row of metrics of the second step of a run on this rank."""
    run = start_run(config)
    meter = StepMeter(run.mesh, run.train_step.attention, COST, store=run.model.activation_store)
    batch = random_batches(0, sequences=1, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    for step in range(2):
        meter.start()
        result = run.train_step(step, own_part(batch, run.mesh))
        row, _ = meter.finish(step + 1, result)
    return row


@pytest.mark.parametrize("store", ["host", "device"])
def test_bytes_of_the_offload_are_counted_and_its_seconds_are_of_a_gpu_only(ranks: Pools, store: str) -> None:
    config = tiny_config(
        attention={"preset": "burst"}, memory={"activation_checkpoint": "full", "activation_store": store}
    )
    row = ranks(2).run(offloaded, config)[0]
    inputs = config.model.num_layers * 16 * config.model.hidden_size * 4  # 30 tokens in blocks of 16, fp32
    assert row["offload_bytes"] == (2 * inputs if store == "host" else None)  # there and back
    assert (row["offload_copy_s"], row["offload_exposed_s"], row["comm_exposed_s"]) == (None, None, None)


def waits_in_steps() -> list[float]:
    """What this rank waited in a step without waits, but with some before it; in a step that has some; for batches."""
    run, waits, found = start_run(tiny_config()), WaitClock(), []

    def wait() -> None:
        with waits.waiting("all_reduce"):
            time.sleep(0.01)

    meter = StepMeter(run.mesh, run.attention, COST, waits=waits)
    wait()  # as a validation does
    meter.start()
    found.append(meter.finish(1, StepResult(1.0, 1.0, 1e-3, AttendedPairs(0, 0)))[0]["rank_wait_s_max"])
    meter.start()
    wait()
    meter.have_batches()
    row, _ = meter.finish(2, StepResult(1.0, 1.0, 1e-3, AttendedPairs(0, 0)))
    return [*found, row["rank_wait_s_max"], row["batch_wait_s"]]


def test_what_is_waited_between_steps_belongs_to_no_step(ranks: Pools) -> None:
    ((before, inside, for_batches),) = ranks(1).run(waits_in_steps)
    assert before == 0.0
    assert inside >= 0.01
    assert 0.01 <= for_batches < 60.0
