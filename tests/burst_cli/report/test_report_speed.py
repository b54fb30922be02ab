"""500 runs are reported in seconds."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report_runs import make_runs

ROOT = Path(__file__).resolve().parents[3]
RUNS = 500
# Seconds of processor time. On an idle machine the page takes about 3, table and JSON about 1; a shared core is slower.
LIMITS = {"json": 6.0, "html": 12.0}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    make_runs(folder, RUNS)
    return folder


@pytest.mark.parametrize("format", ["json", "html"])
def test_500_runs_take_seconds(many: Path, tmp_path: Path, format: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "burst_cli", "report", "--runs-dir", str(many), "--format", format]
    output = tmp_path / f"r.{format}"
    result = subprocess.run([*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=200)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert f"{RUNS} runs" in result.stdout
    assert output.stat().st_size > 200_000
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMITS[format]
