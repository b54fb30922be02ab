"""Agents as real processes of this machine, on addresses of 127.0.0.0/8: they connect, prove themselves, and end."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

import pytest
from testkit.local_connection import LocalConnection

from cluster.checks.finding import Finding, Verdict
from cluster.checks.pairs import check_pairs
from cluster.checks.pairs_agents import AGENT_ARGV, AgentError, PairAgent, running_agents
from cluster.errors import SshError

AGENT = files("cluster.probe") / "pair_agent.py"
END_WAIT_S = 5.0


@pytest.fixture
def nodes() -> Iterator[dict[str, LocalConnection]]:
    """Four nodes; what is left of their processes is killed after the test."""
    connections = {f"n{at}": LocalConnection(f"n{at}") for at in range(1, 5)}
    yield connections
    for connection in connections.values():
        for process in connection.processes:
            process.end()


def addresses(nodes: Mapping[str, LocalConnection]) -> dict[str, str]:
    return {node: f"127.0.0.{at}" for at, node in enumerate(nodes, start=11)}


def by_node(found: list[Finding]) -> dict[str, Finding]:
    return {finding.node: finding for finding in found}


def ends(connection: LocalConnection) -> bool:
    """Whether every process of the node ends by itself, soon."""
    try:
        return all(process.popen.wait(END_WAIT_S) is not None for process in connection.processes)
    except subprocess.TimeoutExpired:
        return False


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + END_WAIT_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def test_all_pairs_of_healthy_nodes_connect_and_the_agents_end(nodes: dict[str, LocalConnection]) -> None:
    found = check_pairs(nodes, addresses(nodes))
    assert [(one.node, one.severity) for one in found] == [(node, Verdict.OK) for node in nodes]
    assert "reaches 3 of 3 others" in found[0].observed
    assert all(ends(connection) for connection in nodes.values())


def test_addresses_may_carry_a_prefix_length_and_be_of_ipv6(nodes: dict[str, LocalConnection]) -> None:
    two = {name: nodes[name] for name in ("n1", "n2")}
    for pair in (("127.0.0.11/8", "127.0.0.12/24"), ("::1/128", "::1/128")):
        found = check_pairs(two, dict(zip(two, pair, strict=True)))
        assert {one.severity for one in found} == {Verdict.OK}


def test_one_node_has_no_pairs(nodes: dict[str, LocalConnection]) -> None:
    (finding,) = check_pairs({"n1": nodes["n1"]}, {"n1": "127.0.0.1"})
    assert finding.severity is Verdict.SKIP
    assert not nodes["n1"].processes


def test_a_node_without_python_is_unknown_and_says_what_to_install(
    nodes: dict[str, LocalConnection], tmp_path: Path
) -> None:
    nodes["n2"] = LocalConnection("n2", {"PATH": str(tmp_path)})
    found = by_node(check_pairs(nodes, addresses(nodes)))
    assert [one.severity for one in found.values()] == [Verdict.OK, Verdict.UNKNOWN, Verdict.OK, Verdict.OK]
    assert "python3 is not installed" in found["n2"].observed
    assert "install python3" in found["n2"].remedy


def test_a_node_without_address_or_with_one_of_others_is_unknown(nodes: dict[str, LocalConnection]) -> None:
    wrong = {**addresses(nodes), "n1": "", "n2": "192.0.2.7"}
    found = by_node(check_pairs(nodes, wrong))
    assert [one.severity for one in found.values()] == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.OK, Verdict.OK]
    assert "no address" in found["n1"].observed
    assert "cannot listen on 192.0.2.7" in found["n2"].observed


def python_that(folder: Path, script: str) -> dict[str, str]:
    """An environment in which python3 is this shell script; $REAL is the true one."""
    tool = folder / "python3"
    tool.write_text(f'#!/bin/sh\nREAL="{sys.executable}"\n{script}\n')
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_what_a_login_shell_prints_is_passed_over(nodes: dict[str, LocalConnection], tmp_path: Path) -> None:
    greeting = r'''printf 'Welcome!\n{"port": 1}\n@@0 {"port": 1}\n\377\n'; exec "$REAL" "$@"'''
    nodes["n1"] = LocalConnection("n1", python_that(tmp_path, greeting))
    assert {one.severity for one in check_pairs(nodes, addresses(nodes))} == {Verdict.OK}


@pytest.mark.parametrize(
    "script",
    ["exit 1", "echo Traceback >&2; exit 1", "head -c 9000000 /dev/zero", "kill -9 $$", "cat >/dev/null"],
)
def test_a_python_that_does_something_else_is_unknown(
    nodes: dict[str, LocalConnection], tmp_path: Path, script: str
) -> None:
    nodes["n1"] = LocalConnection("n1", python_that(tmp_path, script))
    found = by_node(check_pairs(nodes, addresses(nodes), start_timeout_s=8.0))
    assert [one.severity for one in found.values()] == [Verdict.UNKNOWN, Verdict.OK, Verdict.OK, Verdict.OK]


def test_an_agent_that_ends_midway_takes_nobody_with_it(nodes: dict[str, LocalConnection], tmp_path: Path) -> None:
    impostor = tmp_path / "impostor.py"
    impostor.write_text(
        "import json, sys\n"
        "data = sys.stdin.buffer\n"
        "data.read(int(data.readline()))\n"
        "print(json.loads(data.readline())['nonce'], json.dumps({'port': 9}), flush=True)\n"
        "data.readline()\n"
        "sys.exit(5)\n"
    )
    nodes["n1"] = LocalConnection("n1", python_that(tmp_path, f'exec "$REAL" {impostor}'))
    found = by_node(check_pairs(nodes, addresses(nodes)))
    # It listens nowhere, so it is cut off from all; what it reaches it did not say.
    assert found["n1"].severity is Verdict.FAIL
    assert {found[name].severity for name in ("n2", "n3", "n4")} == {Verdict.OK}


def greet(connection: LocalConnection, address: str = "127.0.0.21", deadline_s: float = 60.0) -> PairAgent:
    agent = PairAgent(connection.host.name, address, connection.start(AGENT_ARGV))
    agent.begin("ab" * 32, deadline_s)
    return agent


def test_an_agent_ends_when_its_input_ends_in_the_middle_of_a_greeting(nodes: dict[str, LocalConnection]) -> None:
    agent = greet(nodes["n1"])
    with socket.create_server(("127.0.0.23", 0)) as silent:
        request = {"targets": [["silent", *silent.getsockname()]], "timeout_s": 60, "width": 1, "id": 1}
        nodes["n1"].processes[0].write(json.dumps(request).encode() + b"\n")
        peer, _ = silent.accept()
        with peer:
            agent.close()
            assert ends(nodes["n1"])


def test_an_agent_ends_at_its_deadline_although_somebody_holds_its_input(nodes: dict[str, LocalConnection]) -> None:
    greet(nodes["n1"], deadline_s=1.5)
    assert nodes["n1"].processes[0].popen.wait(END_WAIT_S) == 3


def test_an_agent_past_its_deadline_says_so(nodes: dict[str, LocalConnection]) -> None:
    agent = greet(nodes["n1"], deadline_s=1.5)
    nodes["n1"].processes[0].popen.wait(END_WAIT_S)
    with pytest.raises((AgentError, SshError), match=r"deadline|no longer reads"):
        agent.ask({"targets": []}, 5.0)


@pytest.mark.parametrize("request_", [{"targets": 7}, {"targets": [7]}, {}])
def test_a_request_that_makes_no_sense_is_answered_with_an_error(
    nodes: dict[str, LocalConnection], request_: dict[str, object]
) -> None:
    assert "error" in greet(nodes["n1"]).ask(request_, 5.0)


def test_program_and_token_are_in_no_command_line(nodes: dict[str, LocalConnection]) -> None:
    with running_agents(nodes, addresses(nodes), 30.0) as group:
        pids = [nodes[node].processes[0].popen.pid for node in group.agents]
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert len(lines) == 4
    assert all(b"python3" in line and b"hmac" not in line and len(line) < 300 for line in lines)


def test_who_does_not_know_the_token_gets_no_service(nodes: dict[str, LocalConnection]) -> None:
    agent = greet(nodes["n1"])
    for greeting in (b"", b"GET / HTTP/1.0\r\n\r\n", b"burst-pair-1\n" + bytes(16) + bytes(32)):
        with socket.create_connection((agent.address, agent.port), timeout=END_WAIT_S) as peer:
            peer.sendall(greeting)
            data = b""
            with contextlib.suppress(OSError):  # it may be turned away already
                peer.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while more := peer.recv(4096):
                    data += more
            assert not data.endswith(b"+")
            assert len(data) <= 13 + 16 + 32


def test_an_agent_of_another_test_is_a_stranger(nodes: dict[str, LocalConnection]) -> None:
    one = greet(nodes["n1"])
    other = PairAgent("n2", "127.0.0.22", nodes["n2"].start(AGENT_ARGV))
    other.begin("cd" * 32, 60.0)
    request = {"targets": [other.target], "timeout_s": 2, "width": 4}
    (row,) = one.ask(request, 10.0)["results"]
    assert row[:2] == ["n2", "stranger"]


def test_a_port_where_nobody_listens_is_refused_and_a_silent_one_times_out(nodes: dict[str, LocalConnection]) -> None:
    agent = greet(nodes["n1"])
    with socket.socket() as silent, socket.socket() as unused:
        silent.bind(("127.0.0.23", 0))
        silent.listen()
        unused.bind(("127.0.0.23", 0))
        targets = [["silent", *silent.getsockname()], ["nobody", *unused.getsockname()]]
        answer = agent.ask({"targets": targets, "timeout_s": 2.0, "width": 2}, 10.0)
    kinds = {row[0]: row[1] for row in answer["results"]}
    assert kinds == {"silent": "timeout", "nobody": "refused"}


def test_idle_connections_of_strangers_do_not_keep_an_agent_busy(nodes: dict[str, LocalConnection]) -> None:
    one, other = greet(nodes["n1"]), greet(nodes["n2"], "127.0.0.22")
    idle = [socket.create_connection((other.address, other.port)) for _ in range(100)]
    request = {"targets": [other.target], "timeout_s": 3, "width": 1}
    (row,) = one.ask(request, 10.0)["results"]
    assert row[1] == "ok"
    for peer in idle:
        peer.close()


def test_the_agent_is_python_3_9_and_needs_nothing_installed() -> None:
    text = AGENT.read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
