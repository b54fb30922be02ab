"""Rows are completed here: shares of the peak, and figures that no device can reach become errors."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.plan import Row
from engine.predict.machine import Peak
from engine.training.peak import above_peak_warning

SUFFIX = "_tflops"


def complete_rows(rows: Sequence[Row], label: str, peak: Peak) -> list[Row]:
    """Rows with label, status and, for every X_tflops, X_of_peak; one above the peak has status `above peak`.

    A row that brings an error and no status failed.
    """
    return [_complete(row, label, peak) for row in rows]


def _complete(row: Row, label: str, peak: Peak) -> Row:
    done: Row = {"label": label, "status": "failed" if row.get("error") else "measured", "error": None} | row
    problems = []
    for key, value in row.items():
        if not key.endswith(SUFFIX) or value is None or peak.flops_per_s is None:
            continue
        name = key.removesuffix(SUFFIX)
        done[f"{name}_of_peak"] = value * 1e12 / peak.flops_per_s
        warning = above_peak_warning(name, value * 1e12, peak)
        if warning:
            problems.append(f"measurement error: {warning}")
    if problems and done["status"] == "measured":
        done["status"], done["error"] = "above peak", "; ".join(problems)
    return done


def failed_row(label: str, error: str) -> Row:
    """A measurement that gave nothing."""
    return {"label": label, "status": "failed", "error": error}


def skipped_row(label: str, reason: str) -> Row:
    """A measurement that was not tried."""
    return {"label": label, "status": "skipped", "error": reason}
