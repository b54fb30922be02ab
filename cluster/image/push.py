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
from cluster.image.plan import (
    ImagePlan,
    NodePlan,
    PushOptions,
    Route,
    choose_feeders,
    choose_packing,
    is_podman,
)
from cluster.image.relays import Feed, PushSecrets
from cluster.image.status import read_node_image
from cluster.remote_text import one_line
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.session import SshConnection

Connect = Callable[[Host], SshConnection]
_TICK_S = 0.25
STALL_S = 5.0
_PULL_STALL_S = 900.0  # an engine that says nothing while nothing arrives: a large layer may take so long to unpack


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

    stall_s: after so long without a byte a relay asks whoever feeds it whether it lives.
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
        self._end(Feed.close)
        for connection in self._connections.values():
            connection.close()

    @property
    def sent_bytes(self) -> int:
        """What left this machine."""
        return sum(feed.sent_bytes for feed in self._feeds.values())

    def plan(self, options: PushOptions) -> ImagePlan:
        """Ask every node what it has."""
        outcomes = fan_out(self._hosts, self._survey).values()
        found = [
            outcome.value or NodePlan(outcome.host.name, Route.REFUSED, problem=one_line(str(outcome.error), 400))
            for outcome in outcomes
        ]
        nodes = choose_feeders(found, options.route)
        pulling = [node for node in nodes if node.route in (Route.DIRECT, Route.CHAIN)]
        return ImagePlan(
            self._image.name,
            self._image.identity,
            len(self._image.diff_ids),
            self._image.size_bytes,
            choose_packing(pulling),
            options,
            nodes,
        )

    def run(self, plan: ImagePlan, observer: PushObserver) -> tuple[NodeResult, ...]:
        """The result of every node, in the order of the plan."""
        packed = self._image.pack(plan.packing) if plan.pulling else None
        self.results = {node.node: _first_result(node, plan.identity) for node in plan.nodes}
        working = [node for node in plan.nodes if node.route is not Route.REFUSED and not node.is_up_to_date]
        by_name = {node.node: node for node in working}
        hosts = [host for host in self._hosts if host.name in by_name]
        with self._shown(packed, observer):
            if packed is not None:
                self._open_feeds(plan, packed)
            outcomes = fan_out(hosts, lambda host: self._bring(by_name[host.name], packed), width=len(hosts))
            self._end(Feed.end_relay)
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                self._fail(name, str(outcome.error))
        return tuple(self.results[node.node] for node in plan.nodes)

    def _end(self, how: Callable[[Feed], None]) -> None:
        fan_out([feed.connection.host for feed in self._feeds.values()], lambda host: how(self._feeds[host.name]))

    def _survey(self, host: Host) -> NodePlan:
        connection = self._connections[host.name] = self._connect(host)
        there = read_node_image(connection, self._engine, self._image.name)
        if there.problem:
            return NodePlan(host.name, Route.REFUSED, problem=f"its container engine: {there.problem}")
        if there.identity == self._image.identity:
            return NodePlan(host.name, Route.NONE)
        other = read_node_image(connection, self._engine, self._image.image_id)
        if other.identity == self._image.identity:
            return NodePlan(host.name, Route.NONE, same=self._image.image_id)
        version = one_line(connection.run([*self._engine, "version"]).stdout, 2000)
        return NodePlan(host.name, Route.DIRECT, engine=version)

    def _open_feeds(self, plan: ImagePlan, packed: PackedImage) -> None:
        """A port here for every node that pulls, a relay there, and each relay's way to those before it."""
        limiter = Limiter(plan.options.limit)
        feeding = {feeder for node in plan.pulling for feeder in node.feeders}
        blobs = {digest: (blob.media_type, blob.have) for digest, blob in packed.blobs.items()}

        def work(host: Host) -> None:
            feed = Feed(self._connections[host.name], packed, self.secrets, limiter, self._stall_s)
            self._feeds[host.name] = feed
            feed.start_relay(blobs, plan.options.limit, feeds_others=host.name in feeding)
            if feed.problem:
                self.results[host.name].notes.append(feed.problem)

        names = {node.node for node in plan.pulling}
        hosts = [host for host in self._hosts if host.name in names]
        for name, outcome in fan_out(hosts, work, width=len(hosts)).items():
            if outcome.error is not None:
                self._fail(name, str(outcome.error))
        for node in plan.pulling:
            if node.node in self._feeds:
                self._feeds[node.node].link([self._feeds[name] for name in node.feeders if name in self._feeds])

    def _bring(self, node: NodePlan, packed: PackedImage | None) -> None:
        """The image into one node's engine, under its name, and a look at what it became there."""
        begin, result = time.monotonic(), self.results[node.node]
        if result.error:
            return
        if node.same is not None:
            self._call(node.node, "tag", node.same, self._image.name)
        else:
            assert packed is not None
            self._pull(node, f"{self.secrets.token}/burst@{packed.manifest}")
        there = read_node_image(self._connections[node.node], self._engine, self._image.name)
        if there.identity != self._image.identity:
            wanted = self._image.identity[:12]
            raise ClusterError(there.problem or f"the engine holds {str(there.identity)[:12]} instead of {wanted}")
        result.ok, result.identity, result.seconds = True, there.identity, time.monotonic() - begin

    def _pull(self, node: NodePlan, name: str) -> None:
        feed = self._feeds[node.node]
        for port in feed.ports:
            reference = f"127.0.0.1:{port}/{name}"
            try:
                self._pull_from(node, reference)
                break
            except ClusterError as error:
                if port == feed.ports[-1] or "no space left" in str(error).lower() or isinstance(error, SshError):
                    raise
                why = one_line(str(error))
                self.results[node.node].notes.append(f"its relay failed ({why}): pulled from here")
        self._call(node.node, "tag", reference, self._image.name)
        self._call(node.node, "image", "rm", reference)

    def _pull_from(self, node: NodePlan, reference: str) -> None:
        options = ("--tls-verify=false",) if is_podman(node.engine) else ()
        process = self._connections[node.node].start((*self._engine, "pull", *options, reference))
        moved = -1
        try:
            while True:
                try:
                    if not process.read(1 << 16, _PULL_STALL_S):
                        break
                except SshError as error:
                    now = self._feeds[node.node].received_bytes
                    if error.kind is not SshFailure.COMMAND_TIMEOUT or now == moved:
                        raise
                    moved = now
            done = process.wait(_PULL_STALL_S)
        finally:
            process.close()
        if done.exit_code != 0:
            raise ClusterError(one_line(done.stderr, 400) or f"{self._engine[0]} pull ended with {done.exit_code}")

    def _call(self, node: str, *words: str) -> None:
        done = self._connections[node].run([*self._engine, *words])
        if done.exit_code != 0:
            raise ClusterError(f"{self._engine[0]} {words[0]}: {one_line(done.stderr, 400)}")

    def _fail(self, node: str, text: str) -> None:
        self.results[node].error = self.results[node].error or one_line(text, 400)

    @contextlib.contextmanager
    def _shown(self, packed: PackedImage | None, observer: PushObserver) -> Iterator[None]:
        """Tell `observer` how far all nodes are for as long as the block lasts, and once more at its end."""
        over, noted = threading.Event(), set[tuple[str, str]]()

        def look() -> None:
            for name, result in self.results.items():
                feed = self._feeds.get(name)
                result.received_bytes = feed.received_bytes if feed is not None else 0
                for text in result.notes:
                    if (name, text) not in noted:
                        noted.add((name, text))
                        observer.note(name, text)
            observer.progress(list(self.results.values()), packed.size_bytes if packed else 0)

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
    known = identity if node.is_up_to_date else None
    return NodeResult(node.node, node.is_up_to_date, node.route.value, identity=known, error=node.problem)
