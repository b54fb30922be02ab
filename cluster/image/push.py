"""The executor of an `ImagePlan`: a registry here, a relay on each node, and the node's own engine that pulls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.errors import ClusterError, SshError, SshFailure
from cluster.image.archive import PackedImage
from cluster.image.local import LocalImage
from cluster.image.node.registry import Limiter
from cluster.image.plan import ImagePlan, NodePlan, Route, choose_feeders, choose_packing, is_podman
from cluster.image.relays import Feed, PushSecrets
from cluster.image.status import read_node_image
from cluster.remote_text import one_line
from cluster.ssh.connection import CommandResult
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.session import SshConnection

Connect = Callable[[Host], SshConnection]
_TICK_S = 0.25
STALL_S = 900.0  # an engine that has not ended while nothing leaves here: a large layer may take so long to unpack


@dataclass
class NodeResult:
    """What became of one node. received_bytes: on the wire. notes: what did not go as planned."""

    node: str
    ok: bool
    route: str
    received_bytes: int = 0
    seconds: float = 0.0
    identity: str | None = None
    error: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """How far it is, in a word."""
        if self.error or not self.ok:
            return "failed" if self.error else "receiving"
        return "up to date" if self.route == Route.NONE.value else "done"


class PushObserver(Protocol):
    """Whoever shows a push to a person; called from a thread of its own."""

    def progress(self, nodes: Sequence[NodeResult], total_bytes: int) -> None:
        """Called several times a second. total_bytes: of a node that has nothing of the image."""

    def note(self, node: str, text: str) -> None:
        """Something went another way than planned."""


class Push:
    """One push of `image` to `hosts`; a context manager, at whose end all connections are closed.

    stall_s: what a pull may take in which nothing leaves this machine for any node.
    """

    def __init__(
        self,
        image: LocalImage,
        engine: Sequence[str],
        hosts: Sequence[Host],
        connect: Connect,
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self._image, self._engine, self._hosts, self._connect = image, tuple(engine), hosts, connect
        self._stall_s = stall_s
        self._connections: dict[str, SshConnection] = {}
        self._feeds: dict[str, Feed] = {}
        self.secrets = PushSecrets()
        self.results: dict[str, NodeResult] = {}

    def __enter__(self) -> Push:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_relays()
        for connection in self._connections.values():
            connection.close()

    @property
    def sent_bytes(self) -> int:
        """What left this machine."""
        return sum(feed.sent_bytes for feed in self._feeds.values())

    def plan(self, route: str = "auto", limit: float | None = None) -> ImagePlan:
        """Ask every node what it has. route: "auto", "direct" or "chain"; limit: bytes/s of each sender."""
        outcomes = fan_out(self._hosts, self._survey).values()
        found = [
            outcome.value or NodePlan(outcome.host.name, Route.REFUSED, problem=one_line(str(outcome.error), 400))
            for outcome in outcomes
        ]
        nodes, image = choose_feeders(found, route), self._image
        packing = choose_packing([node for node in nodes if node.is_pulling])
        return ImagePlan(image.name, image.identity, image.layers, image.size_bytes, packing, limit, nodes)

    def run(self, plan: ImagePlan, observer: PushObserver) -> tuple[NodeResult, ...]:
        """The result of every node, in the order of the plan."""
        self.results = {node.node: _first_result(node, plan.identity) for node in plan.nodes}
        if plan.pulling:
            packed = self._image.pack(plan.packing)
            with self._shown(observer, packed.size_bytes):
                self._bring_to_all(plan, packed, observer)
        return tuple(self.results.values())

    def _survey(self, host: Host) -> NodePlan:
        connection = self._connections[host.name] = self._connect(host)
        there = read_node_image(connection, self._engine, self._image.name)
        if there.problem:
            return NodePlan(host.name, Route.REFUSED, problem=f"its container engine: {there.problem}")
        if there.identity == self._image.identity:
            return NodePlan(host.name, Route.NONE)
        version = one_line(connection.run([*self._engine, "version"]).stdout, 2000)
        return NodePlan(host.name, Route.DIRECT, engine=version)

    def _bring_to_all(self, plan: ImagePlan, packed: PackedImage, observer: PushObserver) -> None:
        """A port here for every node that pulls and a relay there, then each relay's way to those before it."""
        limiter = Limiter(plan.limit)
        feeding = {feeder for node in plan.pulling for feeder in node.feeders}

        def note(node: NodePlan, text: str) -> None:
            self.results[node.node].notes.append(text)
            observer.note(node.node, text)

        def open_feed(node: NodePlan) -> None:
            feed = self._feeds[node.node] = Feed(self._connections[node.node], packed, self.secrets, limiter)
            if problem := feed.start_relay(plan.limit, feeds_others=node.node in feeding):
                note(node, problem)

        def bring(node: NodePlan) -> None:
            begin, result, feed = time.monotonic(), self.results[node.node], self._feeds[node.node]
            feed.link([self._feeds[name] for name in node.feeders if name in self._feeds])
            self._pull(node, packed.manifest, lambda text: note(node, text))
            there = read_node_image(self._connections[node.node], self._engine, plan.image)
            if there.identity != plan.identity:
                wanted = plan.identity[:12]
                raise ClusterError(there.problem or f"the engine holds {str(there.identity)[:12]} instead of {wanted}")
            result.ok, result.identity, result.seconds = True, there.identity, time.monotonic() - begin

        self._on_each(plan.pulling, open_feed)
        self._on_each([node for node in plan.pulling if node.node in self._feeds], bring)
        self._end_relays()

    def _on_each(self, nodes: Sequence[NodePlan], work: Callable[[NodePlan], None]) -> None:
        """`work` on all `nodes` at once; what one of them raises is its result."""
        plans = {node.node: node for node in nodes}
        hosts = [host for host in self._hosts if host.name in plans]
        for name, outcome in fan_out(hosts, lambda host: work(plans[host.name]), width=len(hosts)).items():
            if outcome.error is not None:
                self.results[name].error = one_line(str(outcome.error), 400)

    def _end_relays(self) -> None:
        hosts = [host for host in self._hosts if host.name in self._feeds]
        fan_out(hosts, lambda host: self._feeds[host.name].end_relay(), width=len(hosts))

    def _pull(self, node: NodePlan, manifest: str, note: Callable[[str], None]) -> None:
        """The image into one node's engine, under its name alone."""
        options, ports = ("--tls-verify=false",) if is_podman(node.engine) else (), self._feeds[node.node].ports
        for port in ports:
            reference = f"127.0.0.1:{port}/{self.secrets.token}/burst@{manifest}"
            try:
                self._told("pull", self._watched(node.node, ("pull", *options, reference)))
                break
            except ClusterError as error:
                if port == ports[-1] or "no space left" in str(error).lower() or isinstance(error, SshError):
                    raise
                note(f"its relay failed ({one_line(str(error))}): pulled from here")
        self._call(node.node, "tag", reference, self._image.name)
        self._call(node.node, "image", "rm", reference)

    def _watched(self, node: str, words: Sequence[str]) -> CommandResult:
        """The end of a command of a node's engine, which is given up when nothing moves any more."""
        process, sent = self._connections[node].start([*self._engine, *words]), -1
        try:
            while True:
                try:
                    return process.wait(self._stall_s)
                except SshError as error:
                    if error.kind is not SshFailure.COMMAND_TIMEOUT or sent == self.sent_bytes:
                        raise
                    sent = self.sent_bytes
        finally:
            process.close()

    def _call(self, node: str, *words: str) -> None:
        self._told(words[0], self._connections[node].run([*self._engine, *words]))

    def _told(self, verb: str, done: CommandResult) -> None:
        if done.exit_code != 0:
            said = one_line(done.stderr, 400) or f"ended with {done.exit_code}"
            raise ClusterError(f"{self._engine[0]} {verb}: {said}")

    @contextlib.contextmanager
    def _shown(self, observer: PushObserver, total_bytes: int) -> Iterator[None]:
        """Tell `observer` how far all nodes are for as long as the block lasts, and once more at its end."""
        over = threading.Event()

        def look() -> None:
            for name, feed in list(self._feeds.items()):
                self.results[name].received_bytes = feed.received_bytes
            observer.progress(list(self.results.values()), total_bytes)

        def watch() -> None:
            while not over.wait(_TICK_S):
                look()

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        look()


def _first_result(node: NodePlan, identity: str) -> NodeResult:
    is_there = node.route is Route.NONE
    return NodeResult(
        node.node, is_there, node.route.value, identity=identity if is_there else None, error=node.problem
    )
