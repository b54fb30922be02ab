"""Figures of a whole run from the rows of metrics.jsonl. Pure, no torch: trainer and report share it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.config.settings import RunConfig, config_fingerprint
from engine.planning.memory.policy import policy_name

WARMUP_STEPS = 3  # of a run, which medians leave out; the last step counts always
# A median with its quartiles and the number of steps behind it.
MEDIANS = (
    "step_time_s",
    "batch_wait_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "mfu",
    "mfu_full_attention",
    "hfu",
    "comm_intra_bytes",
    "comm_inter_bytes",
    "comm_exposed_s",
    "comm_exposed_share",
    "offload_bytes",
    "offload_copy_s",
    "offload_exposed_s",
)
# Largest value over all steps; each row already holds the largest over ranks.
MAXIMA = ("peak_memory_bytes", "peak_memory_reserved_bytes", "peak_tensor_bytes", "peak_host_bytes")
# The last value that was measured; of loss it is called final_train_loss.
FINALS = ("loss", "validation_loss", "validation_bits_per_byte", "needle_accuracy", "needle_gain")
FINAL_TABLES = ("validation_loss_by_position", "needle_by_depth")  # which only runs that measured them have


def summarise(rows: Iterable[Mapping[str, Any]], warmup_steps: int = WARMUP_STEPS) -> dict[str, Any]:
    """{steps, tokens_total, dropped_steps, X, X_p25, X_p75, X_n for each of MEDIANS, maxima, final figures}.

    What is unknown is None.

    X is the median over the optimizer steps after the first `warmup_steps`, at least of the last one. When a step
    appears twice (a run that was taken up again), the later row counts. Without rows n is 0, X is None.
    """
    latest = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    ordered = [latest[step] for step in sorted(latest)]
    left_out = max(0, min(warmup_steps, len(ordered) - 1))
    measured = ordered[left_out:]
    summary: dict[str, Any] = {
        "steps": ordered[-1]["step"] if ordered else 0,
        "tokens_total": sum(tokens) if (tokens := _numbers(ordered, "tokens")) else None,
        "dropped_steps": sum(row.get("dropped") is not None for row in ordered),
        "warmup_metric_steps": left_out,
    }
    for name in MEDIANS:
        summary.update(spread(name, _numbers(measured, name)))
    for name in MAXIMA:
        summary[name] = max(_numbers(ordered, name), default=None)
    for name in FINALS:
        title = "final_train_loss" if name == "loss" else f"final_{name}"
        summary[title] = next(iter(reversed(_numbers(ordered, name))), None)
    for name in FINAL_TABLES:
        tables = [table for row in ordered if isinstance(table := row.get(name), list)]
        summary |= {f"final_{name}": tables[-1]} if tables else {}
    return summary


def config_facts(config: RunConfig) -> dict[str, Any]:
    """What the configuration alone says about a run: {config_fingerprint, attention_preset, memory_policy, ...}."""
    return {
        "config_fingerprint": config_fingerprint(config),
        "model": config.model.name,
        "attention_preset": config.attention.preset,
        "memory_policy": policy_name(config.memory),
        "seq_len": config.train.seq_len,
        "compute_dtype": config.train.compute_dtype,
        "world_size": config.cluster.world_size,
    }


def predicted_facts(memory_plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the run's memory_plan.json predicted, under the keys of summary.json; empty when it predicted nothing.

    predicted_peak_bytes    that one rank's device holds at most: to be read beside peak_memory_bytes on CUDA and beside
                            peak_tensor_bytes on a CPU
    predicted_step_time_s   of a step, beside step_time_s; by the rates of predicted_step_machine
    """
    plan, facts = memory_plan or {}, dict[str, Any]()
    if plan.get("device_peak_bytes") is not None:
        facts["predicted_peak_bytes"] = plan["device_peak_bytes"]
    step = plan.get("step_time")
    if isinstance(step, Mapping):
        facts["predicted_step_time_s"] = step.get("seconds")
        facts["predicted_step_machine"] = step.get("machine")
    return facts


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """{name: median, name_p25, name_p75, name_n}; quartiles by linear interpolation over the measured values."""
    quartiles: Sequence[float | None] = [float(values[0]) if values else None] * 3
    if len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
    low, middle, high = quartiles
    return {name: middle, f"{name}_p25": low, f"{name}_p75": high, f"{name}_n": len(values)}


def _numbers(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
