"""Removing images that burst built and nobody uses any more, where the engine lets them go."""

from __future__ import annotations

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
    head, slash, last = image.rpartition("/")
    repository = head + slash + last.partition(":")[0]  # the port of a registry is no tag
    words = ("--filter", f"label={LABEL}=1", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}", repository)
    removed = []
    for line in sorted(_call(connection, engine, "image", "ls", *words).splitlines()):
        name, _, image_id = line.partition(" ")
        if name in (image, f"{image}:latest") or name.endswith(":<none>"):
            continue
        if _call(connection, engine, "ps", "--all", "--quiet", "--filter", f"ancestor={image_id}").strip():
            continue
        if dry_run or connection.run([*engine, "image", "rm", "--", name]).ok:
            removed.append(one_line(name))
    return Pruned(connection.host.name, tuple(removed))


def _call(connection: Connection, engine: Sequence[str], *words: str) -> str:
    done = connection.run([*engine, *words])
    if not done.ok:
        raise ClusterError(f"its container engine: {one_line(done.stderr, 300)}")
    return done.stdout.decode("utf-8", "replace")
