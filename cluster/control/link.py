"""The seam between a controller and one node of its run: what it may ask for, and what it is told.

`LocalLink` works on this machine's run folder, `SshLink` over SSH with a copy of the node's files, `SlurmLink` on a
shared run folder; tests have a fake of a few lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from cluster.errors import ClusterError
from cluster.failure import Failure

TIME_LIMIT = "time limit"  # why ranks stop that save before a scheduler ends them
STOP_GRACE_S = 12.0  # between asking ranks to stop and killing them

Phase = Literal["none", "starting", "running", "stopping", "ended", "lost"]


class StartRefusedError(ClusterError):
    """A node does not start its part of the run. kind: busy, exists, folder, command, unreachable."""

    def __init__(self, node: str, kind: str, text: str) -> None:
        self.node, self.kind = node, kind
        super().__init__(f"{node}: {text}")


@dataclass(frozen=True)
class NodeSpec:
    """What the supervisor of one node is told; plain JSON on the wire and in nodes/<node>/spec.json.

    folder: the run folder on that node, absolute. argv: one command that starts all local ranks (torchrun, or docker
    run with torchrun in it). environment: on top of the node's. files: (path relative to `folder`, text) to lay there
    first; empty where the folder is the launcher's own. container: name of the container that argv starts; None: bare.
    engine: command line of the container engine. lease_s: without a beat for so long the supervisor stops the run;
    None: it goes on alone. exclusive: refuse while another run holds the node.
    """

    run_id: str
    node: str
    node_rank: int
    num_nodes: int
    first_rank: int
    local_ranks: int
    folder: str
    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    files: tuple[tuple[str, str], ...] = ()
    container: str | None = None
    engine: tuple[str, ...] = ("docker",)
    lease_s: float | None = 60.0
    stop_grace_s: float = STOP_GRACE_S
    exclusive: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "environment": dict(self.environment)}


@dataclass(frozen=True)
class NodeStatus:
    """What is known of one node's part of a run, as of the last contact.

    phase: of its supervisor; none: there is none and it left no outcome; lost: it died without an outcome.
    outcome: content of outcome.json. health: content of health.json. heard_s: seconds since the node last said
    anything (0 for this machine). is_synced: an outcome is there and every file of the node has reached the run
    folder. problem: why the node cannot be heard, in words. clock_offset_ns: the node's clock minus this machine's.
    failure: what ended the run from outside of its nodes, such as the time limit of a batch system.
    """

    node: str
    phase: Phase = "none"
    outcome: Mapping[str, Any] | None = None
    health: Mapping[str, Any] | None = None
    heard_s: float = 0.0
    is_synced: bool = False
    problem: str | None = None
    clock_offset_ns: int = 0
    failure: Failure | None = None
    supervisor: Mapping[str, Any] = field(default_factory=dict)


class NodeLink(Protocol):
    """One node of one run. No call blocks for long, except `start` and `sweep`; all are safe after `close`."""

    @property
    def node(self) -> str:
        """The node's name."""

    def start(self, spec: NodeSpec) -> None:
        """Lay the files, start the supervisor. Raises StartRefusedError; never starts a second one of the same run."""

    def follow(self) -> None:
        """Begin to watch (and to copy) what was started, now or by an earlier launcher."""

    def poll(self) -> NodeStatus:
        """What is known now."""

    def beat(self) -> None:
        """Renew the lease; the controller calls it about every second."""

    def stop(self, cause: str, grace_s: float) -> None:
        """Ask for the end: SIGTERM, after `grace_s` seconds SIGKILL. Repeated calls may shorten the grace: 0 kills."""

    def request_stacks(self, nonce: str) -> None:
        """Have every rank write its Python stacks and its flight recorder; done when stacks_done.json names `nonce`."""

    def sweep(self, timeout_s: float) -> tuple[int, ...]:
        """Kill what is left of the run on the node, container included; pids that would not die.

        Raises ClusterError when it cannot be seen whether anything is left.
        """

    def close(self) -> None:
        """Let go of the node; what runs there goes on until its lease ends."""
