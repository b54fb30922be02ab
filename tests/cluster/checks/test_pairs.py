"""Which node is to blame for broken pairs; and agents as real processes of this machine, on its many addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from testkit import write_program
from testkit.connections import LocalConnection

from cluster.agent.messages import READY, pack
from cluster.agent.pairs import Greeter
from cluster.checks.check import Finding, Verdict
from cluster.checks.groups.net import check_pairs, judge_pairs, read_ways

OK, FAIL, UNKNOWN = Verdict.OK, Verdict.FAIL, Verdict.UNKNOWN
END_WAIT_S = 200.0  # who had to be ended by its deadline has another exit code


def judge(
    broken: Iterable[tuple[str, str]], *, kind: str = "timeout", nodes: str = "abcd", absent: str = ""
) -> dict[str, Finding]:
    """The findings when these directions are broken and all others work."""
    there, bad = [node for node in nodes if node != absent], set(broken)
    ways = {(one, other): kind if (one, other) in bad else "ok" for one in there for other in there if one != other}
    why = {absent: "python3 is not installed"} if absent else {}
    return {finding.node: finding for finding in judge_pairs(list(nodes), ways, why)}


def between(some: str, others: str) -> list[tuple[str, str]]:
    """Both directions of all pairs of these."""
    pairs = [(one, other) for one in some for other in others if one != other]
    return [*pairs, *((other, one) for one, other in pairs)]


@pytest.mark.parametrize(
    ("nodes", "broken", "failed"),
    [
        ("abcd", between("b", "d"), "bd"),
        ("abcd", [("b", "d")], "bd"),
        ("abcd", between("c", "abd"), "c"),  # cut off: it bears the blame alone
        ("abcdef", between("c", "abdef") + between("a", "b"), "abc"),  # cut off, and a broken pair
        ("abcd", between("ab", "cd"), "abcd"),  # two halves
        ("abcde", between("b", "ac"), "abc"),  # half of its pairs: not blamed alone
        ("abcde", between("de", "abcde"), "de"),
        ("ab", between("a", "b"), "ab"),
        ("abcdefghi", between("a", "b"), "ab"),
    ],
)
def test_who_is_to_blame(nodes: str, broken: list[tuple[str, str]], failed: str) -> None:
    found = judge(broken, nodes=nodes)
    assert {node for node, finding in found.items() if finding.severity is FAIL} == set(failed)
    assert {node for node, finding in found.items() if finding.severity is OK} == set(nodes) - set(failed)


def test_directions_and_cut_off_nodes_are_told() -> None:
    def said(found: dict[str, Finding]) -> list[str]:
        return [f"{finding.severity} {finding.observed}" for finding in found.values()]

    fine = "OK reaches 3 of 3 others"
    assert said(judge([("b", "d")], kind="refused")) == [fine, "FAIL b → d refused", fine, "FAIL b → d refused"]
    seen = "OK reaches 2 of 3 others; c cut off"
    ways = "a → c timeout, b → c timeout, c → a timeout, c → b timeout, c → d timeout, d → c timeout"
    lost = judge(between("c", "abd"))
    assert said(lost) == [seen, seen, f"FAIL cut off from 3 of 3 others: {ways}", seen]
    assert {finding.expected for finding in lost.values()} == {"TCP to and from all 3 others"}
    # A node without agent is no part of any pair.
    fine, absent = "OK reaches 2 of 2 others", "UNKNOWN not tested: python3 is not installed"
    assert said(judge([], absent="b")) == [fine, absent, fine, fine]
    assert said(judge([], nodes="ab", absent="b")) == ["UNKNOWN no other node could be tested", absent]
    many = judge(between("abcdef", "abcdef"), nodes="abcdef")["a"].observed
    assert (many.count("timeout"), many.endswith(" and 2 more")) == (8, True)


STRANGERS = [["stranger", "ok", "", 1.0], [["b"], "ok", "", 1.0]]


@pytest.mark.parametrize("results", [..., None, "ok", [["b", "ok", ""], 7, ["d", "ok", "", 1.0]], STRANGERS])
def test_what_an_agent_does_not_tell_was_not_tried(results: Any) -> None:
    ways = {(one, other): "ok" for one in "bc" for other in "abc" if one != other}
    told = read_ways("a", ["b", "c"], {} if results is ... else {"results": results})
    assert [finding.severity for finding in judge_pairs(list("abc"), {**ways, **told}, {})] == [UNKNOWN, OK, OK]


# Agents.


@pytest.fixture
def nodes() -> Iterator[dict[str, LocalConnection]]:
    """Three nodes; what is left of their processes is killed after the test."""
    connections = {f"n{at}": LocalConnection(f"n{at}") for at in range(1, 4)}
    yield connections
    for connection in connections.values():
        for process in connection.processes:
            process.end()


def check(nodes: Mapping[str, LocalConnection], **addresses: str) -> dict[str, Finding]:
    given = {node: f"127.0.0.{at}/8" for at, node in enumerate(nodes, start=11)}
    found = check_pairs(nodes, {**given, **addresses}, start_timeout_s=5.0)
    return {finding.node: finding for finding in found}


def test_nodes_that_reach_each_other_are_ok_and_all_agents_end(nodes: dict[str, LocalConnection]) -> None:
    found = check(nodes)
    assert [finding.severity for finding in found.values()] == [OK] * 3
    assert "reaches 2 of 2 others" in found["n1"].observed
    assert all(connection.processes[0].popen.wait(END_WAIT_S) == 0 for connection in nodes.values())


def test_no_python_no_address_and_an_address_of_others_are_unknown(
    nodes: dict[str, LocalConnection], tmp_path: Path
) -> None:
    nodes["n1"] = LocalConnection("n1", {"PATH": str(tmp_path)})
    found = check(nodes, n2="", n3="192.0.2.7")
    assert [finding.severity for finding in found.values()] == [UNKNOWN] * 3
    told = [f"{finding.observed} {finding.remedy}" for finding in found.values()]
    for words, text in zip(("burst needs Python 3.9", "no address", "cannot listen on 192.0.2.7"), told, strict=True):
        assert words in text


def python_that(folder: Path, script: str) -> dict[str, str]:
    """An environment in which python3 is this shell script; $REAL is the true one."""
    write_program(folder / "python3", f'REAL="{sys.executable}"\n{script}')
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_what_a_login_shell_prints_spoils_nothing(nodes: dict[str, LocalConnection], tmp_path: Path) -> None:
    banner = r"""printf 'Welcome!\n{"port": 1}\n@@0 {"port": 1}\n\377\n'; exec "$REAL" "$@" """
    nodes["n1"] = LocalConnection("n1", python_that(tmp_path, banner))
    assert [finding.severity for finding in check(nodes).values()] == [OK] * 3


def test_an_agent_that_ends_midway_takes_nobody_with_it(nodes: dict[str, LocalConnection], tmp_path: Path) -> None:
    (tmp_path / "told").write_bytes(READY + pack({"port": 9}))
    nodes["n1"] = LocalConnection("n1", python_that(tmp_path, f"cat {tmp_path / 'told'}"))
    # It listens nowhere, so it is cut off from all; what it reaches it did not say.
    assert [finding.severity for finding in check(nodes).values()] == [FAIL, OK, OK]


def listening(token: str = "ab" * 32) -> tuple[Greeter, tuple[str, int]]:
    """An agent within this process, and where it listens."""
    agent = Greeter()
    return agent, ("127.0.0.21", agent.answer({"listen": {"address": "127.0.0.21", "token": token}})[0]["port"])


def greet(agent: Greeter, timeout_s: float, *targets: tuple[str, str, int]) -> list[list[Any]]:
    return list(agent.answer({"greet": {"targets": targets, "timeout_s": timeout_s, "width": 64}})[0]["results"])


def test_every_way_of_not_reaching_an_agent_has_its_name() -> None:
    (agent, place), (_, elsewhere) = listening(), listening("cd" * 32)
    silent, unused, reset = (socket.socket() for _ in range(3))
    with silent, unused, reset:
        for one in (silent, unused, reset):
            one.bind(("127.0.0.23", 0))
        silent.listen()
        reset.listen()
        threading.Timer(0.3, reset.close).start()
        gone = greet(agent, 60.0, ("gone", *reset.getsockname()))
        places = {"silent": silent, "nobody": unused}
        targets = [(name, *one.getsockname()) for name, one in places.items()]
        targets += [("another test", *elsewhere), ("itself", *place), ("outside", "192.0.2.1", 9)]
        found = greet(agent, 1.0, *targets)
    assert [row[:3] for row in gone + found] == [
        ["gone", "reset", "Connection reset by peer"],
        ["silent", "timeout", "no answer"],
        ["nobody", "refused", "Connection refused"],
        ["another test", "stranger", "something else answers on that port"],
        ["itself", "ok", ""],
        ["outside", "error", "Invalid argument"],  # from an address of this machine alone
    ]
    assert (found[0][3] > 990, 0 < found[3][3] < found[0][3]) == (True, True)


def test_idle_connections_do_not_keep_an_agent_busy() -> None:
    agent, place = listening()
    with contextlib.ExitStack() as idle:
        for _ in range(100):
            idle.enter_context(socket.create_connection(place))
        assert greet(agent, 3.0, ("itself", *place))[0][:2] == ["itself", "ok"]
