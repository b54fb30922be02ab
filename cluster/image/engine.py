"""A container engine by its command line, of this machine (DOCKER_HOST says which) or of a node, and its images."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.connection import CommandResult
from cluster.ssh.hosts import Outcome

_TIMEOUT_S = 60.0
_NO_IMAGE = ("no such image", "image not known")  # Docker's words, and Podman's
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


@dataclass(frozen=True)
class Image:
    """What an engine holds under a name. identity: sha256 in hex over all that a container could notice."""

    name: str
    identity: str
    image_id: str
    created: str
    layers: int
    size_bytes: int

    @classmethod
    def of(cls, name: str, inspected: Mapping[str, Any]) -> Image:
        """What `image inspect` shows. Raises ValueError, LookupError, TypeError, ... where that makes no sense.

        The id that engines print is no identity: the classic store and the one of containerd give one image two.
        """
        image_id, created = (one_line(str(inspected[key])) for key in ("Id", "Created"))
        config = inspected["Config"] or {}
        facts = {
            **{key: inspected[key] for key in ("Architecture", "Os", "Created", "RootFS")},
            "Config": {key: config[key] for key in _CONFIG_FIELDS if config.get(key)},
        }
        identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return cls(
            name, identity, image_id, created, len(inspected["RootFS"].get("Layers", ())), int(inspected["Size"])
        )


class Engine:
    """The engine that `command` reaches where `run` runs it."""

    def __init__(self, run: Callable[[Sequence[str]], CommandResult], command: Sequence[str]) -> None:
        self._run, self._command = run, command

    def call(self, *words: str) -> str:
        """What it prints. Raises ClusterError, in its own words, when it fails."""
        done = self._run([*self._command, *words])
        if not done.ok:
            said = one_line(done.stderr, 400) or f"ended with {done.exit_code}"
            raise ClusterError(f"{self._command[0]} {words[0]}: {said}")
        return done.stdout.decode("utf-8", "replace")

    def find(self, name: str) -> Image | None:
        """The image of that name; None when it has no such. Raises ClusterError when it does not answer."""
        try:
            return Image.of(name, json.loads(self.call("image", "inspect", "--", name))[0])
        except ClusterError as error:
            if any(words in str(error).lower() for words in _NO_IMAGE):
                return None
            raise
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ClusterError(f"{self._command[0]} image inspect: it answers what makes no sense") from error


def engine_here(command: Sequence[str]) -> Engine:
    """That of this machine. Its calls raise ClusterError, too, when the command cannot be run."""

    def run(argv: Sequence[str]) -> CommandResult:
        try:
            done = subprocess.run(argv, capture_output=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"the engine of this machine cannot be asked: {error}") from error
        return CommandResult(done.returncode, done.stdout, done.stderr)

    return Engine(run, command)


@dataclass(frozen=True)
class ImageStatus:
    """What nodes hold under the name `image`, by node; and problems of those that cannot be asked.

    reference: the identity that all should have; source: where it came from.
    """

    image: str
    reference: str | None
    source: str
    nodes: Mapping[str, Image | None]
    problems: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        """0: all nodes hold the reference; 1: one holds another image or none; 3: one could not be asked."""
        if any(there is None or there.identity != self.reference for there in self.nodes.values()):
            return 1
        return 3 if self.problems else 0


def build_status(image: str, found: Sequence[Outcome[Image | None]], local: str | None) -> ImageStatus:
    """What `found` says, compared with the identity of this machine's image (`local`), else with most nodes."""
    nodes = {one.host.name: one.value for one in found if one.error is None}
    counts = Counter(there.identity for there in nodes.values() if there is not None)
    reference = local or max(counts, key=counts.__getitem__, default=None)
    source = "this machine" if local else "most nodes" if reference else "nothing"
    problems = {one.host.name: one_line(str(one.error), 400) for one in found if one.error is not None}
    return ImageStatus(image, reference, source, nodes, problems)
