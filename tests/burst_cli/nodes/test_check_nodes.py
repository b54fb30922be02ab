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

from burst_cli.nodes.check_nodes import CheckView, print_report, run_check
from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.group import Selection
from cluster.checks.run import CheckOptions
from cluster.errors import SshError, SshFailure
from engine.config.cluster import ClusterConfig

REFUSED = SshError("n3", SshFailure.REFUSED, "192.0.2.1 port 22 refuses connections", "is sshd running?")
FLEET = {"n1": HEALTHY, "n2": HEALTHY, "n3": REFUSED, "n4": answer({"host.disk": "warn"})}
NOBODY = ("--hosts", "127.0.0.1", "cluster.ssh.port=1")


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Slurm around the tests."""
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


def check(nodes: dict[str, Any], **options: Any) -> FleetReport:
    fleet = FakeFleet(nodes)
    return run_check(
        fleet.hosts, ClusterConfig(), CheckOptions(**{"all_groups": GROUPS, "connect": fleet.connect, **options})
    )


def shown(report: FleetReport, *, all_findings: bool = False, **console: Any) -> list[str]:
    stream = io.StringIO()
    settings = {"width": 200, "highlight": False, "emoji": False, **console}
    print_report(Console(file=stream, **settings), report, all_findings=all_findings)
    return stream.getvalue().splitlines()


def report_of(severity: Verdict, observed: str = "", **fields: str) -> FleetReport:
    return FleetReport({"n1": NodeReport("n1", (Finding("gpu.ecc", "n1", severity, observed, **fields),))}, 1.25)


def test_results_are_folded_and_the_last_line_names_the_usable_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    report = check(FLEET)
    lines = shown(replace(report, elapsed_s=2.04))
    assert (report.exit_code, lines[0], lines[1]) == (1, "n[1-2]: OK", "n4: WARN")
    assert lines[-6:-3] == [
        "n3: FAIL",
        "  FAIL    ssh.reach: 192.0.2.1 port 22 refuses connections; expected: a connection",
        "          → is sshd running?",
    ]
    assert lines[-3:] == ["", "not usable: n3", "usable: n[1-2,4] (3 of 4 nodes, 2.0 s)"]
    assert "[4/4]" in capsys.readouterr().err


def test_programs_get_names_or_one_document_and_nothing_else(burst: Burst) -> None:
    assert burst("check-nodes", *NOBODY, "--list")[:2] == (1, "")
    named = burst("check-nodes", "--local", "--only", "host.shm", "-l")
    document = burst("check-nodes", "--local", "--only", "host.shm", "--json").document
    assert named.out == f"{document['usable'][0]}\n"
    code, out, _ = burst("check-nodes", *NOBODY, "--json")
    document = json.loads(out)
    assert all(0 <= part.pop("elapsed_s") < 60 for part in (document, *document["nodes"].values()))
    finding = {
        **{"check": "ssh.reach", "node": "127.0.0.1", "severity": "FAIL", "device": None, "evidence": "refused"},
        **{"expected": "a connection", "observed": "127.0.0.1 port 1 refuses connections"},
        "remedy": "is sshd running?",
    }
    node = document["nodes"].pop("127.0.0.1")
    assert (code, document) == (1, {"nodes": {}, "usable": [], "notes": []})
    assert (node["verdict"], node["findings"]) == ("FAIL", [finding])


@pytest.mark.parametrize(("output", "code"), [("ok", 0), ("warn", 0), ("fail", 1), ("nonsense", 3)])
def test_exit_codes(output: str, code: int) -> None:
    assert check({"n1": HEALTHY, "n2": answer({"host.disk": output})}).exit_code == code


@pytest.mark.parametrize("words", [(), ("--local", "cluster.nodes=n9")])
def test_without_nodes_or_when_asked_to_this_machine_is_checked(
    burst: Burst, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    if words:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")  # as in a prolog
    (node,) = burst("check-nodes", *words, "--only", "host.shm,host.nofile", "--json").document["nodes"].values()
    assert {finding["check"] for finding in node["findings"]} <= {"host.shm", "host.nofile"}
    assert "ssh.reach" not in str(node)


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
        (["--no-local"], "No such option: --no-local"),
    ],
)
def test_mistakes_are_named_before_anything_is_asked(burst: Burst, argv: list[str], text: str) -> None:
    result = burst("check-nodes", *argv)
    assert (result.code, text in result.err, "Traceback" in result.err) == (2, True, False)


def test_explaining_checks_nothing(burst: Burst) -> None:
    code, out, _ = burst("check-nodes", "--explain", "ssh.clock")
    assert (code, out.startswith("ssh.clock: ")) == (0, True)


def test_text_of_nodes_is_no_markup_and_what_is_ok_is_shown_when_asked_for() -> None:
    words, remedy = "[bold]x[/] [link=http://x]y[/link] :smile:", "[red]do[/red]"
    lines = shown(report_of(Verdict.FAIL, words, remedy=remedy))
    assert (lines[1], lines[2]) == (f"  FAIL    gpu.ecc: {words}", f"          → {remedy}")
    fine, unknown = report_of(Verdict.OK, "0 errors"), report_of(Verdict.UNKNOWN)
    assert ["0 errors" in str(shown(fine, all_findings=wanted)) for wanted in (False, True)] == [False, True]
    assert shown(unknown)[-1] == "usable: none (0 of 1 nodes, 1.2 s)"


def test_on_a_terminal_long_findings_are_wrapped_beside_their_verdict() -> None:
    told = report_of(Verdict.FAIL, "2 uncorrectable errors", expected="0", remedy="drain the node and reset it")
    assert shown(told, width=40, force_terminal=True, color_system=None)[:6] == [
        "n1: FAIL",
        "  FAIL    gpu.ecc: 2 uncorrectable      ",
        "          errors; expected: 0           ",
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
        severity = Verdict.FAIL if name == "n2" else Verdict.OK
        found = [Finding("gpu.ecc", name, verdict, "gone") for verdict in (Verdict.OK, severity)]
        view.finished(NodeReport(name, tuple(found)))
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
