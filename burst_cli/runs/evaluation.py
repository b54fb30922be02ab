"""What an evaluation found, for people: losses, loss by position, needles by depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from burst_cli.render import clean, listing
from cluster.remote_text import number, rows
from engine.runs.figures import DASH, percent, plain


def evaluation_view(record: Mapping[str, Any]) -> RenderableType:
    """Whose weights, validation loss and bits per byte, and a table for each of the others that was measured."""
    parts: list[RenderableType] = [Text(line) for line in evaluation_lines(record)]
    for headings, *lines in evaluation_tables(record):
        parts += [Text(), listing(headings, lines, headings)]
    return Group(*parts)


def evaluation_lines(record: Mapping[str, Any]) -> list[str]:
    """Whose weights, their losses and, where it was asked for, needles."""
    lines = [weights_text(record), _losses(record)]
    return [*lines, _needles(record)] if number(record, "final_needle_gain") is not None else lines


def evaluation_tables(record: Mapping[str, Any]) -> list[list[list[str]]]:
    """The tables that were measured, headings first: loss by position, needles by depth."""
    positions, depths = (rows(record, f"final_{name}") for name in ("validation_loss_by_position", "needle_by_depth"))
    tables = []
    if positions:
        tables.append([["tokens", "loss"], *([_place(row), plain(number(row, "loss"))] for row in positions)])
    if depths:
        tables.append([["needle at depth", "token", "right", "loss", "gain"], *(_depth_cells(row) for row in depths)])
    return tables


def weights_text(record: Mapping[str, Any]) -> str:
    """Whose weights were evaluated."""
    run, step = record.get("evaluated_run"), number(record, "evaluated_step")
    if run is None:
        return "weights of model.init_from"
    return f"weights of {clean(str(run))} after step {DASH if step is None else f'{step:,.0f}'}"


def _losses(record: Mapping[str, Any]) -> str:
    loss, bits = (number(record, f"final_validation_{name}") for name in ("loss", "bits_per_byte"))
    length = number(record, "seq_len")
    context = "" if length is None else f" on sequences of {length:,.0f} tokens"
    return f"validation loss {plain(loss)}  bits/byte {plain(bits)}{context}"


def _needles(record: Mapping[str, Any]) -> str:
    accuracy, gain = (number(record, f"final_needle_{name}") for name in ("accuracy", "gain"))
    return f"needles, all depths: {percent(accuracy)} right, gain {plain(gain)} nats per token of the answer"


def _place(row: Mapping[str, Any]) -> str:
    first, last = number(row, "first"), number(row, "last")
    return DASH if first is None or last is None else f"{first:,.0f} to {last:,.0f}"


def _depth_cells(row: Mapping[str, Any]) -> list[str]:
    position = number(row, "position")
    return [
        percent(number(row, "depth")),
        DASH if position is None else f"{position:,.0f}",
        percent(number(row, "accuracy")),
        plain(number(row, "loss")),
        plain(number(row, "gain")),
    ]
