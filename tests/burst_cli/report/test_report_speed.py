"""A page of 200 runs takes no more of the processor per run than one of 20."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report_runs import make_runs

ROOT = Path(__file__).resolve().parents[3]
FEW, MANY = 20, 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {runs: tmp_path_factory.mktemp(f"of{runs}") for runs in (FEW, MANY)}
    for runs, folder in made.items():
        make_runs(folder, runs)
    return made


def test_many_runs_take_no_longer_each_than_few(folders: dict[int, Path], tmp_path: Path) -> None:
    seconds = {}
    for runs, folder in folders.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "burst_cli", "report", "--runs-dir", str(folder)]
        output = tmp_path / f"{runs}.html"
        result = subprocess.run(
            [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=500
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0, result.stderr
        assert f"{runs} runs" in result.stdout
        assert output.stat().st_size > 400 * runs
        seconds[runs] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds[MANY] < MANY / FEW * seconds[FEW]
