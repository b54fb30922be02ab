"""Building the image: the engine's own build of a checkout, whose `.dockerignore` says which files go in."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ClusterError
from engine.config.errors import ConfigError

Device = Literal["cuda", "cpu"]


def build_command(
    root: Path, engine: str, tag: str, device: Device, options: Sequence[str], git: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """What builds the checkout at `root`. options: more of the engine's, which win; git: its commit when it is known.

    Labels say where the image comes from, and no time: building the same files again gives the same image. Raises
    ConfigError when `root` is no checkout of burst.
    """
    if not (root / "Dockerfile").is_file():
        raise ConfigError(f"{root}: not a checkout of burst, it has no Dockerfile; name one by --context FOLDER")
    labels = {"org.burst.image": "1"}
    arguments: dict[str, str] = {"DEVICE": device}
    if git is not None:
        labels["org.opencontainers.image.revision"] = str(git["sha"])
        labels["org.burst.dirty"] = str(bool(git["dirty"])).lower()
    if any(root.glob("docker/wheels/*.whl")):  # then nothing is fetched
        arguments["APT_PACKAGES"] = ""
    return (
        *(engine, "build", "--tag", tag),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        *options,
        str(root),
    )


def run_build(command: Sequence[str]) -> None:
    """Run it; all that the engine says goes to stderr. Raises ClusterError when it fails."""
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2).returncode
    except OSError as error:
        text = f"{command[0]}: cannot be started ({error.strerror}); install Docker, or name another engine"
        raise ClusterError(f"{text} by --command") from error
    if code:
        raise ClusterError(f"{command[0]} build ended with exit code {code}; it says why above")
