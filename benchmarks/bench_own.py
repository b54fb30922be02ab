"""Predicted seconds per step over those of this machine's own runs: 12 small ones of 1 to 8 ranks, on a CPU.

Before the runs of a number of ranks `burst bench machine` measures the machine with as many; every run is then launched
with that profile, and its report holds what was predicted beside what was measured. Four runs are on two nodes of a
virtual cluster with shaped links (`burst testbed`, which needs root; without it they are left out, and said so).

Run it on a quiet machine; about seven minutes on two cores:

    python -m benchmarks.bench_own --output benchmarks/results/own_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least_1
from cluster.testbed.testbed import namespace_prefix
from engine.bench.measure import environment

ROOT = Path(__file__).resolve().parent.parent
TESTBED, RATE = "own", "400mbit"
COMMON = (
    *("exp=tiny", "data.tokenizer=bytes", "data.max_bytes=2000000", "train.eval_samples=1"),
    "train.checkpoint.at_end=false",
)
PROFILE = ("--head-dim", "64", "--heads", "4", "--backend", "gloo")


@dataclass(frozen=True)
class Case:
    """One run: ranks on so many nodes, and what it overrides of the experiment `tiny`."""

    ranks: int
    nodes: int
    seq_len: int
    attention: str
    memory: str = "none"

    @property
    def overrides(self) -> tuple[str, ...]:
        """As `burst launch` takes them."""
        chosen = (f"attention={self.attention}", f"memory={self.memory}", f"train.seq_len={self.seq_len}")
        if self.nodes == 1:
            return (*chosen, f"cluster.ranks_per_node={self.ranks}", "cluster.backend=gloo")
        place = (f"cluster={TESTBED}", f"cluster.ranks_per_node={self.ranks // self.nodes}", "cluster.backend=gloo")
        return (*place, *chosen, "cluster.threads_per_rank=1")  # every virtual node has all cores of this machine


CASES = (
    Case(1, 1, 1024, "single"),
    Case(1, 1, 2048, "single", "full"),
    Case(2, 1, 2048, "burst"),
    Case(2, 1, 2048, "ulysses", "attn_out"),
    Case(4, 1, 2048, "burst"),
    Case(4, 1, 4096, "ring", "attn_out"),
    Case(8, 1, 4096, "burst"),
    Case(8, 1, 4096, "usp", "full"),
    Case(2, 2, 2048, "burst"),
    Case(2, 2, 4096, "ring"),
    Case(4, 2, 4096, "burst"),
    Case(4, 2, 4096, "ulysses", "attn_out"),
)


def main() -> int:
    """The exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least_1, default=8, help="of every run; the first three do not count")
    parser.add_argument("--seconds", type=float, default=12.0, help="of every measurement of the machine")
    parser.add_argument("--only", type=at_least_1, nargs="+", metavar="N", help="these runs, counted from 1")
    parser.add_argument("--output", type=Path, help="where the results go, as JSON")
    options = parser.parse_args()
    cases = [case for number, case in enumerate(CASES, 1) if options.only is None or number in options.only]
    begin_s, facts, rows = time.monotonic(), environment(torch.device("cpu")), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="burst-own-") as name:
        folder = Path(name)
        for place in dict.fromkeys((case.ranks, case.nodes) for case in cases):
            here = [case for case in cases if (case.ranks, case.nodes) == place]
            if place[1] > 1 and os.geteuid() != 0:
                print(f"left out: {len(here)} runs on shaped links, which need root")
                continue
            with nodes_of(place[1]):
                profile = measure(folder, *place, options.seconds)
                for case in here:
                    rows.append(run(case, folder, profile, options.steps))
                    print(line(rows[-1]), flush=True)
    known = [row["predicted_over_measured"] for row in rows if row["predicted_over_measured"]]
    errors = [abs(ratio - 1) for ratio in known]
    found = {"median_error": statistics.median(errors) if errors else None, "elapsed_s": time.monotonic() - begin_s}
    print(
        f"median error {found['median_error']:.1%} of {len(errors)} runs, {found['elapsed_s']:.0f} s" if errors else ""
    )
    if options.output is not None:
        command = shlex.join(sys.orig_argv[1:])
        document = {"environment": facts, "command": command, "rate": RATE, **found, "results": rows}
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(len(known) < len(rows))


@contextmanager
def nodes_of(count: int) -> Iterator[None]:
    """The virtual cluster, where there is more than one node."""
    if count == 1:
        yield
        return
    burst("testbed", "up", "--name", TESTBED, "--nodes", str(count), "--rate", RATE)
    try:
        yield
    finally:
        burst("testbed", "down", "--name", TESTBED)


def measure(folder: Path, ranks: int, nodes: int, seconds: float) -> Path:
    """The profile of the machine with so many ranks."""
    path = folder / f"ranks{ranks}_nodes{nodes}.json"
    words = ["bench", "machine", "--ranks", str(ranks), "--nodes", str(nodes), "--seconds", str(seconds), *PROFILE]
    if nodes > 1:
        inside = f'exec ip netns exec {namespace_prefix(TESTBED)}{TESTBED}$(({{node}} + 1)) "$@"'
        words += ["--rank-command", shlex.join(["sh", "-c", inside, "rank"]), "--threads", "1"]
    burst(*words, "--output", str(path), GLOO_SOCKET_IFNAME="eth0" if nodes > 1 else "lo")
    return path


def run(case: Case, folder: Path, profile: Path, steps: int) -> dict[str, Any]:
    """What was predicted and measured of a run."""
    runs = folder / "runs"
    words = (*COMMON, *case.overrides, f"train.steps={steps}", f"cluster.machine.name={profile}")
    burst("launch", *words, "--runs-dir", str(runs), "--skip-checks")
    record = json.loads(burst("report", "--runs-dir", str(runs), "--latest", "--json"))["runs"][0]
    predicted, measured = record.get("predicted_step_time_s"), record.get("step_time_s")
    plan = json.loads((Path(record["path"]) / "memory_plan.json").read_text(encoding="utf-8"))
    return {
        **asdict(case),
        "predicted_s": predicted,
        "measured_s": measured,
        "measured_p25_s": record.get("step_time_s_p25"),
        "measured_p75_s": record.get("step_time_s_p75"),
        "predicted_over_measured": predicted / measured if predicted and measured else None,
        "parts": plan["step_time"]["parts"],
    }


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    what = f"{row['ranks']} ranks on {row['nodes']}, {row['seq_len']} tokens, {row['attention']}/{row['memory']}"
    if row["predicted_over_measured"] is None:
        return f"{what:44} failed"
    figures = f"{row['predicted_s']:.3f} s predicted, {row['measured_s']:.3f} measured"
    return f"{what:44} {figures}: {row['predicted_over_measured']:.2f}"


def burst(*words: str, **environment: str) -> str:
    """What a command prints; raises with its last words where it fails."""
    command = (sys.executable, "-m", "burst_cli", *words)
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
