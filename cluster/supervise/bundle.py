"""The bridge as one command and one text for its stdin: nothing is installed on a node."""

from __future__ import annotations

from pathlib import Path

from cluster.code.node.boot import boot_code, pack_modules, with_length
from cluster.supervise.node.daemon import MODULES

_BRIDGE = (
    "cluster.supervise.node.frames",
    *MODULES,
    "cluster.supervise.node.tail",
    "cluster.supervise.node.bridge",
)
_ROOT = Path(__file__).resolve().parent.parent.parent


def bridge_command() -> tuple[str, ...]:
    """What starts the bridge on a node; `bridge_text` must follow on its stdin."""
    return ("python3", "-I", "-c", boot_code("cluster.supervise.node.bridge", "main(carried)"), "burst-bridge")


def bridge_text() -> bytes:
    """The modules of the bridge, and of the supervisors that it starts, behind their length in ten digits."""
    return with_length(pack_modules(_BRIDGE, str(_ROOT)))
