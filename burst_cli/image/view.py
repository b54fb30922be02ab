"""Images and pushes as a person sees them: the plan, progress, results, status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.render import grouped, listing
from cluster.ssh.hosts import fold_nodes
from engine.runs.figures import DASH, binary_bytes, duration, seconds

if TYPE_CHECKING:
    from cluster.image.engine import ImageStatus
    from cluster.image.plan import ImagePlan
    from cluster.image.push import NodeResult, Push
    from cluster.ssh.hosts import Outcome

_SHOWN_NODES = 4
_SHORT_ID = 12


class PushView:
    """A line per node that ends; of the others, whenever a terminal draws it, how far they are."""

    def __init__(self, console: Console, push: Push) -> None:
        self._console, self._push = console, push
        self._ended: set[str] = set()

    def tell(self, outcome: Outcome[None]) -> None:
        """A node has ended."""
        self._ended.add(outcome.host.name)
        render.say(self._console, f"{outcome.host.name}: {'failed' if outcome.error else 'done'}")

    def __rich__(self) -> Text:
        total = self._push.total_bytes
        left = [(node, amount) for node, amount in self._push.received_bytes().items() if node not in self._ended]
        parts = [
            f"{node} {f'{binary_bytes(amount)} of {binary_bytes(total)}' if amount < total else 'loading'}"
            for node, amount in left[:_SHOWN_NODES]
        ]
        more = [f"and {len(left) - _SHOWN_NODES} more"] if len(left) > _SHOWN_NODES else []
        return Text("  ".join([*parts, *more]))


def plan_view(plan: ImagePlan) -> RenderableType:
    """What a push will do."""
    head = Text.assemble(
        (plan.image, "bold"),
        f"  identity {plan.identity[:_SHORT_ID]}  {plan.layers} layers, {binary_bytes(plan.unpacked_bytes)}",
    )
    rows = grouped(
        ((node.route, node.problem or ("up to date" if node.route == "none" else "")), node.node) for node in plan.nodes
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
    """Which nodes hold which image, the most first."""
    held = grouped((there, node) for node, there in status.nodes.items())
    rows = []
    for there, nodes in sorted(held.items(), key=lambda item: -len(item[1])):
        is_right = there is not None and there.identity == status.reference
        what, mark = (there.identity[:_SHORT_ID], "" if is_right else "differs") if there else ("missing", "")
        about = (there.image_id.removeprefix("sha256:")[:_SHORT_ID], there.created) if there else ("", "")
        style = "green" if is_right else "red"
        rows.append((fold_nodes(nodes), Text(what, style), *about, Text(mark, style)))
    rows += [(node, Text("unknown", "red"), "", "", Text(problem, "red")) for node, problem in status.problems.items()]
    table = listing(("nodes", "image", "id", "created", ""), rows)
    if status.reference:
        should = f"should be {status.reference[:_SHORT_ID]} (as {status.source})"
    else:
        should = "was seen nowhere, but not all could be asked" if status.problems else "nobody has it"
    return Group(Text.assemble((status.image, "bold"), f"  {should}"), table)
