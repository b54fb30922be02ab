"""`burst status` for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import clean, duration
from burst_cli.fleet_view import fleet_view
from burst_cli.live_screen import NARROW, figure_lines, hang_text, heading
from burst_cli.nccl_network import fallback_text
from burst_cli.run_facts import number
from burst_cli.run_list import STATE_STYLES
from burst_cli.run_status import RunStatus, is_detached

_MOST_NODE_LINES = 200
_WARNINGS = 3


def status_view(status: RunStatus, width: int) -> RenderableType:
    """Heading, state, controller, progress, nodes, what went wrong, what to type."""
    parts: list[RenderableType] = [heading(status.progress, width), _state_line(status)]
    parts += [_labelled("controller", _controller_text(status), width)]
    if status.progress.latest is not None or not status.seen.is_final:
        parts.append(_labelled("progress", _progress_text(status), width))
    if status.progress.latest is not None:
        parts += figure_lines(status.progress, width)
    table = fleet_view(status.rows, min(width, 140), _MOST_NODE_LINES)
    parts += [table] if table is not None else []
    parts += _troubles(status)
    return Group(*parts)


def next_steps_view(status: RunStatus, width: int) -> RenderableType:
    """What to type next."""
    if width < NARROW:
        return Group(*(Text(command, style="bold") for command, _ in status.next_steps()))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for command, what in status.next_steps():
        grid.add_row(Text(command, style="bold"), Text(what, style="dim"))
    return grid


def failure_text(status: RunStatus) -> Text | None:
    """The block of `burst launch` for a run that failed; None for others."""
    from burst_cli.failure_block import failure_block
    from cluster.failure import failure_from_dict

    failure = failure_from_dict(status.seen.document.get("failure"))
    return None if failure is None else failure_block(status.run, failure)


def _state_line(status: RunStatus) -> Text:
    state = status.shown_state
    attempt = status.seen.document.get("attempt", 1)
    text = Text.assemble((state, f"bold {STATE_STYLES.get(state, '')}".strip()))
    if status.seen.is_lost:
        text.append(f" ({_lost_text(status)})", style="dim")
    text.append(f"  attempt {clean(str(attempt))}", style="dim" if attempt == 1 else "")
    elapsed = status.elapsed_s
    if elapsed is not None and (status.seen.is_final or not status.seen.is_lost):
        text.append(f"  {duration(elapsed)}", style="dim")
    return text


def _lost_text(status: RunStatus) -> str:
    """What it means that nobody controls the run."""
    if not status.goes_on:
        return f"run.json says {status.seen.state}, and the process that controlled it is gone"
    lease_s = number(status.seen.document, "lease_s")
    if lease_s is None:
        return "its ranks go on, nobody controls them"
    return f"nobody controls it: its ranks end by themselves {lease_s:g} s after they last heard of a launcher"


def _controller_text(status: RunStatus) -> str:
    found = status.seen.controller
    if found is None:
        return "none" if status.seen.is_final or status.seen.is_lost else "none (started without `burst launch`)"
    how = " in the background" if is_detached(found.pid) else ""
    return clean(f"{found}{how}")


def _progress_text(status: RunStatus) -> str:
    progress = status.progress
    done = f"step {progress.step}/{progress.total_steps or '?'}"
    if progress.total_steps:
        done += f" ({100 * progress.step // progress.total_steps}%)"
    if status.seen.is_final:
        return done
    left = f", {duration(progress.remaining_s())} left" if progress.latest is not None else ""
    return f"{done}{left}, phase {clean(progress.phase)}"


def _labelled(name: str, text: str, width: int) -> Text:
    gap = "  " if width >= NARROW else " "
    return Text.assemble((f"{name}{gap}", "dim"), text)


def _troubles(status: RunStatus) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if status.seen.problem is not None:
        lines.append(Text.assemble(("unknown: ", "bold magenta"), clean(status.seen.problem)))
    hang = None if status.seen.is_final or status.seen.is_lost else hang_text(status.progress)
    lines += [Text(hang, style="yellow")] if hang else []
    fallback = fallback_text(status.fallbacks)
    lines += [Text.assemble(("warning: ", "yellow"), fallback)] if fallback else []
    warnings = status.progress.warnings
    lines += [Text.assemble(("warning: ", "yellow"), clean(text)) for text in warnings[-_WARNINGS:]]
    if len(warnings) > _WARNINGS:
        lines.append(Text(f"and {len(warnings) - _WARNINGS} earlier warnings", style="dim"))
    lines += [Text.assemble(("may still run: ", "yellow"), text) for text in status.leftover]
    return lines
