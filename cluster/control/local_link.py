"""`NodeLink` for this machine: the node's folder is the run folder, so there is nothing to bring anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from cluster.agent import folder
from cluster.agent.start import start
from cluster.agent.start import sweep as sweep_node
from cluster.control.link import NodeSpec, NodeStatus, Phase, StartRefusedError
from cluster.errors import ClusterError


class LocalLink:
    """One node of the run in folder `run`, on this machine. A run folder that cannot be written is a `problem`."""

    def __init__(self, run: Path, node: str) -> None:
        self._run, self._node = run, node
        self._folder = str(run)
        self._problem: str | None = None

    @property
    def node(self) -> str:
        """The node's name."""
        return self._node

    def start(self, spec: NodeSpec) -> None:
        """Start a supervisor that outlives this process; see `NodeLink.start`."""
        answer = start(spec.to_dict())
        if "refused" in answer:
            raise StartRefusedError(self._node, **answer["refused"])

    def follow(self) -> None:
        """Nothing: the files are here."""

    def poll(self) -> NodeStatus:
        """What the files say now."""
        seen = folder.read_status(self._folder, self._node)
        return NodeStatus(
            self._node,
            cast(Phase, seen["phase"]),
            seen["outcome"],
            seen["health"],
            is_synced=seen["outcome"] is not None,
            problem=self._problem,
            supervisor=seen["supervisor"],
        )

    def beat(self) -> None:
        """Renew the lease."""
        self._ask("beat", lambda: folder.beat(self._folder, self._node))

    def stop(self, cause: str, grace_s: float) -> None:
        """Ask for the end."""
        self._ask("stop", lambda: folder.request_stop(self._folder, self._node, cause, grace_s))

    def request_stacks(self, nonce: str) -> None:
        """Ask for stacks."""
        self._ask("stacks", lambda: folder.request_stacks(self._folder, self._node, nonce))

    def sweep(self, timeout_s: float) -> tuple[int, ...]:
        """Kill what is left, by its own time limits; pids that would not die."""
        try:
            return tuple(sweep_node(self._folder, self._node, self._run.name))
        except OSError as error:
            raise ClusterError(f"{self._node}: cannot clear up: {error}") from error

    def _ask(self, what: str, write: Callable[[], None]) -> None:
        """Leave a request; a disk that refuses is a problem until it takes the next one."""
        try:
            write()
            self._problem = None
        except OSError as error:
            self._problem = f"{what}: {error.filename or self._folder}: {error.strerror or error}"

    def close(self) -> None:
        """Nothing is held."""
