"""`burst check-nodes`: what is printed where, for people and for programs, and with which exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from testkit.check_fakes import GROUPS, HEALTHY, FakeFleet, answer
from testkit.command_line import Burst

from burst_cli.nodes.check_nodes import Output, run_check
from burst_cli.nodes.check_view import CheckView, print_report
from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.run import CheckOptions
from cluster.checks.selection import Selection
from cluster.errors import SshError, SshFailure
from engine.config.settings import RunConfig

REFUSED = SshError("n3", SshFailure.REFUSED, "192.0.2.1 port 22 refuses connections", "is sshd running?")
FLEET = {"n1": HEALTHY, "n2": HEALTHY, "n3": REFUSED, "n4": answer({"host.disk": "warn"})}


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Slurm around the tests."""
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


def check(nodes: dict[str, Any], output: Output | None = None) -> int:
    fleet = FakeFleet(nodes)
    options = CheckOptions(all_groups=GROUPS, connect=fleet.connect)
    return run_check(fleet.hosts, RunConfig(), options, output or Output())


def text_of(print_to: Callable[[Console], None], **console: Any) -> str:
    stream = io.StringIO()
    print_to(Console(file=stream, **{"width": 200, "highlight": False, "emoji": False, **console}))
    return stream.getvalue()


def fleet_report(**told: tuple[Finding, ...]) -> FleetReport:
    return FleetReport({name: NodeReport(name, findings) for name, findings in told.items()}, 1.25)


def finding(node: str, severity: Verdict, observed: str = "", **fields: str) -> Finding:
    return Finding("gpu.ecc", node, severity, observed, **fields)


# Of the verb.


def test_results_are_folded_and_the_last_line_names_the_usable_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(FLEET) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "n[1-2]: OK"
    assert "n3: FAIL" in out
    assert "  FAIL    ssh.reach: 192.0.2.1 port 22 refuses connections; expected: a connection" in out
    assert "→ is sshd running?" in out
    assert out.splitlines()[-2] == "not usable: n3"
    assert out.splitlines()[-1].startswith("usable: n[1-2,4] (3 of 4 nodes, ")
    assert "[4/4]" in err


def test_the_list_is_names_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(FLEET, Output(names_only=True)) == 1
    assert capsys.readouterr().out == "n[1-2,4]\n"
    check({"n1": answer({"host.disk": "fail"})}, Output(names_only=True))
    assert capsys.readouterr().out == ""


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(FLEET, Output(as_json=True)) == 1
    document = json.loads(capsys.readouterr().out)
    assert all(0 <= part.pop("elapsed_s") < 60 for part in (document, *document["nodes"].values()))
    assert document.keys() == {"nodes", "usable", "notes"}
    assert (document["usable"], document["notes"]) == (["n1", "n2", "n4"], [])
    told = {name: node["verdict"] for name, node in document["nodes"].items()}
    assert told == {"n1": "OK", "n2": "OK", "n3": "FAIL", "n4": "WARN"}
    assert document["nodes"]["n3"]["findings"] == [
        {
            "check": "ssh.reach",
            "node": "n3",
            "severity": "FAIL",
            "observed": "192.0.2.1 port 22 refuses connections",
            "expected": "a connection",
            "remedy": "is sshd running?",
            "device": None,
            "evidence": "refused",
        }
    ]


@pytest.mark.parametrize(("output", "code"), [("ok", 0), ("warn", 0), ("fail", 1), ("nonsense", 3)])
def test_exit_codes(output: str, code: int) -> None:
    assert check({"n1": HEALTHY, "n2": answer({"host.disk": output})}) == code


@pytest.mark.parametrize("words", [(), ("--local", "cluster.nodes=n9")])
def test_without_nodes_or_when_asked_to_this_machine_is_checked(
    burst: Burst, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    if words:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")  # as in a prolog
    result = burst("check-nodes", *words, "--only", "host.shm,host.nofile", "--json")
    document = json.loads(result.out)
    (node,) = document["nodes"].values()
    assert {finding["check"] for finding in node["findings"]} <= {"host.shm", "host.nofile"}
    assert "ssh.reach" not in str(node)


def test_a_check_between_nodes_says_that_it_needs_another(burst: Burst) -> None:
    result = burst("check-nodes", "--local", "--only", "net.pairs")
    assert (result.code, "net.pairs: it is made between nodes, and no other was reached" in result.out) == (3, True)


def test_what_is_found_between_nodes_is_not_missed_before_it_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def look(connections: Any, nodes: Any) -> list[Finding]:
        return [Finding("host.pair", name, Verdict.WARN, "slow") for name in nodes]

    fleet = FakeFleet({"n1": HEALTHY, "n2": HEALTHY})
    group = replace(GROUPS[0], compared={"host.pair": ""}, between=lambda config: {"host.pair": look})
    options = CheckOptions(Selection(only=("host.pair",)), all_groups=(group,), connect=fleet.connect)
    assert run_check(fleet.hosts, RunConfig(), options, Output()) == 0
    out, err = capsys.readouterr()
    assert sorted(line.partition(" ")[2] for line in err.splitlines()) == ["n1: OK", "n2: OK"]
    assert out.splitlines()[:2] == ["n[1-2]: WARN", "  WARN    host.pair: slow"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--json", "--list"], "give one of them"),
        (["--local", "--hosts", "n1"], "takes no --hosts"),
        (["--only", "gpus"], "expected a group"),
        (["--skip", "ssh"], "is not usable"),
        (["--hosts", "n[1-"], "not in the grammar"),
        (["--hosts", "-oProxyCommand=id"], "is no host name"),
        (["--explain", "gpu.nonsense"], "lists the checks of a group"),
        (["--timeout", "0"], "--timeout"),
        (["--dry-run"], "the launch of --collectives"),
        *((["--collectives", *words], "makes no checks") for words in (["--only", "gpu"], ["--list"])),
        (["--cuda-smoke"], "is gone: --collectives"),
    ],
)
def test_mistakes_are_named_before_anything_is_asked(burst: Burst, argv: list[str], text: str) -> None:
    result = burst("check-nodes", *argv)
    assert result.code == 2
    assert text in result.err
    assert "Traceback" not in result.err


def test_explaining_checks_nothing(burst: Burst) -> None:
    result = burst("check-nodes", "--explain", "ssh.clock")
    assert result.code == 0
    assert result.out.startswith("ssh.clock: ")


# What is shown.


def test_text_of_nodes_is_no_markup() -> None:
    hostile = finding("n1", Verdict.FAIL, "[bold]x[/] [link=http://x]y[/link] :smile:", remedy="[red]do[/red]")
    shown = text_of(lambda console: print_report(console, fleet_report(n1=(hostile,))))
    assert "[bold]x[/] [link=http://x]y[/link] :smile:" in shown
    assert "[red]do[/red]" in shown


def test_on_a_terminal_long_findings_are_wrapped_beside_their_verdict() -> None:
    told = finding("n1", Verdict.FAIL, "2 uncorrectable errors", expected="0", remedy="drain the node and reset it")
    shown = text_of(
        lambda console: print_report(console, fleet_report(n1=(told,))),
        width=40,
        force_terminal=True,
        color_system=None,
    )
    assert shown.splitlines()[:6] == [
        "n1: FAIL",
        "  FAIL    gpu.ecc: 2 uncorrectable      ",
        "          errors; expected: 0           ",
        "          → drain the node and reset it ",
        "",
        "not usable: n1",
    ]


def test_what_is_ok_is_shown_when_asked_for() -> None:
    report = fleet_report(n1=(finding("n1", Verdict.OK, "0 errors"),))
    assert "0 errors" not in text_of(lambda console: print_report(console, report))
    assert "0 errors" in text_of(lambda console: print_report(console, report, all_findings=True))


def test_no_usable_node_is_said_plainly() -> None:
    shown = text_of(lambda console: print_report(console, fleet_report(n1=(finding("n1", Verdict.UNKNOWN),))))
    assert shown.splitlines()[-1] == "usable: none (0 of 1 nodes, 1.2 s)"


def view_of(nodes: int, *, terminal: bool) -> tuple[list[str], str]:
    """(what the status said, what was printed) of a check in which the second node fails."""
    stream, said = io.StringIO(), list[str]()
    names = [f"n{number}" for number in range(1, nodes + 1)]
    view = CheckView(
        Console(file=stream, force_terminal=terminal, width=100), names, lambda text: said.append(str(text))
    )
    for name in names:
        severity = Verdict.FAIL if name == "n2" else Verdict.OK
        view.finished(NodeReport(name, (finding(name, Verdict.OK), finding(name, severity, "gone"))))
    view.phase("comparing nodes")
    return said, stream.getvalue()


def test_a_terminal_shows_who_is_waited_for_and_a_file_gets_lines() -> None:
    said, printed = view_of(3, terminal=True)
    assert printed == ""
    assert said == [
        "0 of 3 nodes checked, 0 usable; waiting for n[1-3]",
        "1 of 3 nodes checked, 1 usable; waiting for n[2-3]",
        "2 of 3 nodes checked, 1 usable; waiting for n3",
        "3 of 3 nodes checked, 2 usable",
        "3 of 3 nodes checked, 2 usable; comparing nodes",
    ]
    assert view_of(3, terminal=False)[1] == "[1/3] n1: OK\n[2/3] n2: FAIL gpu.ecc: gone\n[3/3] n3: OK\n"
    said, printed = view_of(500, terminal=False)
    assert (said[1], printed) == ("1 of 500 nodes checked, 1 usable", "[2/500] n2: FAIL gpu.ecc: gone\n")
