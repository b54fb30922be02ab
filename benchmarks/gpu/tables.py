"""Tables of the parts: which columns a reader wants, and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.plan import Row

DASH = "-"
Column = tuple[str, Callable[[Row], str]]


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table."""
    heads = [name for name, _ in columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(cell(row) for _, cell in columns)} |" for row in rows]


def plain(key: str) -> Callable[[Row], str]:
    """The value as it is; integers with separators."""

    def cell(row: Row) -> str:
        value = row.get(key)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return DASH if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return cell


def number(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """A number in a format."""
    return lambda row: DASH if row.get(key) is None else format(row[key] * scale, form)


def rate(side: str) -> Callable[[Row], str]:
    """TFLOP/s and share of the peak."""

    def cell(row: Row) -> str:
        share = row.get(f"{side}_of_peak")
        words = "" if share is None else f" ({share:.0%})"
        return f"{_rate(row[f'{side}_tflops'])}{words}"

    return cell


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3g}"


def milliseconds(key: str) -> Callable[[Row], str]:
    """Seconds as ms."""
    return number(key, ".3g", 1e3)


def heads(row: Row) -> str:
    """Query heads and kv heads."""
    return f"{row['heads']}:{row['kv_heads']}"


def errors(row: Row) -> str:
    """The worst of the errors in blocks over that of one kernel."""
    ratios = [
        row[f"blocked_{n}_error"] / row[f"whole_{n}_error"]
        for n in ("out", "dq", "dk", "dv")
        if f"blocked_{n}_error" in row
    ]
    return f"{max(ratios):.2f}x" if ratios else DASH


def peaks(row: Row) -> str:
    """Measured peak, and over the predicted one."""
    ratio = row.get("measured_over_predicted")
    words = "no prediction" if ratio is None else f"{ratio:.3f} of predicted"
    return f"{row['peak_bytes'] / 1e9:.4g} GB, {words}"


def policy(row: Row) -> str:
    """The memory policy, and whether the whole model would fit with it."""
    return row["policy"] + ("" if row["policy_fits_whole_model"] else " (nothing fits the whole model)")


def step_seconds(row: Row) -> str:
    """Median, and whether the allocator took blocks of fixed size."""
    return f"{row['step_s']:.4g}" + ("" if row.get("expandable_segments", True) else " (no expandable segments)")


def full_attention(peak_flops_per_s: float | None) -> Callable[[Row], str]:
    """MFU as if nothing were masked."""

    def cell(row: Row) -> str:
        if peak_flops_per_s is None:
            return DASH
        return f"{row['convention_full_attention'] * 1e12 / peak_flops_per_s:.1%}"

    return cell


def columns_of(document: Mapping[str, Any]) -> dict[str, list[Column]]:
    """Columns by part; a part that is not here is shown with all its keys."""
    peak = document["peak"]["flops_per_s"]
    mfu: list[Column] = [
        ("tokens/s", number("tokens_per_s", ",.0f")),
        ("MFU", number("model_of_peak", ".1%")),
        ("MFU, full attention", full_attention(peak)),
        ("HFU", number("hardware_of_peak", ".1%")),
    ]
    return {
        "tiles": [
            ("kernel", plain("kernel")),
            ("tokens", plain("seq_len")),
            ("heads", heads),
            ("mask", plain("mask")),
            ("forward ms", milliseconds("forward_s")),
            ("forward TFLOP/s (of peak)", rate("forward")),
            ("backward ms", milliseconds("backward_s")),
            ("backward TFLOP/s (of peak)", rate("backward")),
        ],
        "blocked": [
            ("what", plain("kind")),
            ("preset", plain("preset")),
            ("circulates", plain("circulates")),
            ("ranks", plain("ranks")),
            ("block tokens", plain("block_tokens")),
            ("heads", heads),
            ("forward", number("forward_share", ".1%")),
            ("backward", number("backward_share", ".1%")),
            ("both", number("total_share", ".1%")),
            ("forward TFLOP/s", rate("blocked_forward")),
            ("backward TFLOP/s", rate("blocked_backward")),
            ("error over one kernel's", errors),
        ],
        "loss": [
            ("loss", plain("kind")),
            ("vocabulary", plain("vocab_size")),
            ("rows", plain("rows")),
            ("ms", milliseconds("total_s")),
            ("of the roofline", number("of_roofline", ".1%")),
            ("extra peak GB", number("extra_bytes", ".3f", 1e-9)),
            ("gradient of hidden GB", number("hidden_gradient_bytes", ".3f", 1e-9)),
        ],
        "parity": [
            ("preset", plain("preset")),
            ("ranks", plain("ranks")),
            ("dtype", plain("dtype")),
            ("loss differs by", number("loss_difference", ".1e")),
            ("worst gradient by", number("gradient_difference", ".1e")),
            ("limit", number("limit", ".0e")),
        ],
        "steps": [
            ("layers", plain("layers")),
            ("tokens", plain("seq_len")),
            ("policy", policy),
            ("step s", step_seconds),
            *mfu,
            ("peak", peaks),
            ("pinned host GB", number("peak_host_bytes", ".3g", 1e-9)),
        ],
        "derived": [
            ("layers", plain("layers")),
            ("tokens", plain("seq_len")),
            ("from", plain("from")),
            ("policy", policy),
            ("layer s", number("layer_s", ".4g")),
            ("step s", step_seconds),
            *mfu,
        ],
    }
