"""Which rank or node failed first, and how: from what ranks wrote, what torchrun and the nodes saw. Pure functions.

torchrun's own "root cause" is often the victim: a rank that lost its peer fails loudly, while the one that was killed
says nothing. On several nodes it is worse: each torchrun knows its own ranks only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from cluster.values import integer

Kind = Literal[
    "config", "user", "oom", "exception", "peer_lost",  # as ranks say themselves
    "signal", "exit", "hang", "node_lost", "port", "start", "launcher",
]  # fmt: skip
RANK_KINDS = ("config", "user", "oom", "exception", "peer_lost")
MESSAGE_CHARACTERS = 4_000

_FIRST_DEATH = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT = re.compile(r"\bport:? (\d{1,5})\b")
# NCCL aborts ranks that lost a peer; torchrun terminates the rest, which may end as if interrupted.
_ECHO_SIGNALS = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
_NO_TIME = 2**63


@dataclass(frozen=True)
class Failure:
    """What ended a run. `rank` is None when no rank is to blame; `signal` is a name such as SIGKILL.

    host: the node's name. memory: what `engine.runs.oom.OutOfMemory` says and what was predicted, under kind oom.
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


_Candidate = tuple[int | None, Failure]  # when, and what


def find_failure(nodes: Sequence[NodeEvidence]) -> Failure:
    """The failure that came first, whatever order `nodes` and their errors are in.

    The rules in their order: a rank that a signal ended without a word beats all that others say; then the earliest
    error that is a rank's own; a node that was lost and a torchrun that died beat ranks that only noticed; ranks that
    ended silently; last, those that lost a peer.
    """
    rules: tuple[Callable[[Sequence[NodeEvidence]], Iterator[_Candidate]], ...] = (
        _port_taken, _killed_silently, _own_errors, _lost_nodes, _agent_killed, _exited_silently, _left_early,
        _vanished_first, _aborted, _errors_of_others,
    )  # fmt: skip
    for rule in rules:
        found = min(rule(nodes), default=None, key=_order)
        if found is not None:
            return found[1]
    return _no_trace(nodes)


def _order(candidate: _Candidate) -> tuple[int, int, str]:
    """Earliest first; without a time the lowest rank decides."""
    at_ns, failure = candidate
    rank = _NO_TIME if failure.rank is None else failure.rank
    return (_NO_TIME if at_ns is None else at_ns, rank, failure.host or "")


def _port_taken(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    """The rendezvous could not listen; everybody else then waits in vain."""
    for node in nodes:
        texts = [str(error.get("message", "")) for error in node.errors if "Network" in str(error.get("type"))]
        if node.exit_code not in (0, None):
            texts.append(node.log)
        for text in texts:
            taken = _PORT_TAKEN.search(text)
            if taken is None:
                continue
            line_start = text.rfind("\n", 0, taken.start()) + 1
            port = _PORT.search(text, line_start) or _PORT.search(text)
            which = f"port {port[1]}" if port else "the port of the rendezvous"
            message = f"{which} of {node.node or 'the first node'} is taken: another process listens there"
            yield (None, Failure("port", "AddressInUse", message, host=node.node or None))


def _killed_silently(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    for node in nodes:
        for death in _silent_deaths(node):
            if death.signal not in (None, *_ECHO_SIGNALS) and (death is node.death or not _agent_died(node)):
                yield (death.at_ns, _from_death(death, node))


def _own_errors(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    """Errors that are no echo; those that came after a node was lost are one, whatever they say."""
    lost_at = min((node.lost_at_ns for node in nodes if node.lost is not None and node.lost_at_ns), default=_NO_TIME)
    for node, error in _errors(nodes):
        if not _is_echo(error) and _time(error, default=0) < lost_at:
            yield (_time(error), _from_error(error, node))


def _lost_nodes(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    for node in nodes:
        if node.lost is not None:
            yield (node.lost_at_ns, Failure("node_lost", "NodeLost", node.lost, host=node.node or None))


def _agent_killed(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    """torchrun itself was ended by a signal, and its ranks with it."""
    for node in nodes:
        if _agent_died(node):
            assert node.exit_code is not None
            if node.exit_code == -signal.SIGKILL:
                yield (None, _killed("torchrun", None, node.node or None, node.kill))
            else:
                yield (None, _launcher_died(node))


def _exited_silently(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    for node in nodes:
        for death in _silent_deaths(node):
            if death.exit_code and death.signal is None:
                yield (death.at_ns, _from_death(death, node))


def _left_early(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    """Ranks that ended well too early, so that those of other nodes lost them."""
    if all(node.exit_code == 0 for node in nodes):
        return
    for node in nodes:
        host = node.node or None
        if node.exit_code == 0 and node.lost is None:
            text = "all its ranks ended with exit code 0 before training was complete"
            yield (None, Failure("exit", "EarlyExit", text, host=host))
        for death in _ended_well(node):
            text = "the process ended with exit code 0 before training was complete"
            yield (death.at_ns, Failure("exit", "EarlyExit", text, rank=death.rank, host=host))


def _ended_well(node: NodeEvidence) -> list[Death]:
    """Ranks that ended with 0; where torchrun did, too, all of its ranks had, also those that it reaped unseen."""
    if node.exit_code == 0:
        return [death for death in node.vanished if not death.exit_code and _is_silent(death, node)]
    return [death for death in _silent_deaths(node) if death.exit_code == 0]


def _vanished_first(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    """The one silent rank that went before all others, if one did: nobody knows how it ended."""
    if any(_agent_died(node) for node in nodes):
        return
    seen = [(death, node) for node in nodes for death in node.vanished if death.at_ns is not None]
    seen.sort(key=lambda item: (item[0].at_ns or 0, item[0].rank))
    if not seen or (len(seen) > 1 and seen[0][0].at_ns == seen[1][0].at_ns):
        return
    death, node = seen[0]
    if death.exit_code is None and _is_silent(death, node) and (node.death is None or node.death.rank == death.rank):
        text = "the process was the first to end, before training was complete and without leaving an error"
        yield (death.at_ns, Failure("exit", "Vanished", text, rank=death.rank, host=node.node or None))


def _aborted(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    """SIGABRT before SIGTERM: ranks abort of themselves, but they are terminated by somebody."""
    for number in _ECHO_SIGNALS:
        found = [(death, node) for node in nodes for death in _silent_deaths(node) if death.signal is number]
        for death, node in found:
            yield (death.at_ns, _from_death(death, node))
        if found:
            return


def _errors_of_others(nodes: Sequence[NodeEvidence]) -> Iterator[_Candidate]:
    for node, error in _errors(nodes):
        yield (_time(error), _from_error(error, node))


def _no_trace(nodes: Sequence[NodeEvidence]) -> Failure:
    """No rank is to blame: what the first torchrun that failed did, or that none did."""
    failed = [node for node in nodes if node.exit_code not in (0, None)]
    if failed:
        return _launcher_died(min(failed, key=lambda node: node.node))
    return Failure("launcher", "Incomplete", "all ranks ended without an error before training was complete")


def _launcher_died(node: NodeEvidence) -> Failure:
    code = node.exit_code or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    text = f"torchrun ended with {how} and no rank reported an error"
    return Failure("launcher", "LauncherDied", text, host=node.node or None)


def _agent_died(node: NodeEvidence) -> bool:
    return node.exit_code is not None and node.exit_code < 0


def _silent_deaths(node: NodeEvidence) -> list[Death]:
    """Known ends of ranks that left no error: what torchrun named, then what only the supervisor saw."""
    named = [] if node.death is None else [node.death]
    known = [death for death in node.vanished if death.exit_code is not None and death.rank not in _ranks(named)]
    return [death for death in [*named, *known] if _is_silent(death, node)]


def _ranks(deaths: Sequence[Death]) -> set[int]:
    return {death.rank for death in deaths}


def _is_silent(death: Death, node: NodeEvidence) -> bool:
    return all(error.get("rank") != death.rank for error in node.errors)


def _is_echo(error: Mapping[str, Any]) -> bool:
    return bool(error.get("is_echo", error.get("kind") == "peer_lost"))


def _errors(nodes: Sequence[NodeEvidence]) -> Iterator[tuple[NodeEvidence, Mapping[str, Any]]]:
    return ((node, error) for node in nodes for error in node.errors)


def _time(error: Mapping[str, Any], default: int | None = None) -> Any:
    time_ns = error.get("time_ns")
    return time_ns if isinstance(time_ns, int) else default


def _from_error(error: Mapping[str, Any], node: NodeEvidence) -> Failure:
    """What a rank wrote of itself; it came over the network, so every value is checked."""
    kind = error.get("kind")
    memory = error.get("memory")
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
        memory=memory if isinstance(memory, Mapping) else None,
    )


def _from_death(death: Death, node: NodeEvidence) -> Failure:
    host = node.node or None
    if death.signal is None:
        text = f"the process ended with exit code {death.exit_code} without leaving an error"
        return Failure("exit", "SystemExit", text, rank=death.rank, host=host)
    if death.signal is signal.SIGKILL:
        return _killed("the process", death.rank, host, death.kill or node.kill)
    name = death.signal.name
    text = f"the process was ended by signal {int(death.signal)} ({name})"
    return Failure("signal", name, text, rank=death.rank, host=host, signal=name)


def _killed(what: str, rank: int | None, host: str | None, kill: KillFacts) -> Failure:
    """What SIGKILL ended: lack of memory if that is certain, else a signal of somebody."""
    if kill.evidence is not None:
        text = f"the kernel killed {what} (SIGKILL) because host memory ran out: {kill.evidence}"
        return Failure("oom", "OutOfMemory", text, rank=rank, host=host, signal="SIGKILL", memory=kill.memory)
    text = " ".join(filter(None, [f"{what} was ended by signal 9 (SIGKILL).", kill.hint]))
    if rank is None:
        return Failure("launcher", "LauncherDied", f"{text} No rank reported an error.", host=host, signal="SIGKILL")
    return Failure("signal", "SIGKILL", text, rank=rank, host=host, signal="SIGKILL")
