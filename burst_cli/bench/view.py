"""Measurements as tables. Pure: documents of `burst bench` in, rich tables out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.render import grouped, listing
from engine.runs.figures import binary_bytes, plain, rate, seconds, seconds_between

Row = Mapping[str, Any]


def bench_view(document: Mapping[str, Any]) -> RenderableType:
    """One table per mask and length, what was skipped, and the environment."""
    measured = grouped(((row["mask"], row["seq_len"]), row) for row in document["results"])
    tables = [_table(f"attention, {mask}, {seq_len:,} tokens", rows) for (mask, seq_len), rows in measured.items()]
    places = grouped(
        ((one["variant"], one["reason"]), f"{one['mask']} {one['seq_len']:,}") for one in document["skipped"]
    )
    skipped = [
        Text(f"skipped {variant} ({', '.join(where)}): {reason}", style="yellow")
        for (variant, reason), where in places.items()
    ]
    return Group(*tables, *skipped, _environment_line(document["environment"]))


def _range_column(name: str) -> Callable[[Row], str]:
    """Median and, in parentheses, fastest to slowest."""
    return lambda row: seconds_between(*(row[name][figure] for figure in ("median_s", "min_s", "max_s")))


def _sent(link: str) -> Callable[[Row], str]:
    return lambda row: binary_bytes(row["sent_bytes_all_ranks"][link])


_ATTENTION_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "variant": lambda row: str(row["variant"]),
    "total": _range_column("total"),
    "time": lambda row: f"{plain(row['time_over_first'], 2)}x",
    "forward": _range_column("forward"),
    "backward": _range_column("backward"),
    # No communication takes less than no time: then the calls differ by more than it took.
    "exposed": lambda row: seconds(row["exposed_s"]) if row["exposed_s"] > 0 else "not seen",
    "sent inside nodes": _sent("intra"),
    "sent between nodes": _sent("inter"),
}


def _table(title: str, rows: Sequence[Row]) -> Table:
    headings = list(_ATTENTION_COLUMNS)
    table = listing(headings, ([cell(row) for cell in _ATTENTION_COLUMNS.values()] for row in rows), headings[1:])
    table.title, table.title_justify = title, "left"
    return table


def machine_view(document: Mapping[str, Any]) -> RenderableType:
    """The figures of a profile, by size where it matters, and what was measured."""
    machine, rows = document["machine"], list[tuple[str, ...]]()
    for name, unit, what in _RATES:
        shares = machine.get(name.replace("flops_per_s", "shares").replace("bytes_per_s", "shares"))
        for place, (size, share) in enumerate(shares or [(None, 1.0)]):
            shown = "" if size is None else f"{size:,.0f}"
            rows.append(("" if place else what, shown, rate(share * machine[name], unit)))
    rows += [(what, "", seconds(machine[name])) for name, what in _TIMES]
    table = listing(("of a rank", "size", "rate"), rows, ("size", "rate"))
    measured = document["measured"]
    load, cores = measured["load"], measured["cores"]
    busy = f"load {load} on {cores} cores: other work took a part of every rate; measure again when it is quiet"
    notes = [Text(busy, style="yellow")] if load > measured["setup"]["ranks"] + cores / 2 else []
    return Group(table, *notes, _environment_line(measured))


_RATES = (
    ("matmul_flops_per_s", "FLOP/s", "products of matrices, by their smallest side"),
    ("forward_flops_per_s", "FLOP/s", "attention forward, by rows of a tile"),
    ("backward_flops_per_s", "FLOP/s", "attention backward, by rows of a tile"),
    ("elementwise_bytes_per_s", "B/s", "the rest of a layer, by bytes of its input"),
    ("update_bytes_per_s", "B/s", "the optimizer"),
    ("intra_bytes_per_s", "B/s", "to a rank of the same node"),
    ("inter_bytes_per_s", "B/s", "to a rank of another node"),
    ("host_bytes_per_s", "B/s", "to host memory"),
)
_TIMES = (
    ("intra_latency_s", "a message without bytes, same node"),
    ("inter_latency_s", "a message without bytes, another node"),
    ("layer_overhead_s", "the host, per layer and step"),
    ("step_overhead_s", "the host, per step"),
)


def _environment_line(facts: Row) -> Text:
    keys = ("device", "cores", "load", "torch", "date")
    return Text(", ".join(f"{key} {facts[key]}" for key in keys if key in facts), style="dim")
