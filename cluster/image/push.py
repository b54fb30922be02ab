"""The executor of an `ImagePlan`: a registry here, a relay on each node, and the node's own engine that pulls."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import ClusterError, SshError, SshFailure
from cluster.image.archive import PackedImage, Packing
from cluster.image.engine import Engine, Image
from cluster.image.feed import Feed, Limiter, new_certificate
from cluster.image.plan import ImagePlan, NodePlan, choose_feeders, choose_packing, is_podman
from cluster.remote_text import one_line
from cluster.ssh.connection import CommandResult
from cluster.ssh.hosts import Host, Outcome, fan_out
from cluster.ssh.session import SshConnection

STALL_S = 900.0  # an engine that has not ended while no byte comes anywhere: a large layer may take so long to unpack


@dataclass(frozen=True)
class NodeResult:
    """What became of one node. received_bytes: on the wire. notes: what did not go as planned."""

    node: str
    ok: bool
    route: str
    received_bytes: int = 0
    seconds: float = 0.0
    identity: str | None = None
    error: str = ""
    notes: tuple[str, ...] = ()


class Push:
    """One push of `image`, which `pack` packs, to `hosts`; relays last as long as connections, which others close.

    engine: the command line of the nodes' engines. stall_s: what a pull may take in which nothing comes to any node.
    """

    def __init__(
        self,
        image: Image,
        pack: Callable[[Packing], PackedImage],
        engine: Sequence[str],
        hosts: Sequence[Host],
        connect: Callable[[Host], SshConnection],
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self._image, self._pack, self._engine, self._hosts, self._connect = image, pack, engine, hosts, connect
        self._stall_s, self._token = stall_s, secrets.token_hex(16)
        self._connections: dict[str, SshConnection] = {}
        self._feeds: dict[str, Feed] = {}
        self.total_bytes = 0  # of a node that has nothing of the image, once that is packed

    @property
    def sent_bytes(self) -> int:
        """What left this machine."""
        return sum(feed.sent_bytes for feed in list(self._feeds.values()))

    def received_bytes(self) -> dict[str, int]:
        """What came so far, by the name of each node that pulls; from any thread."""
        return {name: feed.received_bytes for name, feed in list(self._feeds.items())}

    def plan(self, limit: float | None = None) -> ImagePlan:
        """Ask every node what it has. limit: of what leaves this machine, in bytes/s."""
        found = [
            outcome.value or NodePlan(outcome.host.name, "refused", problem=one_line(str(outcome.error), 400))
            for outcome in fan_out(self._hosts, self._survey).values()
        ]
        image, packing = self._image, choose_packing([node for node in found if node.engine])
        nodes = choose_feeders(found)
        return ImagePlan(image.name, image.identity, image.layers, image.size_bytes, packing, limit, nodes)

    def run(
        self, plan: ImagePlan, on_end: Callable[[Outcome[None]], None] = lambda outcome: None
    ) -> tuple[NodeResult, ...]:
        """The result of every node, in the order of the plan. on_end: told of each that pulled, as it comes."""
        nodes = {node.node: node for node in plan.pulling}
        hosts = [host for host in self._hosts if host.name in nodes]
        outcomes: dict[str, Outcome[None]] = {}
        if hosts:
            packed, limiter = self._pack(plan.packing), Limiter(plan.limit)
            self.total_bytes, certificate = packed.size_bytes, new_certificate()
            all_open = threading.Barrier(len(hosts))

            def bring(host: Host) -> None:
                node, connection = nodes[host.name], self._connections[host.name]
                try:
                    feed = self._feeds[host.name] = Feed(connection, packed.blobs, self._token, limiter)
                    if any(node.feeders for node in plan.nodes):
                        feed.start_relay(certificate)
                finally:
                    all_open.wait()
                feed.follow_relay(self._feeds[name] for name in node.feeders if name in self._feeds)
                self._pull(node, connection, packed.manifest)

            outcomes = fan_out(hosts, bring, width=len(hosts), on_outcome=on_end)
            fed = [host for host in hosts if host.name in self._feeds]
            fan_out(fed, lambda host: self._feeds[host.name].end(), width=len(fed))  # all at once: each is asked
        return tuple(self._result(node, outcomes.get(node.node)) for node in plan.nodes)

    def _survey(self, host: Host) -> NodePlan:
        connection = self._connections[host.name] = self._connect(host)
        engine = Engine(connection.run, self._engine)
        if self._held(engine) == self._image.identity:
            return NodePlan(host.name, "none")
        return NodePlan(host.name, "direct", engine=one_line(engine.call("version"), 2000))

    def _pull(self, node: NodePlan, connection: SshConnection, manifest: str) -> None:
        """The image into one node's engine, under its name alone."""
        engine, feed = Engine(connection.run, self._engine), self._feeds[node.node]
        pulling = Engine(functools.partial(self._watched, connection), self._engine)
        for port in feed.ports:
            reference = f"127.0.0.1:{port}/{self._token}/burst@{manifest}"
            try:
                pulling.call("pull", *(("--tls-verify=false",) if is_podman(node.engine) else ()), reference)
                break
            except ClusterError as error:
                if port == feed.ports[-1] or isinstance(error, SshError):
                    raise
                feed.notes.append(f"its relay failed ({one_line(str(error))}): pulled from here")
        engine.call("tag", reference, self._image.name)
        engine.call("image", "rm", reference)
        if (held := self._held(engine)) != self._image.identity:
            raise ClusterError(f"the engine holds {held[:12]} instead of {self._image.identity[:12]}")

    def _held(self, engine: Engine) -> str:
        there = engine.find(self._image.name)
        return "nothing" if there is None else there.identity

    def _watched(self, connection: SshConnection, argv: Sequence[str]) -> CommandResult:
        """The end of a command, which is given up when nothing moves any more."""
        moved: object = None
        with contextlib.closing(connection.start(argv)) as process:
            while True:
                try:
                    return process.wait(self._stall_s)
                except SshError as error:
                    before, moved = moved, (self.sent_bytes, self.received_bytes())
                    if error.kind is not SshFailure.COMMAND_TIMEOUT:
                        raise
                    if moved == before:
                        connection.close()  # it may be full, and then even an end of file would wait for ever
                        text = f"its engine still pulls, and nothing has come to any node for {self._stall_s:.3g} s"
                        raise SshError(error.host, error.kind, text, "did it stop, or the node before it?") from error

    def _result(self, node: NodePlan, outcome: Outcome[None] | None) -> NodeResult:
        feed = self._feeds.get(node.node)
        received, notes = (feed.received_bytes, tuple(feed.notes)) if feed else (0, ())
        seconds = outcome.elapsed_s if outcome else 0.0  # None: it has the image, or cannot get it
        error = one_line(str(outcome.error), 400) if outcome and outcome.error else node.problem
        identity = None if error else self._image.identity
        return NodeResult(node.node, not error, node.route, received, seconds, identity, error, notes)
