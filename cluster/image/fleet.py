"""Agents on many nodes at once, asked the same question: the beginning of every push and prune."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.access.connection import Connection
from cluster.access.fanout import fan_out
from cluster.access.hosts import Host
from cluster.image.inventory import NodeSurvey, parse_survey
from cluster.image.node.frames import Message
from cluster.image.node.links import Limiter
from cluster.image.session import AgentSession
from cluster.remote_text import one_line

_GOODBYE_S = 2.0
ANSWER_S = 120.0  # engines with very many images take their time

Connect = Callable[[Host], Connection]


@dataclass
class Fleet:
    """Agents by node, what they say, and why other nodes have none."""

    sessions: dict[str, AgentSession] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    events: queue.Queue[tuple[str, Message]] = field(default_factory=queue.Queue)

    def ask(self, question: Callable[[str], Message], answer_op: str) -> dict[str, Message]:
        """Every node's answer to `question(node)`, a message with op `answer_op`; the others get a problem."""
        for name, session in self.sessions.items():
            session.send(question(name))
        answers: dict[str, Message] = {}
        deadline = time.monotonic() + ANSWER_S
        while self.sessions.keys() - answers.keys() - self.problems.keys():
            try:
                node, message = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                for name in self.sessions.keys() - answers.keys() - self.problems.keys():
                    self.problems[name] = f"its agent did not answer within {ANSWER_S:.0f} s"
                break
            if message["op"] == answer_op and node not in self.problems:
                answers[node] = message
            elif message["op"] in ("gone", "failed"):
                self.problems.setdefault(node, one_line(str(message.get("error")), 400))
                answers.pop(node, None)
        return answers

    def close(self, message: Message | None = None) -> None:
        """End all agents, with a last message if they are to end in order, and all connections."""
        sessions = list(self.sessions.values())
        if message is not None:
            fan_out([session.connection.host for session in sessions], lambda host: self._finish(host.name, message))
        for session in sessions:
            if session.is_abandoned:
                session.join_abandoned(_GOODBYE_S)
            else:
                session.close()
                session.connection.close()

    def _finish(self, node: str, message: Message) -> None:
        if node not in self.problems and not self.sessions[node].is_abandoned:
            self.sessions[node].finish(message)


@contextlib.contextmanager
def open_fleet(
    hosts: Sequence[Host], connect: Connect, *, limit: float | None = None, width: int = 64
) -> Iterator[Fleet]:
    """Agents on `hosts`; ended when the block ends, however it does."""
    fleet = Fleet()
    limiter = Limiter(limit)

    def work(host: Host) -> AgentSession:
        connection = connect(host)
        try:
            session = AgentSession(connection, limiter, lambda node, message: fleet.events.put((node, message)))
        except BaseException:
            connection.close()
            raise
        fleet.sessions[host.name] = session  # here, so that an interrupt does not lose it
        return session

    try:
        for name, outcome in fan_out(hosts, work, width=width).items():
            if outcome.error is not None:
                fleet.problems[name] = one_line(str(outcome.error), 400)
        yield fleet
    finally:
        fleet.close()


def survey_nodes(
    fleet: Fleet,
    hosts: Sequence[Host],
    *,
    engine: Sequence[str],
    image: dict[str, Any],
    shared_folder: str | None = None,
) -> list[NodeSurvey]:
    """What every node has of an image, in the order of `hosts`. image: its name, identity and diff ids ("layers")."""

    def question(node: str) -> Message:
        return {"op": "survey", "node": node, "engine": list(engine), "shared": shared_folder, **image}

    answers = fleet.ask(question, "survey")
    return [
        parse_survey(host.name, answers[host.name])
        if host.name in answers
        else NodeSurvey(host.name, problem=fleet.problems.get(host.name, "did not answer"))
        for host in hosts
    ]
