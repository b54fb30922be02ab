"""Which rank or node failed first, and how: from what ranks wrote, what torchrun and the nodes saw. Pure functions.

torchrun's own "root cause" is often the victim: a rank that lost its peer fails loudly, while the one that was killed
says nothing. On several nodes it is worse: each torchrun knows its own ranks only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from cluster.remote_text import integer, table

Kind = Literal[
    "config", "user", "oom", "exception", "peer_lost",  # as ranks say themselves
    "signal", "exit", "hang", "node_lost", "port", "start", "launcher",
]  # fmt: skip
RANK_KINDS = ("config", "user", "oom", "exception", "peer_lost")
MESSAGE_CHARACTERS = 4_000

_FIRST_DEATH = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT_NUMBER = re.compile(r"\bport:? (\d{1,5})\b")
# NCCL aborts ranks that lost a peer; torchrun terminates the rest, which may end as if interrupted.
_ECHO_SIGNALS = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
_NO_TIME = 2**63


@dataclass(frozen=True)
class Failure:
    """What ended a run. `rank` is None when no rank is to blame; `signal` is a name such as SIGKILL.

    host: the node's name. memory: what `engine.runs.oom` measured and what was predicted, under kind oom.
    advice: what to do next. stacks: the file with the stacks of the rank, under kind hang. checkpoint: the last one
    that is whole. details: further lines that explain the verdict.
    """

    kind: Kind
    type: str
    message: str
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    phase: str | None = None
    signal: str | None = None
    exit_code: int = 1
    log: str | None = None
    memory: Mapping[str, Any] | None = None
    advice: str | None = None
    stacks: str | None = None
    checkpoint: str | None = None
    details: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The final state of the run: failed or oom."""
        return "oom" if self.kind == "oom" else "failed"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as they stand in run.json."""
        return asdict(self)


def failure_from_dict(document: Any) -> Failure | None:
    """The failure that stands in run.json, or None when there is none, or none that makes sense."""
    if not isinstance(document, Mapping) or document.get("kind") not in get_args(Kind):
        return None
    known = {field.name: document[field.name] for field in fields(Failure) if field.name in document}
    details = known.get("details")
    texts = tuple(str(line) for line in details) if isinstance(details, list | tuple) else ()
    return Failure(**{"type": "", "message": "", **known, "details": texts})


@dataclass(frozen=True)
class KillFacts:
    """What is known when a process was ended by SIGKILL.

    evidence: why it is certain that the kernel did it for lack of memory. hint: why that is possible. memory: what the
    process held, as in `Failure.memory`.
    """

    evidence: str | None = None
    hint: str | None = None
    memory: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Death:
    """The end of one rank's process, as torchrun or the node saw it; a negative exit code is a signal, None unknown.

    at_ns: when, in the launcher's clock; None: not known. kill: what is known of it should it have been SIGKILL.
    """

    rank: int
    exit_code: int | None
    pid: int | None = None
    at_ns: int | None = None
    kill: KillFacts | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """What ended it, if a signal did, or made it end itself: 128 and the signal's number, as with shells."""
        code = self.exit_code or 0
        try:
            return signal.Signals(-code if code < 0 else code - 128)
        except ValueError:
            return None


def first_death(torchrun_log: str, first_rank: int = 0) -> Death | None:
    """The rank that torchrun observed to fail first, or None when its log names none.

    `first_rank` is the rank of the node's local rank 0.
    """
    found = _FIRST_DEATH.search(torchrun_log)
    return Death(first_rank + int(found[2]), int(found[1]), int(found[3])) if found else None


@dataclass(frozen=True)
class NodeEvidence:
    """What one node shows of the end of its part; nothing in it was caused by the launcher's own request to stop.

    errors: what its ranks wrote, with time_ns in the launcher's clock; is_echo: it may come of another's end. death:
    what torchrun named first. vanished: how the node's supervisor saw ranks end. exit_code: torchrun's own, None when
    it was stopped or is not known. kill: what is known should SIGKILL have ended a process there. lost: why the node
    was given up, since lost_at_ns. log: the end of torchrun's output.
    """

    node: str = ""
    errors: Sequence[Mapping[str, Any]] = ()
    death: Death | None = None
    vanished: Sequence[Death] = ()
    exit_code: int | None = None
    kill: KillFacts = KillFacts()
    lost: str | None = None
    lost_at_ns: int | None = None
    log: str = ""


Finding = tuple[int, int | None, Failure]  # which rule says so, when it happened, and what did
# The rules from the surest to the weakest. A rank that a signal ended without a word beats all that others say; a node
# that was lost and a torchrun that died beat ranks that only noticed.
_PORT, _KILLED, _OWN_ERROR, _NODE_LOST, _TORCHRUN_KILLED, _EXITED, _LEFT_EARLY, _VANISHED, _ABORTED = range(9)
_ECHO, _NO_TRACE = 12, 13


def find_failure(nodes: Sequence[NodeEvidence]) -> Failure:
    """The failure that came first, whatever order `nodes` and their errors are in.

    By the surest rule that finds one; then the earliest; without times the lowest rank decides.
    """
    lost_at = min((node.lost_at_ns for node in nodes if node.lost is not None and node.lost_at_ns), default=_NO_TIME)
    found = [finding for node in nodes for finding in _findings(node, lost_at)]
    found += _vanished_first(nodes)
    text = "all ranks ended without an error before training was complete"
    return min(found, default=(0, 0, Failure("launcher", "Incomplete", text)), key=_order)[2]


def _order(finding: Finding) -> tuple[int, int, int, str]:
    rule, at_ns, failure = finding
    rank = _NO_TIME if failure.rank is None else failure.rank
    return (rule, _NO_TIME if at_ns is None else at_ns, rank, failure.host or "")


def _findings(node: NodeEvidence, lost_at_ns: int) -> Iterator[Finding]:
    """What one node says. lost_at_ns: errors that came after the loss of a node are its echo, whatever they say."""
    host, code = node.node or None, node.exit_code
    if (taken := _port_taken(node)) is not None:
        yield _PORT, None, taken  # everybody else waits in vain for the rendezvous
    for error in node.errors:
        at_ns = integer(error, "time_ns")
        is_echo = error.get("is_echo", error.get("kind") == "peer_lost") or (at_ns or 0) >= lost_at_ns
        yield _ECHO if is_echo else _OWN_ERROR, at_ns, _from_error(error, node)
    if node.lost is not None:
        yield _NODE_LOST, node.lost_at_ns, Failure("node_lost", "NodeLost", node.lost, host=host)
    elif code == 0:
        text = "all its ranks ended with exit code 0 before training was complete"
        yield _LEFT_EARLY, None, Failure("exit", "EarlyExit", text, host=host)
    if code == -signal.SIGKILL:
        yield _TORCHRUN_KILLED, None, _killed("torchrun", None, host, node.kill)
    elif code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        text = f"torchrun ended with {how} and no rank reported an error"
        rule = _TORCHRUN_KILLED if code < 0 else _NO_TRACE
        yield rule, None, Failure("launcher", "LauncherDied", text, host=host)
    for death in _silent_deaths(node):
        yield from _of_death(death, node)


def _port_taken(node: NodeEvidence) -> Failure | None:
    texts = [str(error.get("message", "")) for error in node.errors if "Network" in str(error.get("type"))]
    for text in [*texts, *([node.log] if node.exit_code not in (0, None) else [])]:
        if (taken := _PORT_TAKEN.search(text)) is not None:
            port = _PORT_NUMBER.search(text, text.rfind("\n", 0, taken.start()) + 1) or _PORT_NUMBER.search(text)
            which = f"port {port[1]}" if port else "the port of the rendezvous"
            message = f"{which} of {node.node or 'the first node'} is taken: another process listens there"
            return Failure("port", "AddressInUse", message, host=node.node or None)
    return None


def _vanished_first(nodes: Sequence[NodeEvidence]) -> Iterator[Finding]:
    """The one silent rank that went before all others, if one did: nobody knows how it ended."""
    seen = [(death.at_ns, death.rank, death, node) for node in nodes for death in node.vanished if death.at_ns]
    seen.sort(key=lambda item: item[:2])
    is_one = bool(seen) and [at_ns for at_ns, *_ in seen[1:2]] != [seen[0][0]]
    if not is_one or any((node.exit_code or 0) < 0 for node in nodes):
        return
    at_ns, rank, death, node = seen[0]
    if death.exit_code is None and _is_silent(death, node) and (node.death is None or node.death.rank == rank):
        text = "the process was the first to end, before training was complete and without leaving an error"
        yield _VANISHED, at_ns, Failure("exit", "Vanished", text, rank=rank, host=node.node or None)


def _silent_deaths(node: NodeEvidence) -> list[Death]:
    """Known ends of ranks that left no error: what torchrun named, then what only the supervisor saw. Where torchrun
    ended well, so did all of its ranks, also those that it reaped unseen."""
    is_well, named = node.exit_code == 0, node.death
    seen = [death for death in node.vanished if is_well or death.exit_code is not None]
    known = [*([] if named is None else [named]), *(one for one in seen if named is None or one.rank != named.rank)]
    return [death for death in known if _is_silent(death, node)]


def _is_silent(death: Death, node: NodeEvidence) -> bool:
    return all(error.get("rank") != death.rank for error in node.errors)


def _from_error(error: Mapping[str, Any], node: NodeEvidence) -> Failure:
    """What a rank wrote of itself; it came over the network, so every value is checked."""
    kind = error.get("kind")
    phase = error.get("phase")
    return Failure(
        kind=cast(Kind, kind) if kind in RANK_KINDS else "exception",
        type=str(error.get("type", "Error"))[:MESSAGE_CHARACTERS],
        message=str(error.get("message", ""))[:MESSAGE_CHARACTERS],
        rank=integer(error, "rank"),
        host=node.node or None,
        step=integer(error, "step"),
        phase=phase[:MESSAGE_CHARACTERS] if isinstance(phase, str) else None,
        exit_code=2 if error.get("exit_code") == 2 else 1,
        memory=table(error, "memory") or None,
    )


def _of_death(death: Death, node: NodeEvidence) -> Iterator[Finding]:
    """Ranks abort of themselves, but they are terminated by somebody, and all are killed when torchrun is."""
    host, name = node.node or None, "" if death.signal is None else death.signal.name
    if not death.exit_code:
        text = "the process ended with exit code 0 before training was complete"
        rule, failure = _LEFT_EARLY, Failure("exit", "EarlyExit", text, rank=death.rank, host=host)
    elif death.signal is None:
        text = f"the process ended with exit code {death.exit_code} without leaving an error"
        rule, failure = _EXITED, Failure("exit", "SystemExit", text, rank=death.rank, host=host)
    elif death.signal is signal.SIGKILL:
        rule, failure = _KILLED, _killed("the process", death.rank, host, death.kill or node.kill)
    else:
        text = f"the process was ended by signal {int(death.signal)} ({name})"
        rule, failure = _KILLED, Failure("signal", name, text, rank=death.rank, host=host, signal=name)
    if death.signal in _ECHO_SIGNALS:
        rule = _ABORTED + _ECHO_SIGNALS.index(death.signal)
    elif rule == _KILLED and death is not node.death and (node.exit_code or 0) < 0:
        rule = _NO_TRACE
    yield rule, death.at_ns, failure


def _killed(what: str, rank: int | None, host: str | None, kill: KillFacts) -> Failure:
    """What SIGKILL ended: lack of memory if that is certain, else a signal of somebody."""
    if kill.evidence is not None:
        text = f"the kernel killed {what} (SIGKILL) because host memory ran out: {kill.evidence}"
        return Failure("oom", "OutOfMemory", text, rank=rank, host=host, signal="SIGKILL", memory=kill.memory)
    text = " ".join(filter(None, [f"{what} was ended by signal 9 (SIGKILL).", kill.hint]))
    if rank is None:
        return Failure("launcher", "LauncherDied", f"{text} No rank reported an error.", host=host, signal="SIGKILL")
    return Failure("signal", "SIGKILL", text, rank=rank, host=host, signal="SIGKILL")
