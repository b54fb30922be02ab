"""Images and pushes as a person sees them: the plan, progress, results, status."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, duration, grouped, seconds
from burst_cli.render import told
from burst_cli.tables import listing
from cluster.ssh.nodes import fold_nodes

if TYPE_CHECKING:
    from cluster.image.plan import ImagePlan
    from cluster.image.push import NodeResult
    from cluster.image.status import ImageStatus, Pruned

_SHOWN_NODES = 4
_SHORT_ID = 12


@contextlib.contextmanager
def open_push_view(console: Console) -> Iterator[PushView]:
    """What shows a push while it runs."""
    with console.status("") as status:
        yield PushView(console, status.update)


class PushView:
    """A line per node that is done; on a terminal how far the others are stands below."""

    def __init__(self, console: Console, show: Callable[[Text], None]) -> None:
        self._console, self._show = console, show
        self._told: set[str] = set()

    def progress(self, nodes: Sequence[NodeResult], total_bytes: int) -> None:
        """Print and show what is new."""
        for node in nodes:
            if node.phase in ("done", "failed") and node.node not in self._told:
                self._told.add(node.node)
                self._console.print(Text(f"{node.node}: {node.phase}"), soft_wrap=True)
        parts = [f"{node.node} {_amount(node, total_bytes)}" for node in nodes if node.phase == "receiving"]
        more = [f"and {len(parts) - _SHOWN_NODES} more"] if len(parts) > _SHOWN_NODES else []
        self._show(Text("  ".join([*parts[:_SHOWN_NODES], *more])))

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


def _amount(node: NodeResult, total_bytes: int) -> str:
    """Loading goes on in silence once everything is there."""
    if node.received_bytes >= total_bytes:
        return "loading"
    return f"{binary_bytes(node.received_bytes)} of {binary_bytes(total_bytes)}"
