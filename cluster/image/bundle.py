"""The agent as one command and one text for its stdin: nothing is installed on a node, and nothing stays there."""

from __future__ import annotations

import json
from pathlib import Path

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
OLD_PYTHON = "burst needs Python 3.6 or newer as python3"
_BOOT = f"""
import json, os, sys, types
if sys.version_info < (3, 6): sys.exit("{OLD_PYTHON}")
def take(size):
    parts = b""
    while len(parts) < size:
        data = os.read(0, size - len(parts))
        if not data: sys.exit(1)
        parts += data
    return parts
for name, source in json.loads(take(int(take(10))).decode("ascii")):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["cluster.image.node.agent"].main()
"""


def agent_command() -> tuple[str, ...]:
    """What starts the agent on a node; `agent_text` must follow on its stdin."""
    return ("python3", "-I", "-c", _BOOT.strip(), "burst-image-agent")


def agent_text() -> bytes:
    """The agent's modules behind their length in ten digits."""
    sources = [(name, (_ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")) for name in _MODULES]
    body = json.dumps(sources).encode("ascii")
    return f"{len(body):010d}".encode("ascii") + body
