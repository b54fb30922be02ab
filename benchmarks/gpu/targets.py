"""What the figures say about the goals: held, MISSED or not measured. Pure functions of the document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.plan import Row

Held = Literal["held", "MISSED", "not measured"]
MFU_GOALS = {131072: 0.48, 262144: 0.48, 524288: 0.44, 1048576: 0.40}
WHOLE_MODEL_TOKENS = 524288
MAX_DEVICE_BYTES, MAX_HOST_BYTES = 136e9, 120e9
PREDICTION_TOLERANCE = 0.05
# (smallest block, block below which it does not count) -> share of the whole kernel's speed
BLOCK_GOALS = ((16384, None, 0.95), (8192, 16384, 0.90))
MAX_ERROR_RATIO = 1.3
MAX_LOSS_BYTES, LEAST_ROOFLINE, LARGE_VOCABULARY = 3e9, 0.85, 128000
LEAST_ROOFLINE_ROWS = 8192


@dataclass(frozen=True)
class Verdict:
    """One goal with its limit in words, whether it was reached, and what was measured in words."""

    target: str
    verdict: Held
    measured: str


def judge(document: Mapping[str, Any]) -> list[Verdict]:
    """All goals, in the order of the tables. A row that is an error of measurement counts for none."""
    return [
        *_blocked(rows_of(document, "blocked")),
        *_loss(rows_of(document, "loss")),
        *_parity(document),
        *_mfu(rows_of(document, "steps", "derived")),
        *_whole_model(rows_of(document, "steps")),
        _prediction(rows_of(document, "steps")),
    ]


def rows_of(document: Mapping[str, Any], part: str, key: str = "rows") -> list[Row]:
    """The rows of a part that were measured."""
    found = [one for one in document.get("parts", ()) if one["name"] == part]
    return [row for one in found for row in one.get(key, ()) if row["status"] == "measured"]


def _blocked(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for least, below, goal in BLOCK_GOALS:
        shares = [
            row["total_share"]
            for row in rows
            if row["block_tokens"] >= least and (not below or row["block_tokens"] < below)
        ]
        more = "" if below else " and more"
        name = f"blocks of {least // 1024}K tokens{more}: at least {goal:.0%} of one kernel's speed, worst of all"
        found.append(_verdict(name, min(shares, default=None), lambda value, goal=goal: value >= goal, "{:.1%}"))
    ratios = [
        row[f"blocked_{name}_error"] / row[f"whole_{name}_error"]
        for row in rows
        if row["kind"] == "whole ring"
        for name in ("out", "dq", "dk", "dv")
    ]
    name = f"errors in blocks at most {MAX_ERROR_RATIO} times those of one kernel, worst of all"
    found.append(_verdict(name, max(ratios, default=None), lambda value: value <= MAX_ERROR_RATIO, "{:.2f} times"))
    return found


def _loss(rows: Sequence[Row]) -> list[Verdict]:
    fused = [row for row in rows if row["kind"] == "fused" and row["vocab_size"] >= LARGE_VOCABULARY]
    most = max((row["extra_bytes"] for row in fused), default=None)
    long = [row["of_roofline"] for row in fused if row["rows"] >= LEAST_ROOFLINE_ROWS]
    return [
        _verdict(
            f"fused loss, vocabulary 128K: extra peak at most {MAX_LOSS_BYTES / 1e9:.0f} GB at any length",
            most,
            lambda value: value <= MAX_LOSS_BYTES,
            "{:.3g} bytes",
        ),
        _verdict(
            f"fused loss, vocabulary 128K: at least {LEAST_ROOFLINE:.0%} of its products' roofline, worst of all",
            min(long, default=None),
            lambda value: value >= LEAST_ROOFLINE,
            "{:.1%}",
        ),
    ]


def _parity(document: Mapping[str, Any]) -> list[Verdict]:
    parts = [part for part in document.get("parts", ()) if part["name"] == "parity"]
    rows = [row for part in parts for row in part["rows"]]
    tried = [row for row in rows if row["status"] in ("measured", "failed", "above peak")]
    good = [row for row in tried if row["status"] == "measured"]
    words = f"{len(good)} of {len(tried)} comparisons"
    verdict: Held = "not measured" if not tried else "held" if len(good) == len(tried) else "MISSED"
    return [Verdict("every preset on several ranks of one device trains as one rank", verdict, words if tried else "-")]


def _mfu(derived: Sequence[Row]) -> list[Verdict]:
    by_length = {row["seq_len"]: row for row in derived}
    found = []
    for seq_len, goal in MFU_GOALS.items():
        share = by_length.get(seq_len, {}).get("model_of_peak")
        name = f"32 layers at {seq_len // 1024}K tokens, by slope: causal-aware MFU at least {goal:.0%}"
        found.append(_verdict(name, share, lambda value, goal=goal: value >= goal, "{:.1%}"))
    return found


def _whole_model(rows: Sequence[Row]) -> list[Verdict]:
    whole = [r for r in rows if r["layers"] == r["whole_layers"] and r["seq_len"] >= WHOLE_MODEL_TOKENS]
    limits = f"{MAX_DEVICE_BYTES / 1e9:.0f} GB device and {MAX_HOST_BYTES / 1e9:.0f} GB host"
    name = f"a step of all 32 layers at 512K tokens within {limits}"
    if not whole:
        return [Verdict(name, "not measured", "-")]
    device, host = (max(row[key] or 0 for row in whole) for key in ("peak_bytes", "peak_host_bytes"))
    words = f"{device / 1e9:.1f} GB device, {host / 1e9:.1f} GB pinned host"
    return [Verdict(name, "held" if device <= MAX_DEVICE_BYTES and host <= MAX_HOST_BYTES else "MISSED", words)]


def _prediction(rows: Sequence[Row]) -> Verdict:
    ratios = [row["measured_over_predicted"] for row in rows if row["measured_over_predicted"] is not None]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=None)
    name = f"peak of a step within {PREDICTION_TOLERANCE:.0%} of what `burst plan` predicts, worst of all"
    return _verdict(name, worst, lambda value: abs(value - 1) <= PREDICTION_TOLERANCE, "{:.3f} of it")


def _verdict(name: str, value: float | None, reached: Callable[[float], bool], form: str) -> Verdict:
    """A Verdict on one number; None: not measured."""
    if value is None:
        return Verdict(name, "not measured", "-")
    return Verdict(name, "held" if reached(value) else "MISSED", form.format(value))
