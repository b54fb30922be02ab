"""Seconds of `burst report` on hundreds of runs, each format in a process of its own, as a user waits for it.

    python -m benchmarks.bench_report --runs 500 --repeats 3

Prints the machine, then median and range of the wall clock per format. The runs are made up by `report_runs`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report_runs import make_runs

FORMATS: dict[str, tuple[str, ...]] = {
    "table": (),
    "json": ("--json",),
    "csv": ("--format", "csv"),
    "html with plots": ("--format", "html", "--output", "report.html"),
    "html, effective time": ("--format", "html", "--output", "report.html", "--effective"),
    "png": ("--format", "csv", "--output", "report.csv", "--png", "report.png"),
}


def measure(folder: Path, arguments: tuple[str, ...], repeats: int) -> list[float]:
    """Wall clock of `repeats` calls, each a new process; the file cache is warm after the first."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        command = [sys.executable, "-m", "burst_cli", "report", "--runs-dir", str(folder / "runs"), *arguments]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Measures every format and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="rows of metrics.jsonl per run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_runs(folder / "runs", options.runs, steps=options.steps)
        print(f"{options.runs} runs of {options.steps} steps; {platform.platform()}, {os.cpu_count()} cores")
        for title, arguments in FORMATS.items():
            seconds = measure(folder, arguments, options.repeats)
            print(
                f"{title:22} {statistics.median(seconds):6.2f} s  ({min(seconds):.2f}…{max(seconds):.2f})", flush=True
            )


if __name__ == "__main__":
    main()
