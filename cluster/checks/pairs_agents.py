"""Agents on nodes that are tested against each other: started over SSH, asked by JSON lines, gone when we are."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from cluster.access.connection import Connection, RemoteProcess
from cluster.access.fanout import fan_out
from cluster.errors import ClusterError, SshError
from cluster.remote_text import one_line

START_TIMEOUT_S = 15.0
_END_WAIT_S = 2.0
_READ_BYTES = 1 << 16
_ANSWER_BYTES = 4 << 20
# Reads the program from stdin by its length and runs it, so that nothing of it is in argv or on a disk. Isolated: no
# module of the node's folders or of the user is imported.
_BOOTSTRAP = "import sys;i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),'pair_agent','exec'))"
AGENT_ARGV = ("python3", "-I", "-S", "-c", _BOOTSTRAP)


class AgentError(ClusterError):
    """The agent of a node could not be started, or answered what it must not; `remedy` says what to do."""

    def __init__(self, text: str, remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(text)


@dataclass(frozen=True)
class AgentGroup:
    """agents: by node. absent: why the other nodes have none."""

    agents: Mapping[str, PairAgent]
    absent: Mapping[str, AgentError | SshError]


class PairAgent:
    """The agent of one node, listening at `address`, `port`. One request at a time."""

    def __init__(self, node: str, address: str, process: RemoteProcess) -> None:
        self.node, self.address, self.port = node, address, 0
        self._process = process
        self._nonce = f"@@{secrets.token_hex(12)}"
        self._buffer = b""
        self._requests = 0

    def begin(self, token: str, deadline_s: float, timeout_s: float = START_TIMEOUT_S) -> None:
        """Send program and greeting; learn the port."""
        program = (files("cluster.probe") / "pair_agent.py").read_bytes()
        greeting = {"nonce": self._nonce, "token": token, "address": self.address, "deadline_s": deadline_s}
        until = time.monotonic() + timeout_s
        with contextlib.suppress(SshError):  # why it does not read is in what it says
            self._process.write(b"%d\n%s%s\n" % (len(program), program, json.dumps(greeting).encode()))
        answer = self._answer(until)
        if "error" in answer:
            remedy = "give the nodes addresses of their own: see cluster.interface"
            raise AgentError(f"cannot listen on {self.address}: {one_line(str(answer['error']))}", remedy)
        self.port = _whole_number(answer.get("port"))

    @property
    def target(self) -> list[Any]:
        """How other agents are told of this one."""
        return [self.node, self.address, self.port]

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The answer to a request. Raises AgentError or SshError."""
        self._requests += 1
        self._process.write(json.dumps({**request, "id": self._requests}).encode() + b"\n")
        until = time.monotonic() + timeout_s
        while True:
            answer = self._answer(until)
            if answer.get("id") == self._requests:
                return answer

    def close(self) -> None:
        """End it: its input ends."""
        self._process.close_stdin()
        self._process.close()

    def _answer(self, until: float) -> dict[str, Any]:
        """The next line of the agent; what else the login shell printed is passed over."""
        mark = self._nonce.encode() + b" "
        while True:
            line = self._line(until)
            if not line.startswith(mark):
                continue
            try:
                answer = json.loads(line[len(mark) :].decode())
            except ValueError as error:
                raise AgentError("the agent's answer is no JSON") from error
            if not isinstance(answer, dict):
                raise AgentError("the agent's answer is no object")
            return answer

    def _line(self, until: float) -> bytes:
        while b"\n" not in self._buffer:
            more = self._process.read(_READ_BYTES, max(0.01, until - time.monotonic()))
            if not more:
                raise self._ended()
            self._buffer += more
            if len(self._buffer) > _ANSWER_BYTES:
                raise AgentError("the agent's answer is too long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> AgentError:
        """Why there is no agent, by exit code and the words on stderr."""
        result = self._process.wait(_END_WAIT_S)
        said = one_line(result.stderr or self._buffer, 160)
        if result.exit_code == 127:
            return AgentError("python3 is not installed", "install python3 (3.9 or newer): the pair tests run in it")
        if result.exit_code == 3:
            return AgentError("the agent came to its deadline")
        return AgentError(f"the agent ended with exit code {result.exit_code}{f': {said}' if said else ''}")


@contextlib.contextmanager
def running_agents(
    connections: Mapping[str, Connection],
    addresses: Mapping[str, str],
    deadline_s: float,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[AgentGroup]:
    """Agents on all nodes that have an address and python3; they end with the `with` block, or at the deadline.

    addresses: by node, IPv4 or IPv6, with or without a prefix length.
    """
    token = secrets.token_hex(32)
    agents: dict[str, PairAgent] = {}
    absent: dict[str, AgentError | SshError] = {}

    def start(node: str) -> None:
        if not addresses.get(node):
            raise AgentError("no address to test was chosen", "see the findings of group net, and cluster.interface")
        agent = PairAgent(node, addresses[node].partition("/")[0], connections[node].start(AGENT_ARGV))
        agents[node] = agent
        agent.begin(token, deadline_s, start_timeout_s)

    try:
        hosts = [connection.host.with_name(node) for node, connection in connections.items()]
        for node, outcome in fan_out(hosts, lambda host: start(host.name)).items():
            if isinstance(outcome.error, AgentError | SshError):
                absent[node] = outcome.error
            elif outcome.error is not None:
                absent[node] = AgentError(str(outcome.error))
        yield AgentGroup({node: agents[node] for node in connections if node not in absent}, absent)
    finally:
        for agent in list(agents.values()):
            agent.close()


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or not 0 < value < 65536:
        raise AgentError("the agent told no port")
    return value
