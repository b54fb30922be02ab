"""Images and pushes as a person sees them: the plan, progress, results, status."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, duration, grouped, seconds
from burst_cli.render import told
from burst_cli.tables import listing
from cluster.ssh.nodes import fold_nodes

if TYPE_CHECKING:
    from cluster.image.plan import ImagePlan
    from cluster.image.prune import Pruned
    from cluster.image.push import NodeResult, PushObserver
    from cluster.image.status import ImageStatus

_REFRESH_S = 0.2
_PLAIN_INTERVAL_S = 2.0
_SHORT_ID = 12


@contextlib.contextmanager
def open_push_view(console: Console) -> Iterator[PushObserver]:
    """The view of a push for this console: live on a terminal, lines on anything else."""
    if not console.is_terminal:
        yield PlainPushView(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LivePushView(console, live)


class LivePushView:
    """A bar per node, redrawn in place; nodes that are done make room for others."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console, self._live = console, live
        self._next = 0.0

    def progress(self, nodes: Sequence[NodeResult], total_bytes: int) -> None:
        """Redraw, at most five times a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REFRESH_S
        room = max(3, self._console.height - 4)
        shown = sorted(nodes, key=lambda node: node.phase in ("done", "failed", "up to date"))[:room]
        grid = Table.grid(padding=(0, 2))
        for node in shown:
            grid.add_row(Text(node.node), *_bar(node, total_bytes))
        lines: list[RenderableType] = [grid]
        if len(shown) < len(nodes):
            lines.append(Text(f"and {len(nodes) - len(shown)} more", style="dim"))
        self._live.update(Group(*lines), refresh=True)

    def note(self, node: str, text: str) -> None:
        """Print above the bars."""
        self._console.print(told("note", f"{node}: {text}"))


class PlainPushView:
    """A line every few seconds, and one per node that is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = time.monotonic() + _PLAIN_INTERVAL_S
        self._phases: dict[str, str] = {}
        self._last = ""

    def progress(self, nodes: Sequence[NodeResult], total_bytes: int) -> None:
        """Print what is new."""
        for node in nodes:
            if node.phase in ("done", "failed") and self._phases.get(node.node) != node.phase:
                self._phases[node.node] = node.phase
                self._console.print(Text(f"{node.node}: {node.phase}"), soft_wrap=True)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_INTERVAL_S
            parts = [f"{node.node} {_plain_amount(node, total_bytes)}" for node in nodes if node.phase == "receiving"]
            line = "  ".join(parts)
            if line and line != self._last:
                self._last = line
                self._console.print(Text(line), soft_wrap=True)

    def note(self, node: str, text: str) -> None:
        """One line."""
        self._console.print(told("note", f"{node}: {text}"), soft_wrap=True)


def plan_view(plan: ImagePlan) -> RenderableType:
    """What a push will do."""
    head = Text.assemble(
        (plan.image, "bold"),
        f"  identity {plan.identity[:_SHORT_ID]}  {plan.layers} layers, {binary_bytes(plan.unpacked_bytes)}",
    )
    rows = grouped(
        ((node.route.value, node.problem or ("" if node.is_pulling else "up to date")), node.node)
        for node in plan.nodes
    )
    table = listing(("nodes", "route", ""), ((fold_nodes(names), *cells) for cells, names in rows.items()))
    names = [node.node for node in plan.pulling]
    lines: list[RenderableType] = [head, table]
    if any(node.feeders for node in plan.pulling):
        lines.append(Text("chain: launcher → " + " → ".join(names)))
    packed = ", packed with zstd" if plan.packing == "zstd" else ""
    return Group(*lines, Text(f"to send: layers that a node lacks{packed}" if names else "nothing to send"))


def results_view(results: Sequence[NodeResult], elapsed_s: float) -> RenderableType:
    """What became of every node."""
    rows = (
        (
            result.node,
            Text("OK", "green") if result.ok else Text("FAILED", "bold red"),
            binary_bytes(result.received_bytes),
            seconds(result.seconds),
            f"{result.identity[:_SHORT_ID]} verified" if result.identity else DASH,
            result.error or "; ".join(result.notes),
        )
        for result in results
    )
    table = listing(("node", "result", "received", "time", "identity", ""), rows)
    failed = [result.node for result in results if not result.ok]
    last = Text(f"{len(results) - len(failed)} of {len(results)} nodes hold the image, {duration(elapsed_s)}")
    if failed:
        last.append(f"; failed: {fold_nodes(failed)}. The same command sends what they lack.", style="red")
    return Group(table, last)


def status_view(status: ImageStatus) -> RenderableType:
    """Which nodes hold which image."""
    rows = []
    for group in status.groups:
        what = "unknown" if group.problem else "missing" if group.identity is None else group.identity[:_SHORT_ID]
        mark = group.problem or ("differs" if group.differs and group.identity else "")
        style = "red" if group.differs else "green"
        image_id = group.image_id.removeprefix("sha256:")[:_SHORT_ID]
        rows.append((fold_nodes(group.nodes), Text(what, style), image_id, group.created, Text(mark, style)))
    table = listing(("nodes", "image", "id", "created", ""), rows)
    if status.reference:
        should = f"should be {status.reference[:_SHORT_ID]} (as {status.source})"
    else:
        unseen = any(group.problem for group in status.groups)
        should = "was seen nowhere, but not all could be asked" if unseen else "nobody has it"
    return Group(Text.assemble((status.image, "bold"), f"  {should}"), table)


def prune_view(nodes: Sequence[Pruned], *, dry_run: bool) -> RenderableType:
    """What was removed where."""
    verb = "would remove" if dry_run else "removed"
    return Group(
        *(
            Text(f"{node.node}: {node.problem}", style="red")
            if node.problem
            else Text(f"{node.node}: {verb} {', '.join(node.images) or 'nothing'}")
            for node in nodes
        )
    )


def _bar(node: NodeResult, total_bytes: int) -> tuple[RenderableType, Text, Text]:
    style = {"failed": "red", "done": "green", "up to date": "green"}.get(node.phase, "")
    total = max(1, total_bytes)
    done = total if node.ok else min(total, node.received_bytes)
    bar = ProgressBar(total=total, completed=done, width=30)
    return bar, Text(_amount(node, total_bytes)), Text(node.phase, style=style)


def _amount(node: NodeResult, total_bytes: int) -> str:
    return f"{binary_bytes(min(node.received_bytes, total_bytes))} of {binary_bytes(total_bytes)}"


def _plain_amount(node: NodeResult, total_bytes: int) -> str:
    """Loading goes on in silence once everything is there."""
    return "loading" if node.received_bytes >= total_bytes else _amount(node, total_bytes)
