"""`burst check-nodes`: what is printed where, for people and for programs, and with which exit code."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from testkit.check_fakes import GROUPS, HEALTHY, FakeFleet, answer
from testkit.command_line import Burst
from testkit.terminal import StrictConsole

from burst_cli.nodes.check_nodes import CheckView, print_report, run_check
from cluster.checks.check import Finding, FleetReport, NodeReport, Selection, Verdict
from cluster.checks.run import CheckOptions
from cluster.errors import SshError, SshFailure
from engine.config.cluster import ClusterConfig

REFUSED = SshError("n3", SshFailure.REFUSED, "192.0.2.1 port 22 refuses connections", "is sshd running?")
FLEET = {"n1": HEALTHY, "n2": HEALTHY, "n3": REFUSED, "n4": answer({"host.disk": "warn"})}
NOBODY = ("--hosts", "127.0.0.1", "cluster.ssh.port=1")


def check(nodes: dict[str, Any], ahead_s: float = 0.0, **options: Any) -> FleetReport:
    fleet = FakeFleet(nodes, dict.fromkeys(nodes, ahead_s))
    options = {"all_groups": GROUPS, "connect": fleet.connect, **options}
    return run_check(fleet.hosts, ClusterConfig(), CheckOptions(**options))


def shown(report: FleetReport, *, all_findings: bool = False, **console: Any) -> list[str]:
    stream = io.StringIO()
    settings = {"width": 200, "highlight": False, "emoji": False, **console}
    print_report(StrictConsole(file=stream, **settings), report, all_findings=all_findings)
    return stream.getvalue().splitlines()


def report_of(severity: Verdict, observed: str = "", **fields: str) -> FleetReport:
    return FleetReport({"n1": NodeReport("n1", (Finding("gpu.ecc", "n1", severity, observed, **fields),))}, 1.25)


def test_results_of_equal_nodes_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    report = check(FLEET, ahead_s=60.0)
    lines = shown(replace(report, elapsed_s=2.04))
    assert (report.exit_code, lines[0], lines[1]) == (1, "n[1-2]: OK", "n4: WARN")
    assert lines[-6:-3] == [
        "n3: FAIL",
        "  FAIL    ssh.reach: 192.0.2.1 port 22 refuses connections; expected: a connection",
        "          → is sshd running?",
    ]
    assert lines[-3:] == ["", "not usable: n3", "usable: n[1-2,4] (3 of 4 nodes, 2.0 s)"]
    *told, last = capsys.readouterr().err.splitlines()
    assert ([line[:6] for line in told], last[:21]) == ([f"[{n}/4] " for n in range(1, 5)], "warning: the clock of")


@pytest.mark.needs("ssh")
def test_machine_readable_output_of_check_nodes(burst: Burst) -> None:
    assert burst("check-nodes", *NOBODY, "--list")[:2] == (1, "")
    named = burst("check-nodes", "--local", "--only", "host.shm", "-l")
    document = burst("check-nodes", "--local", "--only", "host.shm", "--json").document
    assert named.out == f"{document['usable'][0]}\n"
    code, out, _ = burst("check-nodes", *NOBODY, "--json")
    document = json.loads(out)
    assert all(0 <= part.pop("elapsed_s") < 60 for part in (document, *document["nodes"].values()))
    finding = {"check": "ssh.reach", "node": "127.0.0.1", "severity": "FAIL", "device": None, "evidence": "refused"}
    finding |= {"expected": "a connection", "observed": "127.0.0.1 port 1 refuses connections"}
    finding["remedy"] = "is sshd running?"
    node = document["nodes"].pop("127.0.0.1")
    assert (code, document) == (1, {"nodes": {}, "usable": [], "notes": []})
    assert (node["verdict"], node["findings"]) == ("FAIL", [finding])


@pytest.mark.parametrize(("output", "code"), [("ok", 0), ("warn", 0), ("fail", 1), ("nonsense", 3)])
def test_exit_codes(output: str, code: int) -> None:
    assert check({"n1": HEALTHY, "n2": answer({"host.disk": output})}).exit_code == code


@pytest.mark.parametrize("words", [(), ("--local", "cluster.nodes=n9")])
def test_without_nodes_or_when_asked_to_this_machine_is_checked(burst: Burst, monkeypatch, words) -> None:
    if words:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")  # as in a prolog
    (node,) = burst("check-nodes", *words, "--only", "host.shm,host.nofile", "--json").document["nodes"].values()
    assert {finding["check"] for finding in node["findings"]} <= {"host.shm", "host.nofile"}


def test_a_check_between_nodes_says_that_it_needs_another(burst: Burst) -> None:
    result = burst("check-nodes", "--local", "--only", "net.pairs")
    assert (result.code, "net.pairs: it is made between nodes, and no other was reached" in result.out) == (3, True)


def test_what_is_found_between_nodes_is_not_missed_before_it_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def look(connections: Any, nodes: Any) -> list[Finding]:
        return [Finding("host.pair", name, Verdict.WARN, "slow") for name in nodes]

    group = replace(GROUPS[0], compared={"host.pair": ""}, between=lambda config: {"host.pair": look})
    report = check({"n1": HEALTHY, "n2": HEALTHY}, selection=Selection(only=("host.pair",)), all_groups=(group,))
    assert (report.exit_code, shown(report)[:2]) == (0, ["n[1-2]: WARN", "  WARN    host.pair: slow"])
    err = capsys.readouterr().err
    assert sorted(line.partition(" ")[2] for line in err.splitlines()) == ["n1: OK", "n2: OK"]


def test_mistakes_are_named_before_anything_is_asked(burst: Burst) -> None:
    for argv, text in [
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
        (["--no-local"], "No such option: --no-local"),
    ]:
        result = burst("check-nodes", *argv)
        assert (result.code, text in result.err, "Traceback" in result.err) == (2, True, False)


def test_explaining_checks_nothing(burst: Burst) -> None:
    code, out, _ = burst("check-nodes", "--explain", "ssh.clock")
    ((name, text),) = burst("check-nodes", "--explain", "ssh.clock", "--json").document["checks"].items()
    assert (code, name, out) == (0, "ssh.clock", f"ssh.clock: {text}\n")


def test_text_of_nodes_is_no_markup() -> None:
    words, remedy = "[bold]x[/] [link=http://x]y[/link] :smile:", "[red]do[/red]"
    lines = shown(report_of(Verdict.FAIL, words, remedy=remedy))
    assert (lines[1], lines[2]) == (f"  FAIL    gpu.ecc: {words}", f"          → {remedy}")


def test_passed_checks_are_shown_on_request() -> None:
    for fine in (Verdict.OK, Verdict.SKIP):
        told = [str(shown(report_of(fine, "0 errors"), all_findings=wanted)) for wanted in (False, True)]
        assert ["0 errors" in text for text in told] == [False, True]


def test_without_usable_nodes_the_last_line_says_none() -> None:
    last = ["", "not usable: n1", "usable: none (0 of 1 nodes, 1.2 s)"]
    assert shown(report_of(Verdict.UNKNOWN, "silent")) == ["n1: UNKNOWN", "  UNKNOWN gpu.ecc: silent", *last]


def test_on_a_terminal_long_findings_are_wrapped_beside_their_verdict() -> None:
    words = {"device": "GPU 2", "expected": "0", "remedy": "drain the node and reset it"}
    told = report_of(Verdict.FAIL, f"errors in {'x' * 40}", **words)
    assert shown(told, width=40, force_terminal=True, color_system=None)[:7] == [
        "n1: FAIL",
        "  FAIL    gpu.ecc (GPU 2): errors in    ",
        f"          {'x' * 30}",
        f"          {'x' * 10}; expected: 0       ",
        "          → drain the node and reset it ",
        "",
        "not usable: n1",
    ]


def view_of(nodes: int, *, terminal: bool) -> tuple[list[str], str]:
    """(what the status said, what was printed) of a check in which the second node fails."""
    stream, said = io.StringIO(), list[str]()
    names, console = [f"n{number}" for number in range(1, nodes + 1)], Console(file=stream, force_terminal=terminal)
    view = CheckView(console, names, lambda text: said.append(str(text)))
    for name in names:
        worst = Finding("gpu.ecc", name, Verdict.FAIL if name == "n2" else Verdict.OK, "gone")
        view.finished(NodeReport(name, (Finding("gpu.ecc", name, Verdict.OK, "there"), worst)))
    view.phase("comparing nodes")
    return said, stream.getvalue()


def test_progress_names_pending_nodes() -> None:
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
    said, printed = view_of(33, terminal=False)
    assert (said[0], printed) == ("0 of 33 nodes checked, 0 usable", "[2/33] n2: FAIL gpu.ecc: gone\n")
    said, printed = view_of(32, terminal=False)
    assert (said[0][-19:], printed.count("\n")) == ("waiting for n[1-32]", 32)
