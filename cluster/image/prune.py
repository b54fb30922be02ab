"""Removing images that burst built and nobody uses any more, where the engine lets them go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection

LABEL = "org.burst.image"


@dataclass(frozen=True)
class Pruned:
    """What was (or would be) removed on one node, by name."""

    node: str
    images: tuple[str, ...] = ()
    problem: str = ""


def prune_node(connection: Connection, engine: Sequence[str], image: str, *, dry_run: bool) -> Pruned:
    """Remove the other tags of `image`'s repository that carry our label and that no container was made from.

    The label alone is not enough: whatever somebody builds upon our image inherits it. Raises ClusterError.
    """
    repository = repository_of(image)
    listed = _call(connection, engine, "image", "ls", "--filter", f"label={LABEL}=1", "--format", "{{json .}}")
    try:
        rows = [json.loads(line) for line in listed.splitlines() if line.startswith("{")]
    except ValueError as error:
        raise ClusterError("its container engine answered something that makes no sense") from error
    names = {f"{row.get('Repository')}:{row.get('Tag')}": str(row.get("ID")) for row in rows}
    removed = []
    for name, image_id in sorted(names.items()):
        if repository_of(name) != repository or name in (image, f"{image}:latest") or name.endswith(":<none>"):
            continue
        if _call(connection, engine, "ps", "--all", "--quiet", "--filter", f"ancestor={image_id}").strip():
            continue
        if dry_run or connection.run([*engine, "image", "rm", "--", name]).ok:
            removed.append(one_line(name))
    return Pruned(connection.host.name, tuple(removed))


def repository_of(name: str) -> str:
    """The name without its tag; a port of a registry is no tag."""
    head, _, last = name.rpartition("/")
    return f"{head}/{last.partition(':')[0]}".lstrip("/")


def _call(connection: Connection, engine: Sequence[str], *words: str) -> str:
    done = connection.run([*engine, *words])
    if not done.ok:
        raise ClusterError(f"its container engine: {one_line(done.stderr, 300)}")
    return done.stdout.decode("utf-8", "replace")
