"""What the measured rows say: differences from the policy that keeps everything, promises kept or not, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.memory.cell import MemoryCell, read_memory
from engine.runs.figures import DASH, binary_bytes, percent

Row = dict[str, Any]
MAX_EXTRA_RATIO = 0.5  # of seq_fraction:saved_fraction=0.5 to full, in time beyond none
SHARE_TOLERANCE = 0.02
KEPT_TOLERANCE = 1.01  # a few scalars live besides what is kept


@dataclass(frozen=True)
class Claim:
    """Something that a policy promises, what was measured, and whether it held."""

    policy: str
    seq_len: int
    claim: str
    measured: float
    met: bool


def complete_rows(rows: Sequence[Row], cell: MemoryCell, local_tokens: int) -> list[Row]:
    """The rows of one length with what follows from them; `local_tokens` are a rank's rows.

    extra_s is time beyond policy `none`, by the median over rounds of the difference in the same round: what a busy
    machine does to one round hits both. null without `none`.
    """
    none = next((row for row in rows if read_memory(row["policy"]).activation_checkpoint == "none"), None)
    full = next((row for row in rows if read_memory(row["policy"]).activation_checkpoint == "full"), None)
    completed = []
    for row in rows:
        promised = cell.promised_bytes(row["policy"], local_tokens)
        counted = row["attention"] | {
            "forward_share": row["attention"]["forward_flops"] / cell.attention_flops(),
            "recomputed_share": row["attention"]["recomputed_flops"] / cell.attention_flops(),
        }
        extra = _extra(row, none)
        completed.append(
            {"seq_len": cell.seq_len, "attention_share_of_flops": cell.attention_share()}
            | row
            | {
                "attention": counted,
                "promised_bytes": promised,
                "kept_over_promised": row["kept_bytes"] / promised if promised else None,
                "extra_s": extra,
                "extra_over_full": _ratio(extra, _extra(full, none) if full else None),
                "time_over_none": row["step"]["median_s"] / none["step"]["median_s"] if none else None,
                "peak_over_none": row["peak_tensor_bytes"] / none["peak_tensor_bytes"] if none else None,
            }
        )
    return completed


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What every policy promises at every length; the promise about time only where it was measured longest."""
    longest = max(row["seq_len"] for row in rows)
    found = []
    for row in rows:
        memory = read_memory(row["policy"])
        kind, attention = memory.activation_checkpoint, row["attention"]
        wanted: list[tuple[str, float, bool]] = []
        if row["promised_bytes"]:
            kept = row["kept_over_promised"]
            wanted.append(("bytes kept over bytes promised", kept, kept <= KEPT_TOLERANCE))
        if kind in ("attn_out", "attn_out_every"):
            tiles = attention["recomputed_tiles"]
            wanted.append(("attention tiles computed again", tiles, tiles == 0))
        if kind == "seq_fraction":
            share, ideal = attention["recomputed_share"], (1.0 - memory.saved_fraction) ** 2
            close = abs(share - ideal) <= SHARE_TOLERANCE * ideal
            wanted.append((f"attention computed again, of causal (promised {ideal:.3g})", share, close))
        ratio = row["extra_over_full"]
        if kind == "seq_fraction" and memory.saved_fraction == 0.5 and row["seq_len"] == longest and ratio is not None:
            wanted.append(
                (f"extra time over that of full (at most {MAX_EXTRA_RATIO})", ratio, ratio <= MAX_EXTRA_RATIO)
            )
        found += [Claim(row["policy"], row["seq_len"], *values) for values in wanted]
    return found


def markdown(rows: Sequence[Row]) -> str:
    """The rows of one length as a Markdown table."""
    length, share = rows[0]["seq_len"], rows[0]["attention_share_of_flops"]
    lines = [
        f"{length:,} tokens; attention is {percent(share)} of the FLOPs",
        "",
        "| policy | step s (min..max) | extra s over none | of full's | peak tensors | kept per rank | promised "
        "| attention again | its s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step, attention = row["step"], row["attention"]
        cells = (
            row["policy"],
            f"{step['median_s']:.2f} ({step['min_s']:.2f}..{step['max_s']:.2f})",
            _figure(row["extra_s"], "+.2f"),
            _figure(row["extra_over_full"], ".2f", "x"),
            binary_bytes(row["peak_tensor_bytes"]),
            binary_bytes(row["kept_bytes"]),
            binary_bytes(row["promised_bytes"]),
            percent(attention["recomputed_share"]),
            f"{attention['recomputed_s']['median_s']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def loss_spread(rows: Sequence[Row]) -> float:
    """Greatest difference between policies of the loss of the same step: they train the same model on the same data."""
    steps = zip(*(row["losses"] for row in rows), strict=True)
    return float(max(max(losses) - min(losses) for losses in steps))


def _extra(row: Mapping[str, Any], none: Mapping[str, Any] | None) -> float | None:
    if none is None:
        return None
    return float(statistics.median(mine - its for mine, its in zip(row["seconds"], none["seconds"], strict=True)))


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None or reference <= 0 else value / reference


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return DASH if value is None else f"{value:{form}}{unit}"
