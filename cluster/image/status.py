"""Which nodes hold which image, and which they can do without, over plain SSH: the engine's command line is enough."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.image.node.identity import image_identity
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection

LABEL = "org.burst.image"  # of what burst built
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class NodeImage:
    """What one node holds under an image's name. identity: None when it has no such image, or `problem` hides it."""

    node: str
    identity: str | None = None
    image_id: str = ""
    created: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ImageGroup:
    """Nodes that hold the same: an image, nothing (no identity or problem), a problem. differs: from the reference."""

    nodes: tuple[str, ...]
    identity: str | None
    image_id: str
    created: str
    problem: str
    differs: bool


@dataclass(frozen=True)
class ImageStatus:
    """All nodes, the largest group first. reference: the identity that all should have; source: where it came from."""

    image: str
    reference: str | None
    source: str
    groups: tuple[ImageGroup, ...]

    @property
    def exit_code(self) -> int:
        """0: all nodes hold the reference; 1: one holds another image or none; 3: one could not be asked."""
        if any(group.differs and not group.problem for group in self.groups):
            return 1
        return 3 if any(group.problem for group in self.groups) else 0


def read_node_image(connection: Connection, engine: Sequence[str], image: str) -> NodeImage:
    """What `connection`'s node holds under the name `image`. Raises SshError."""
    node = connection.host.name
    done = connection.run([*engine, "image", "inspect", "--", image], timeout_s=_TIMEOUT_S)
    try:
        found = read_inspected(done.exit_code, done.stdout, done.stderr)
    except ClusterError as error:
        return NodeImage(node, problem=str(error))
    if found is None:
        return NodeImage(node)
    return NodeImage(node, image_identity(found), one_line(str(found["Id"])), one_line(str(found.get("Created"))))


def read_inspected(exit_code: int | None, stdout: bytes, stderr: bytes) -> dict[str, Any] | None:
    """What `image inspect` says of one image; None when the engine has no such. Raises ClusterError."""
    said = one_line(stderr)
    if exit_code != 0:
        if "no such image" in said.lower() or "image not known" in said.lower():  # Docker's words, and Podman's
            return None
        raise ClusterError(said or f"ended with {exit_code}")
    try:
        found: dict[str, Any] = json.loads(stdout)[0]
        image_identity(found), found["Id"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ClusterError("its engine answered something that makes no sense") from error
    return found


def build_status(image: str, found: Sequence[NodeImage], local: str | None) -> ImageStatus:
    """`found` in groups; compared with the image of this machine (`local`), else with what most nodes hold."""
    counts = Counter(node.identity for node in found if node.identity is not None)
    reference = local or (counts.most_common(1)[0][0] if counts else None)
    source = "this machine" if local else "most nodes" if reference else "nothing"
    members: dict[tuple[str | None, str], list[NodeImage]] = {}
    for node in found:
        members.setdefault((node.identity, node.problem), []).append(node)
    groups = []
    for nodes in sorted(members.values(), key=len, reverse=True):
        names, one = tuple(node.node for node in nodes), nodes[0]
        differs = one.identity is None or one.identity != reference
        groups.append(ImageGroup(names, one.identity, one.image_id, one.created, one.problem, differs))
    return ImageStatus(image, reference, source, tuple(groups))


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
