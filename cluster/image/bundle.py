"""The agent as one command and one text for its stdin: nothing is installed on a node, and nothing stays there."""

from __future__ import annotations

from pathlib import Path

from cluster.image.node.boot import OLD_PYTHON, boot_code, pack_modules, with_length

__all__ = ["OLD_PYTHON", "agent_command", "agent_text"]

# In the order of their imports: each finds those before it.
_MODULES = (
    "cluster.image.node.identity",
    "cluster.image.node.frames",
    "cluster.image.node.blobs",
    "cluster.image.node.links",
    "cluster.image.node.engine",
    "cluster.image.node.keys",
    "cluster.image.node.chain",
    "cluster.image.node.loader",
    "cluster.image.node.agent",
)
_ROOT = Path(__file__).resolve().parent.parent.parent


def agent_command() -> tuple[str, ...]:
    """What starts the agent on a node; `agent_text` must follow on its stdin."""
    return ("python3", "-I", "-c", boot_code("cluster.image.node.agent"), "burst-image-agent")


def agent_text() -> bytes:
    """The agent's modules behind their length in ten digits."""
    return with_length(pack_modules(_MODULES, str(_ROOT)))
