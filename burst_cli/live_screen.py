"""The live block of a run, drawn for a screen of a given size; 40 columns and 10 lines are enough for what matters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, clean, count, duration, percent, plain, sparkline
from burst_cli.fleet_rows import NodeRow
from burst_cli.fleet_view import fleet_view
from burst_cli.log_files import fold_names
from burst_cli.run_facts import ranks_text
from burst_cli.run_progress import RunProgress

TRAINING_PHASE = "train"  # the phase that needs no mention, because the steps tell
NARROW = 70
TINY = 36  # no room for a bar
_SPARKLINE_WIDTH = 24
_MANY_NODES = 16


@dataclass(frozen=True)
class Screen:
    """What is drawn: a run's progress, its nodes, how it is being stopped, and the last line of alarm in its logs."""

    progress: RunProgress
    rows: Sequence[NodeRow] = ()
    stop_line: str | None = None
    log_line: str | None = None


def draw(screen: Screen, width: int, height: int) -> RenderableType:
    """The block in at most `height - 1` lines of `width` columns; the cursor needs the last line."""
    progress = screen.progress
    lines: list[RenderableType] = [heading(progress, width), *progress_lines(progress, width)]
    if progress.latest is not None:
        lines += figure_lines(progress, width)
    last = _last_lines(screen, width)
    room = height - 1 - sum(len(text.split("\n")) for text in last)
    lines = lines[: max(2, room)]
    table = fleet_view(screen.rows, width, room - len(lines))
    return Group(*lines, *([table] if table is not None else []), *last)


def heading(progress: RunProgress, width: int) -> Text:
    """Run, preset, length of sequences, ranks on nodes, in one line."""
    facts, run = progress.facts, progress.run
    narrow = width < NARROW
    text = Text(f"{run.exp}/{run.run_id[-6:] if narrow else run.run_id}", style="bold")
    parts = [facts.preset or "", f"{facts.shape} ranks" if facts.nodes else facts.shape]
    if facts.nodes and len(facts.nodes) <= _MANY_NODES and not narrow:
        ranks = sum(node.local_ranks for node in facts.nodes)
        parts[1] = f"{ranks_text(ranks)} on {fold_names([node.name for node in facts.nodes])}"
    parts.append(f"seq {facts.seq_len:,}" if facts.seq_len else "")
    text.append("".join(["  ", ", ".join(filter(None, parts))]) if any(parts) else "", style="dim")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def progress_lines(progress: RunProgress, width: int) -> list[RenderableType]:
    """Bar, step, phase and times."""
    narrow = width < NARROW
    phase = "" if progress.phase == TRAINING_PHASE else clean(progress.phase)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    if width < TINY:
        return [Text(f"step {progress.step}/{progress.total_steps} {phase}", no_wrap=True, overflow="ellipsis")]
    if progress.latest is None:
        bar = ProgressBar(total=None, width=max(8, width // 4), pulse=True)
        grid.add_row(bar, Text(phase), Text(duration(progress.elapsed_s()), style="dim"))
        return [grid]
    total = max(1, progress.total_steps)
    bar = ProgressBar(total=total, completed=min(progress.step, total), width=max(8, width // 4))
    done = Text(f"step {progress.step}/{progress.total_steps}", style="bold")
    elapsed, left = duration(progress.elapsed_s()), duration(progress.remaining_s())
    times = Text(f"{left} left" if narrow else f"{elapsed} elapsed, {left} left", style="dim")
    grid.add_row(bar, done, times if narrow or not phase else times.append(f"  {phase}", style="default"))
    return [grid, Text(phase)] if narrow and phase else [grid]


def figure_lines(progress: RunProgress, width: int) -> list[Text]:
    """Loss with its curve, speed, MFU, memory; validation when there was one. One line, or two, or three."""
    loss = Text.assemble(("loss ", "dim"), (plain(progress.figure("loss")), "bold"))
    loss.append(f" {sparkline(progress.losses, _SPARKLINE_WIDTH)}", style="cyan")
    per_device = progress.figure("tokens_per_s_per_device")
    name, speed = "tokens/s", progress.figure("tokens_per_s")
    if per_device is not None:
        name, speed = "tokens/s/device", per_device
    figures = [loss, _figure(name, count(speed)), _figure("MFU", percent(progress.figure("mfu")))]
    figures.append(_figure("peak memory", binary_bytes(progress.figure("peak_memory_bytes"))))
    if progress.validation is not None:
        row = progress.validation
        bits = row.get("validation_bits_per_byte")
        figures.append(_figure("validation", f"{plain(_number(row.get('validation_loss')))}"))
        figures.append(_figure("bits/byte", plain(_number(bits)) if bits is not None else DASH))
    return _filled(figures, width)


def hang_text(progress: RunProgress) -> str | None:
    """`no step for 25 s; stacks will be taken at 30 s`, once half of that time has passed."""
    silence, limit = progress.silence_s, progress.hang_limit_s
    if silence < limit / 2:
        return None
    what = "step" if progress.latest is not None else "first step"
    if silence < limit:
        return f"no {what} for {silence:.0f} s; stacks will be taken at {limit:.0f} s"
    return f"no {what} for {silence:.0f} s: it may hang, stacks are taken"


def _last_lines(screen: Screen, width: int) -> list[Text]:
    """The last alarm in one line, what is urgent in as many as it needs."""
    lines = [Text(screen.log_line, style="dim", no_wrap=True, overflow="ellipsis")] if screen.log_line else []
    urgent = screen.stop_line or hang_text(screen.progress)
    folded = "\n".join(textwrap.wrap(urgent, max(10, width))) if urgent else ""
    return [*lines, Text(folded, style="yellow")] if folded else lines


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _filled(figures: Sequence[Text], width: int) -> list[Text]:
    """Figures side by side, as many in a line as there is room for."""
    lines: list[Text] = []
    for figure in figures:
        if lines and lines[-1].cell_len + 3 + figure.cell_len <= width:
            lines[-1].append("   ")
            lines[-1].append_text(figure)
        else:
            lines.append(Text(no_wrap=True, overflow="ellipsis").append_text(figure))
    return lines


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None
