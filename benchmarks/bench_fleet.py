"""`burst check-nodes` on a fleet of simulated nodes: time, CPU and memory, beside ClusterShell's `clush`.

The nodes are SSH servers in one process on this machine (tests/testkit/fleet.py); they answer the probe's script with
what a node with eight H100 and thirteen adapters (fake ones, of the testbed) answered to it once. `burst` and `clush`
bring the same answers home; `verb` is `burst check-nodes`, which judges and compares them, too. Every twentieth node
is faulty: refusing, silent, with another host key, refusing our key, breaking off. All read the same SSH configuration,
work on 64 nodes at a time and give up on a connection after the same time; they take turns. Times are of whole
processes, start to end.

    python -m benchmarks.bench_fleet --output benchmarks/results/fleet_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.survey.section import Question

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

FAULTS = ("refuse", "silent", "wrong_key", "deny", "die")
WIDTH = 64
# A process of its own in between: the kernel counts the memory of the process that forked as a peak of the child, too.
_USAGE = """
import resource, subprocess, sys
subprocess.run(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    file.write(f"{used.ru_utime + used.ru_stime} {used.ru_maxrss}")
"""


@dataclass(frozen=True)
class Turn:
    """One run of one tool. peak_rss_bytes: of its largest process. answers: nodes whose answer came whole."""

    tool: str
    elapsed_s: float
    cpu_s: float
    peak_rss_bytes: int
    answers: int
    failed: tuple[str, ...]


def questions() -> list[Question]:
    """What check-nodes asks."""
    from cluster.checks.selection import GROUPS

    return [question for group in GROUPS for question in group.questions]


def plan_modes(nodes: int) -> dict[str, str]:
    """A mode for every node; every twentieth is faulty, each fault in turn."""
    names = [f"node{number:04}" for number in range(1, nodes + 1)]
    return {name: FAULTS[k // 20 % len(FAULTS)] if k % 20 == 10 else "ok" for k, name in enumerate(names)}


def record_answer() -> bytes:
    """What a node of the testbed answers to the probe, with the fleet's placeholder for the fence."""
    from testkit.fleet import FENCE

    from cluster.survey.facts import build_script
    from cluster.testbed.hardware.files import hardware_files

    script = build_script(questions(), FENCE.decode())
    with tempfile.TemporaryDirectory() as folder:
        for name, file in hardware_files("h100x8", "node0001", 1, ()).items():
            file.write(Path(folder, name))
        environment = os.environ | {"BURST_PROBE_ROOT": f"{folder}/root", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        answer = subprocess.run(
            ["sh", "-s"], input=script, env=environment, capture_output=True, check=True, timeout=300
        )
    return answer.stdout


def run_verb(config_file: Path, names: Sequence[str], timeout_s: float) -> Turn:
    """One turn of the whole verb. The nodes are one machine that cannot run agents: no connects between them."""
    settings = (f"cluster.ssh.config_file={config_file}", f"cluster.ssh.connect_timeout_s={timeout_s}")
    command = [sys.executable, "-m", "burst_cli", "check-nodes", *settings, "--skip=net.pairs", "--json"]
    output, turn = _timed("verb", [*command, "--hosts", ",".join(names)], subprocess.DEVNULL, subprocess.DEVNULL)
    nodes = json.loads(output)["nodes"]
    reached = {"check": "ssh.reach", "severity": "FAIL"}.items()
    failed = [name for name, node in nodes.items() if any(reached <= finding.items() for finding in node["findings"])]
    judged = sum(any(finding["check"] == "gpu.count" for finding in node["findings"]) for node in nodes.values())
    return Turn(*turn, judged, tuple(sorted(failed)))


def run_burst(config_file: Path, names: Sequence[str], timeout_s: float) -> Turn:
    """One turn of ours, as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_fleet", "client", str(config_file), str(timeout_s)]
    with tempfile.TemporaryFile() as stdin:
        stdin.write("\n".join(names).encode())
        stdin.seek(0)
        output, turn = _timed("burst", command, stdin)
    report = json.loads(output)
    return Turn(*turn, report["answers"], tuple(report["failed"]))


def run_clush(config_file: Path, names: Sequence[str], timeout_s: float) -> Turn:
    """One turn of clush with the same script; who failed is read from its messages."""
    from cluster.survey.facts import build_script, new_delimiter

    fence = new_delimiter()
    options = f"-F {config_file} -o ConnectTimeout={timeout_s:.0f}"
    command = ["clush", "-f", str(WIDTH), "-S", "-w", ",".join(names), "-o", options, "sh", "-s"]
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(build_script(questions(), fence))
        stdin.seek(0)
        output, turn = _timed("clush", command, stdin, stderr)
        stderr.seek(0)
        ends = [line.split() for line in stderr.read().decode(errors="replace").splitlines() if "exited with" in line]
    failed = [words[1].rstrip(":") for words in ends if words[0] == "clush:"]
    return Turn(*turn, output.count(f"{fence} done".encode()), tuple(sorted(failed)))


def probe_fleet(config_file: Path, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The client: every node's probe, parsed; who answered and why the others did not."""
    from cluster.ssh.hosts import Host, fan_out, resolve_hosts
    from cluster.ssh.session import SshPool
    from cluster.survey.facts import build_script, new_delimiter, read_sections
    from engine.config.cluster import SshConfig

    hosts = resolve_hosts(names, SshConfig(config_file=str(config_file), connect_timeout_s=timeout_s))
    with SshPool() as pool:

        def probe(host: Host) -> int:
            fence = new_delimiter()
            with pool.connect(host) as connection:
                result = connection.run(["sh", "-s"], stdin=build_script(questions(), fence))
            return len(read_sections(result.stdout, fence))

        outcomes = fan_out(hosts, probe, width=WIDTH)
    failed = {name: str(outcome.error) for name, outcome in outcomes.items() if outcome.error is not None}
    return {"answers": sum(bool(outcome.value) for outcome in outcomes.values()), "failed": failed}


def _timed(
    tool: str, command: Sequence[str], stdin: Any, stderr: Any = None
) -> tuple[bytes, tuple[str, float, float, int]]:
    """(stdout, (tool, seconds, CPU seconds, peak RSS)) of a process and all that it waited for."""
    with tempfile.TemporaryFile() as stdout, tempfile.NamedTemporaryFile() as usage:
        begin = time.monotonic()
        wrapped = [sys.executable, "-S", "-c", _USAGE, usage.name, *command]
        subprocess.run(wrapped, stdin=stdin, stdout=stdout, stderr=stderr, cwd=ROOT, check=False)
        elapsed = time.monotonic() - begin
        cpu_s, peak_kib = Path(usage.name).read_text().split()
        stdout.seek(0)
        return stdout.read(), (tool, elapsed, float(cpu_s), int(peak_kib) * 1024)


def measure(nodes: int, repeats: int, timeout_s: float, *, with_clush: bool) -> dict[str, Any]:
    """All turns on one fleet, and the medians."""
    from testkit.fleet import start_fleet

    modes = plan_modes(nodes)
    faulty = tuple(name for name, mode in modes.items() if mode != "ok")
    tools = [run_burst, run_clush, run_verb] if with_clush else [run_burst, run_verb]
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder, start_fleet(Path(folder), modes, record=record_answer()) as fleet:
        for repeat in range(repeats):
            in_turn = tools if repeat % 2 == 0 else tools[::-1]
            turns.extend(run(fleet.config_file, fleet.names, timeout_s) for run in in_turn)
    medians = {
        tool: statistics.median(turn.elapsed_s for turn in turns if turn.tool == tool)
        for tool in dict.fromkeys(turn.tool for turn in turns)
    }
    ratio = medians["burst"] / medians["clush"] if "clush" in medians else None
    return {
        "nodes": nodes,
        "faulty": len(faulty),
        "turns": [asdict(turn) | {"faulty_named": set(turn.failed) == set(faulty)} for turn in turns],
        "median_s": medians,
        "ratio_to_clush": ratio,
    }


def show(figures: dict[str, Any]) -> None:
    """Prints a table."""
    print(f"{figures['nodes']} nodes, {figures['faulty']} faulty")
    print(f"{'tool':>6} {'s':>7} {'CPU s':>7} {'peak MiB':>9} {'answers':>8} {'faulty named':>13}")
    for turn in figures["turns"]:
        peak = turn["peak_rss_bytes"] / 2**20
        named = "all" if turn["faulty_named"] else "NOT ALL"
        seconds = f"{turn['elapsed_s']:7.2f} {turn['cpu_s']:7.2f}"
        print(f"{turn['tool']:>6} {seconds} {peak:9.1f} {turn['answers']:8} {named:>13}")
    if figures["ratio_to_clush"] is not None:
        print(f"ratio of medians, burst to clush: {figures['ratio_to_clush']:.2f}")


def main() -> None:
    """Measures, prints and writes; `client` is what a turn of ours runs."""
    if sys.argv[1:2] == ["client"]:
        names = sys.stdin.read().split()
        json.dump(probe_fleet(Path(sys.argv[2]), names, float(sys.argv[3])), sys.stdout)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connect-timeout", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch  # not in a client, whose memory is measured

    from engine.bench.measure import environment

    before = environment(torch.device("cpu"))
    with_clush = shutil.which("clush") is not None
    figures = measure(args.nodes, args.repeats, args.connect_timeout, with_clush=with_clush)
    show(figures)
    if args.output:
        command = shlex.join(["python", "-m", "benchmarks.bench_fleet", *sys.argv[1:]])
        args.output.write_text(json.dumps({"command": command, "environment": before, **figures}, indent=1))


if __name__ == "__main__":
    main()
