"""Environment files on disk: one per node, for its owner only, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.access.hosts import is_host_name
from cluster.env.facts import NodeEnvironment
from cluster.env.formats import Format, render_environment
from cluster.errors import ClusterError
from engine.files import replace_file


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
        replace_file(written[node], text)
    return written
