"""The seams of a controller: to a node of its run, to whoever watches, to time; and what it returns.

`LocalLink` asks the agent of this machine, `SshLink` one on a node whose files it copies, `SlurmLink` looks at a shared
run folder; tests have a fake of a few lines.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

from cluster.agent.messages import STOP_GRACE_S, Message, MessageError, Spec, pack
from cluster.errors import ClusterError
from cluster.failure import Failure
from cluster.remote_text import clean_value, integer, one_line, word

INTERRUPTED = 130
TIME_LIMIT = "time limit"  # why ranks stop that save before a scheduler ends them

Phase = Literal["none", "starting", "running", "stopping", "ended", "lost"]


class StartRefusedError(ClusterError):
    """A node does not start its part of the run. kind: busy, exists, folder, command, unreachable."""

    def __init__(self, node: str, kind: str, text: str) -> None:
        self.node, self.kind = node, kind
        super().__init__(f"{node}: {text}")


@dataclass(frozen=True)
class NodeStatus:
    """What is known of one node's part of a run, as of the last contact.

    phase: of its supervisor; none: there is none and it left no outcome; lost: it died without an outcome.
    outcome: content of outcome.json. health: content of health.json. heard_s: seconds since the node last said
    anything (0 for this machine). is_synced: an outcome is there and every file of the node has reached the run
    folder. problem: why the node cannot be heard, in words. clock_offset_ns: the node's clock minus this machine's.
    failure: what ended the run from outside of its nodes, such as the time limit of a batch system. has_started,
    refusal: how the node answered to a start. swept: the processes that a sweep left; None: it is not done.
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
    has_started: bool = False
    refusal: StartRefusedError | None = None
    swept: tuple[int, ...] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the node says that ranks run."""
        return self.phase in ("starting", "running", "stopping")

    @property
    def end(self) -> str | None:
        """How this part of the run ended, in a few words; None: nothing says that it has."""
        if self.outcome is None:
            return None
        code, by = integer(self.outcome, "exit_code") or 0, word(self.outcome, "stop_cause")
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}" if code else "ended"
        texts = {
            "lease": "stopped by itself, because it heard nothing of its launcher",
            "start_failed": "could not start",
            "stop": f"stopped ({by})" if by else "stopped",
        }
        text, error = texts.get(str(word(self.outcome, "cause")), how), word(self.outcome, "error")
        return f"{text}: {error}" if error else text


class NodeLink:
    """One node of one run. No call waits for the node; all are safe after `close`. node: its name.

    Who inherits does nothing where it says nothing else.
    """

    node: str

    def start(self, spec: Spec) -> None:
        """Have the files laid and a supervisor started, never a second one of the same run; `poll` tells the answer."""

    def follow(self) -> None:
        """Begin to watch (and to copy) what was started, now or by an earlier launcher."""

    def poll(self) -> NodeStatus:
        """What is known now."""
        raise NotImplementedError  # no link can leave this out; an ABC has no place for the empty ones beside it (B027)

    def beat(self) -> None:
        """Renew the lease; the controller calls it about every second."""

    def stop(self, cause: str, grace_s: float) -> None:
        """Ask for the end: SIGTERM, after `grace_s` seconds SIGKILL. Repeated calls may shorten the grace: 0 kills."""

    def request_stacks(self, nonce: str) -> None:
        """Have every rank write its Python stacks and its flight recorder; done when stacks_done.json names `nonce`."""

    def sweep(self) -> None:
        """Have killed what is left of the run on the node, container included; `poll` tells what would not die."""

    def close(self) -> None:
        """Let go of the node; what runs there goes on until its lease ends."""


@dataclass(frozen=True)
class Leftover:
    """What may still run on `node`: processes that would not die, or, without pids, all that cannot be seen there."""

    node: str
    pids: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        pids = f"processes {' '.join(map(str, self.pids))}" if self.pids else ""
        return f"{self.node}: {'; '.join(filter(None, [pids, self.reason])) or 'not known'}"


@dataclass(frozen=True)
class LaunchOutcome:
    """How a run ended: final state, exit code for the shell, the first failure, and what could not be cleared away."""

    status: str
    exit_code: int
    failure: Failure | None = None
    leftover: tuple[Leftover, ...] = ()


class LaunchObserver:
    """Whoever shows a launch to a person; this one shows nothing to nobody."""

    def tick(self) -> None:
        """Called several times a second while the run lives."""

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """What is known of every node, in their order; called before every `tick`."""

    def stopping(self, cause: str, grace_s: float) -> None:
        """The run is being stopped; after `grace_s` seconds what remains is killed."""

    def note(self, text: str) -> None:
        """Something that a person should know, in one line."""


@dataclass(frozen=True)
class LaunchTiming:
    """How long things may take, in seconds; `lost_s` None: half of what a node's lease lasts."""

    poll_s: float = 0.1
    heartbeat_s: float = 1.0
    stop_grace_s: float = STOP_GRACE_S  # between asking the ranks to stop and killing them, without checkpoints
    evidence_s: float = 1.0  # between the first sign of a failure and stopping the nodes that know nothing of it
    failure_grace_s: float = 3.0  # between the first sign of a failure and killing the ranks that go on
    early_exit_s: float = 30.0  # for rank 0 to say that training is complete, once the ranks of a node ended well
    finish_s: float = 60.0  # for all ranks to end, once training is complete
    lost_s: float | None = None  # a node that says nothing for so long is lost
    vanish_s: float = 3.0  # for news of the last step to arrive, once a rank has ended well
    kill_s: float = 15.0  # for a node to end once all of its processes were to be killed; then it is given up
    unreachable_s: float = 8.0  # at once if nothing was heard of it for so long
    sync_s: float = 30.0  # for the last lines of logs to arrive from a node that has ended
    stacks_s: float = 10.0  # for the ranks of a run that hangs to write their stacks


class Clock(Protocol):
    """Time as the controller sees it: module `time` is one; tests have one that they move."""

    def monotonic(self) -> float:
        """Seconds that only go forward."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""


class StrangeAnswerError(ClusterError):
    """A node sent what makes no sense."""


class AgentLink(NodeLink):
    """The part of `NodeLink` that links share which ask an agent: wishes are kept until the node has answered.

    start_s: after how long a start that is not answered counts as refused.
    """

    def __init__(self, folder: str, node: str, start_s: float) -> None:
        self._folder, self.node, self._start_s = folder, node, start_s
        self._changed = threading.Condition()  # guards what follows, and is told of what somebody may wait for
        self._status = NodeStatus(node)
        self._problem: str | None = None
        self._requests: Message = {}  # what the node has not answered yet
        self._is_urgent = self._is_closed = False
        self._start_until = 0.0

    def start(self, spec: Spec) -> None:
        request = {"start": spec._replace(start_id=secrets.token_hex(8))._asdict(), "again": False}
        with self._changed:
            self._status, self._start_until = NodeStatus(self.node), time.monotonic() + self._start_s
            try:
                pack(request)
            except MessageError as error:
                return self._refuse("command", f"its files are too large: {error}")
            self._requests.clear()
        return self._request("start", request)

    def poll(self) -> NodeStatus:
        with self._changed:
            if "start" in self._requests and (self._is_closed or time.monotonic() > self._start_until):
                cause = "given up" if self._is_closed else f"no answer in {self._start_s:.3g} s"
                self._refuse("unreachable", f"{cause}: {self._problem or 'the node takes its time'}")
            return replace(self._status, problem=self._problem)

    def beat(self) -> None:
        with self._changed:
            self._requests["beat"] = time.monotonic()  # another wish each time

    def stop(self, cause: str, grace_s: float) -> None:
        self._request("stop", {"cause": cause, "grace_s": grace_s})

    def request_stacks(self, nonce: str) -> None:
        self._request("stacks", nonce)

    def sweep(self) -> None:
        with self._changed:
            self._status = replace(self._status, swept=None)
        self._request("sweep", secrets.token_hex(8))

    def _request(self, name: str, wish: Any) -> None:
        """Ask for it until the node has answered; the next question comes soon."""
        with self._changed:
            self._requests[name] = wish
            self._is_urgent = True
            self._changed.notify_all()

    def _refuse(self, kind: str, text: str) -> None:
        """The start has failed; the caller holds `changed`."""
        self._requests.pop("start", None)
        self._status = replace(self._status, refusal=StartRefusedError(self.node, kind, text))
        self._changed.notify_all()

    def _question(self, wait_s: float) -> Message:
        """What is to be asked now; the caller holds `changed`."""
        self._is_urgent = False
        if (start := self._requests.get("start")) is None:
            return {"folder": self._folder, "node": self.node, "wait_s": wait_s, **self._requests}
        # The files on the node are left alone: they may be those of an earlier attempt.
        self._requests["start"] = {**start, "again": True}
        return {**start, "wait_s": wait_s}

    def _take(self, question: Message, answer: Message) -> None:
        """Believe what makes sense of an answer. Raises StrangeAnswerError."""
        said, refused = answer.get("errors"), answer.get("refused")
        errors = {str(name): one_line(str(text), 500) for name, text in said.items()} if isinstance(said, dict) else {}
        with self._changed:
            self._problem = f"the node says: {'; '.join(errors.values())}" if errors else None
            if "start" in question and "start" in self._requests:
                if isinstance(refused, dict):
                    self._refuse(one_line(str(refused.get("kind")), 20), one_line(str(refused.get("text")), 2000))
                elif "start" in errors:
                    self._refuse("command", errors["start"])
                elif "started" in answer:
                    self._status = replace(self._status, has_started=True)
                    del self._requests["start"]
            for name in ("beat", "stop", "stacks"):
                if name in question and name not in errors and self._requests.get(name) is question[name]:
                    del self._requests[name]
            if "swept" in answer:
                self._status = replace(self._status, swept=as_pids(answer["swept"]))
                self._requests.pop("sweep", None)
            if "status" in answer:
                self._status = replace(self._status, **as_status(answer["status"]))
            self._changed.notify_all()


def as_status(said: Any) -> dict[str, Any]:
    """Fields of a `NodeStatus`: phase, supervisor, outcome and health. Raises StrangeAnswerError."""
    if not isinstance(said, dict) or said.get("phase") not in get_args(Phase):
        raise StrangeAnswerError("it names a phase that does not exist")
    facts = {name: said.get(name) for name in ("supervisor", "outcome", "health")}
    if not all(value is None or isinstance(value, dict) for value in facts.values()):
        raise StrangeAnswerError("its status makes no sense")
    try:
        cleaned = clean_value(facts)
    except ValueError as error:
        raise StrangeAnswerError(f"its status {error}") from error
    return {**cleaned, "phase": said["phase"], "supervisor": cleaned["supervisor"] or {}}


def as_pids(value: Any) -> tuple[int, ...]:
    """The process ids in a list."""
    return tuple(pid for pid in value if isinstance(pid, int))[:4096] if isinstance(value, list) else ()
