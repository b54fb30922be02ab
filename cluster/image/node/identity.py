"""What makes two images the same, whatever engine holds them. Runs on nodes, too: Python 3.9, standard library only."""

import hashlib
import json
from typing import Any

# What a container gets from its image. Engines add fields of their own (`Image`, `Hostname`), or leave empty ones out.
_CONFIG_FIELDS = (
    "User",
    "ExposedPorts",
    "Env",
    "Entrypoint",
    "Cmd",
    "Volumes",
    "WorkingDir",
    "Labels",
    "StopSignal",
    "Healthcheck",
    "OnBuild",
    "Shell",
    "ArgsEscaped",
)


def image_identity(inspected: dict[str, Any]) -> str:
    """sha256 in hex over architecture, system, layers, settings and date of what `docker image inspect` shows.

    The id that engines print is not enough: the classic store and the one of containerd give one image different ids.
    """
    config = inspected.get("Config") or {}
    facts = {
        "Architecture": inspected.get("Architecture"),
        "Os": inspected.get("Os"),
        "Layers": layers_of(inspected),
        "Config": {name: config[name] for name in _CONFIG_FIELDS if config.get(name)},
        "Created": inspected.get("Created"),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def layers_of(inspected: dict[str, Any]) -> list[str]:
    """The diff ids (sha256:...) of its layers, from the bottom up."""
    layers = (inspected.get("RootFS") or {}).get("Layers") or []
    return [str(layer) for layer in layers]
