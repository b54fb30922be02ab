"""Removing what pushes keep for the next one: packed layers on the nodes and here; images only where we may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.access.hosts import Host
from cluster.image.fleet import Fleet
from cluster.image.node.frames import Message
from cluster.remote_text import one_line


@dataclass(frozen=True)
class Pruned:
    """What was (or would be) removed on one node. images: names of images that carry our label and that nobody uses."""

    node: str
    files: int = 0
    bytes: int = 0
    images: tuple[str, ...] = field(default=())
    problem: str = ""


def prune_nodes(
    fleet: Fleet,
    hosts: Sequence[Host],
    *,
    engine: Sequence[str],
    repository: str | None,
    dry_run: bool,
    shared_folder: str | None = None,
) -> list[Pruned]:
    """What became of every node, in the order of `hosts`. repository: of images that shall go, too, without a tag."""

    def question(node: str) -> Message:
        options = {"repository": repository, "dry_run": dry_run, "shared": shared_folder}
        return {"op": "prune", "node": node, "engine": list(engine), **options}

    answers = fleet.ask(question, "pruned")
    return [_pruned(host.name, answers.get(host.name), fleet.problems.get(host.name, "")) for host in hosts]


def _pruned(node: str, answer: Message | None, problem: str) -> Pruned:
    if answer is None:
        return Pruned(node, problem=problem or "did not answer")
    try:
        error = "" if answer["error"] is None else one_line(str(answer["error"]), 300)
        images = tuple(one_line(str(name), 120) for name in answer["images"])
        return Pruned(node, int(answer["files"]), int(answer["bytes"]), images, error)
    except (KeyError, TypeError, ValueError, OverflowError):
        return Pruned(node, problem="its agent gave an answer that makes no sense")
