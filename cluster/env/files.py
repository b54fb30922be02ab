"""Environment files on disk: one per node, for its owner only, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from cluster.access.hosts import is_host_name
from cluster.env.facts import NodeEnvironment
from cluster.env.formats import Format, render_environment
from cluster.errors import ClusterError


def write_environments(environments: Mapping[str, NodeEnvironment], folder: Path, form: Format) -> dict[str, Path]:
    """The file of every node, by its name. All texts are made before the first file is, so a refusal leaves nothing.

    The folder is made with mode 0700; one that is there already keeps its own. Raises ClusterError.
    """
    texts = {node: render_environment(environment, form) for node, environment in environments.items()}
    odd = next((node for node in texts if not is_host_name(node)), None)
    if odd is not None:
        raise ClusterError(f"{odd!r} cannot be the name of a file; expected a host name")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = {}
    for node, text in texts.items():
        # A host name may hold a colon (an IPv6 address), which is no good in a file name that goes into a bind mount.
        written[node] = folder / f"{node.replace(':', '_')}{form.suffix}"
        write_private(written[node], text)
    return written


def write_private(path: Path, text: str) -> None:
    """Put `text` at `path` with mode 0600 in one step: a reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise
