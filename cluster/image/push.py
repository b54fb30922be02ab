"""The executor of an `ImagePlan`: agents on the nodes, one event loop here; nobody waits for a lost node."""

from __future__ import annotations

import base64
import contextlib
import io
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import paramiko

from cluster.access.hosts import Host
from cluster.access.known_hosts import HostKeys
from cluster.image.node.frames import Message
from cluster.image.plan import ImagePlan, NodePlan, Route
from cluster.image.routes import Feed, Link, Order, Routes
from cluster.image.session import AgentSession, StoredBlobs
from cluster.image.store import Store, StoredImage
from cluster.remote_text import one_line

_TICK_S = 0.25


@dataclass(frozen=True)
class PushTiming:
    """When a node counts as lost, in seconds."""

    silence_s: float = 12.0  # agents speak twice a second
    doubt_s: float = 2.0  # after a link broke: whoever speaks within that is alive, only the link is not
    shared_wait_s: float = 30.0  # until a file that one node wrote into a shared folder is seen by the others


@dataclass
class NodeResult:
    """What became of one node. received_bytes: on the wire, by its agent's count. notes: what did not go as planned."""

    node: str
    ok: bool
    route: str
    received_bytes: int = 0
    skipped_bytes: int = 0
    resumed_bytes: int = 0
    seconds: float = 0.0
    identity: str | None = None
    is_verified: bool = False
    error: str = ""
    notes: list[str] = field(default_factory=list)
    received: dict[str, int] = field(default_factory=dict)  # bytes by diff id of the layer

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass
class NodeProgress:
    """How far a node is, for whoever shows it. here_bytes counts what earlier pushes left there, too."""

    node: str
    phase: str
    received_bytes: int = 0
    here_bytes: int = 0
    total_bytes: int = 0


class PushObserver(Protocol):
    """Whoever shows a push to a person."""

    def progress(self, nodes: Sequence[NodeProgress]) -> None:
        """Called several times a second."""

    def note(self, node: str, text: str) -> None:
        """Something went another way than planned."""


class Push:
    """One push; `run` does it. `sessions` hold the agents that answered the survey; they are closed by their owner."""

    def __init__(
        self,
        plan: ImagePlan,
        image: StoredImage,
        store: Store,
        sessions: Mapping[str, AgentSession],
        events: queue.Queue[tuple[str, Message]],
        *,
        observer: PushObserver,
        timing: PushTiming = PushTiming(),
    ) -> None:
        self._plan, self._image, self._store = plan, image, store
        self._sessions, self._events = dict(sessions), events
        self._observer, self._timing = observer, timing
        self._id = f"push-{secrets.token_hex(8)}"
        self._star = plan.options.shared_folder is not None
        self._routes = Routes(plan.chains, star=self._star)
        self._key = EphemeralKey() if self._routes.listeners() else None
        self._begin = time.monotonic()
        self.results = {node.node: _first_result(node, plan.identity) for node in plan.nodes}
        self._progress = {node.node: _first_progress(image, node) for node in plan.nodes}
        self._open = {node.node for node in plan.nodes if _has_work(node)}
        self._arrived: dict[str, set[int]] = {name: set() for name in self._open}
        self._doubts: dict[str, tuple[str, float, str]] = {}  # node: who lost the link to it, when, and why

    def run(self) -> tuple[NodeResult, ...]:
        """The result of every node, in the order of the plan."""
        for name in sorted(self._open):
            self._sessions[name].offer(self._blobs(self._plan.node(name).encoding))
            self._sessions[name].send(self._setup(self._plan.node(name)))
        for name in self._routes.listeners():
            assert self._key is not None
            self._sessions[name].send({"op": "listen", "public_key": self._key.public})
        for order in self._routes.heads():
            self._do(order)
        while self._open:
            with contextlib.suppress(queue.Empty):
                node, message = self._events.get(timeout=_TICK_S)
                self._handle(node, message)
            self._look_at_silence()
            self._observer.progress(list(self._progress.values()))
        return tuple(self.results[node.node] for node in self._plan.nodes)

    def _handle(self, node: str, message: Message) -> None:
        handlers: dict[str, Callable[[str, Message], None]] = {
            "progress": self._on_progress,
            "listening": self._on_listening,
            "link_lost": self._on_link_lost,
            "arrived": self._on_arrived,
            "corrupt": self._on_corrupt,
            "refused": self._on_refused,
            "done": self._on_done,
            "failed": self._on_failed,
            "gone": self._on_gone,
        }
        handler = handlers.get(message["op"])
        if handler is None or node not in self.results:
            return
        try:
            handler(node, message)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            self._lose(node, "its agent sent a message that makes no sense")

    def _on_progress(self, node: str, message: Message) -> None:
        progress = self._progress[node]
        progress.received_bytes, progress.here_bytes = int(message["received"]), int(message["here"])
        if node in self._open:
            progress.phase = one_line(str(message["phase"]), 20)
            self.results[node].received_bytes = progress.received_bytes

    def _on_listening(self, node: str, message: Message) -> None:
        if node not in self._routes.feeder:
            return  # lost meanwhile
        if message["error"] is not None:
            why = one_line(str(message["error"]))
            self._note(node, f"no other node can log in there for this push ({why}): sent from here")
            self._do(self._routes.from_launcher(node))
        elif self._routes.feeder[node] is not None:
            self._do(self._routes.order(node))

    def _on_link_lost(self, sender: str, message: Message) -> None:
        node = str(message["name"])
        if self._routes.feeder.get(node) == sender and self._is_waiting(node):
            self._doubts[node] = (sender, time.monotonic(), one_line(str(message["error"])))

    def _on_arrived(self, node: str, message: Message) -> None:
        number = int(message["blob"])
        if node not in self._arrived:
            return
        self._arrived[node].add(number)
        if self._star:
            for reader in [name for name, writer in self._routes.feeder.items() if writer == node]:
                self._sessions[reader].send({"op": "arrived", "blob": number})

    def _on_corrupt(self, node: str, message: Message) -> None:
        number = int(message["blob"])
        layer = self._image.layers[number]
        self._arrived[node].discard(number)
        self._note(node, f"layer {layer.diff_id[7:19]} was damaged there; it is sent again")
        encoding = self._plan.node(node).encoding
        if self._routes.feeder.get(node, "") is None and not self._store.verify(layer, encoding):
            self._lose(node, f"layer {layer.diff_id[7:19]} is damaged in {self._store.root}; run the command again")

    def _on_refused(self, node: str, message: Message) -> None:
        reason = one_line(str(message["error"]))
        if self._star:
            self._end(node, error=f"its engine wants all layers ({reason}); push to it without --via-shared")
            return
        self._note(node, f"its engine wants all layers, not only new ones ({reason}): all are sent")
        self._progress[node].total_bytes = sum(
            layer.packings[self._plan.node(node).encoding].size for layer in self._image.layers
        )
        self._sessions[node].send({"op": "complete"})
        self._do(self._routes.from_launcher(node))

    def _on_done(self, node: str, message: Message) -> None:
        if node not in self._open:
            return  # given up already
        result = self.results[node]
        result.identity = one_line(str(message["identity"]), 64)
        result.is_verified = result.identity == self._plan.identity
        self._count(node, message)
        self._end(node, error="" if result.is_verified else f"it holds image {result.identity[:12]} instead")

    def _on_failed(self, node: str, message: Message) -> None:
        self._count(node, message)
        error = one_line(str(message["error"]), 400)
        if message["stage"] not in ("load", "verify"):
            self._lose(node, error)
        elif node in self._open:
            self._end(node, error=error)  # its layers are right: it goes on feeding the next node

    def _on_gone(self, node: str, message: Message) -> None:
        self._lose(node, one_line(str(message["error"]), 400), sweep=True)

    def _count(self, node: str, message: Message) -> None:
        rows = {int(number): int(size) for number, size in message["received"]}
        self.results[node].received = {self._image.layers[number].diff_id: size for number, size in rows.items()}
        self.results[node].received_bytes = sum(rows.values())

    def _lose(self, node: str, why: str, *, sweep: bool = False) -> None:
        """`node` is out: its result, and another feeder for whoever it fed."""
        if node in self._open:
            self._end(node, error=why)
        self._doubts.pop(node, None)
        if node in self._routes.feeder:
            waiting = [name for name in self._routes.feeder if name != node and self._is_waiting(name)]
            for order in self._routes.lost(node, waiting):
                feeder = order.sender if isinstance(order, Link) else "the launcher"
                self._note(order.node, f"{node} is lost: {feeder} sends instead")
                self._do(order)
        self._sessions[node].abandon(sweep=sweep)

    def _end(self, node: str, *, error: str) -> None:
        self._open.discard(node)
        result = self.results[node]
        result.ok, result.error = not error, error
        result.seconds = time.monotonic() - self._begin
        self._progress[node].phase = "failed" if error else "done"

    def _is_waiting(self, node: str) -> bool:
        """Whether it still lacks layers that it, or a node behind it, needs."""
        return node in self._arrived and not self._arrived[node].issuperset(self._plan.node(node).fetch)

    def _look_at_silence(self) -> None:
        now = time.monotonic()
        for node in sorted(self._routes.feeder.keys() | self._open):
            silence = now - self._sessions[node].heard_at
            if silence > self._timing.silence_s:
                self._lose(node, f"it said nothing for {silence:.0f} s: the node or the way to it is down")
        for node, (sender, since, why) in list(self._doubts.items()):
            if self._sessions[node].heard_at > since + self._timing.doubt_s:
                del self._doubts[node]
                if self._routes.feeder.get(node) == sender:
                    self._note(node, f"{sender} cannot send to it ({why}): sent from here")
                    self._do(self._routes.from_launcher(node))

    def _do(self, order: Order) -> None:
        host = self._sessions[order.node].connection.host
        keys = host_key_lines(host) if isinstance(order, Link) else []
        if isinstance(order, Link) and not keys:
            self._note(order.node, "none of its host keys can be told to another node: sent from here")
            order = self._routes.from_launcher(order.node)
        if isinstance(order, Feed):
            self._sessions[order.node].stop_feeding()
            self._sessions[order.node].send({"op": "feed"})
            return
        assert self._key is not None
        target = {"name": host.name, "address": host.address, "port": host.port, "user": host.user}
        message = {"op": "link", **target, "host_keys": keys, "key": self._key.private}
        self._sessions[order.sender].send(message)

    def _setup(self, node: NodePlan) -> Message:
        image, options = self._image, self._plan.options
        blobs = [
            {
                "sha256": layer.packings[node.encoding].sha256,
                "size": layer.packings[node.encoding].size,
                "encoding": node.encoding,
                "diff_id": layer.diff_id,
                "unpacked": layer.unpacked_bytes,
            }
            for layer in image.layers
        ]
        archive = {
            "config": base64.b64encode(image.saved.config).decode("ascii"),
            "config_name": image.saved.config_name,
            "tag": image.name,
            "layers": list(image.saved.diff_ids),
        }
        return {
            "op": "setup",
            "push": self._id,
            "image": image.name,
            "identity": image.identity,
            "blobs": blobs,
            "need": list(node.need),
            "fetch": list(node.fetch),
            "same": node.same,
            "limit": options.limit,
            "shared": options.shared_folder,
            "shared_wait_s": self._timing.shared_wait_s,
            "archive": archive,
        }

    def _blobs(self, encoding: str) -> StoredBlobs:
        return StoredBlobs(
            {
                number: (self._store.path(layer, encoding), layer.packings[encoding].size)
                for number, layer in enumerate(self._image.layers)
            }
        )

    def _note(self, node: str, text: str) -> None:
        self.results[node].notes.append(text)
        self._observer.note(node, text)


class EphemeralKey:
    """A key pair for one push: node to node, so that no key of a person ever leaves this machine."""

    def __init__(self) -> None:
        key = paramiko.ECDSAKey.generate(bits=256)
        text = io.StringIO()
        key.write_private_key(text)
        self.private = text.getvalue()
        self.public = f"{key.get_name()} {key.get_base64()}"


def host_key_lines(host: Host) -> list[str]:
    """The trusted keys of `host`, as known_hosts has them behind the name."""
    known = HostKeys.load(host.known_hosts)
    revoked = {key.blob for key in known.keys if key.is_revoked}
    found = [key for key in known.find(host.key_names) if key.blob not in revoked]
    return [f"{key.kind} {base64.b64encode(key.blob).decode('ascii')}" for key in found]


def _has_work(node: NodePlan) -> bool:
    return bool(node.need) or node.same is not None or (node.route is Route.NONE and not node.up_to_date)


def _first_result(node: NodePlan, identity: str) -> NodeResult:
    return NodeResult(
        node.node,
        ok=node.up_to_date,
        route=node.route.value,
        skipped_bytes=node.skipped_bytes,
        resumed_bytes=node.resumed_bytes,
        identity=identity if node.up_to_date else None,
        is_verified=node.up_to_date,
        error=node.problem,
        notes=[node.note] if node.note else [],
    )


def _first_progress(image: StoredImage, node: NodePlan) -> NodeProgress:
    total = sum(image.layers[number].packings[node.encoding].size for number in node.fetch)
    phase = "failed" if node.problem else "up to date" if node.up_to_date else "waiting"
    return NodeProgress(node.node, phase, total_bytes=total)
