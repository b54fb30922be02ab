"""`make gpu` on a CPU: its script with every part at a small size, without hydra, hypothesis and their like."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testkit import ROOT

# What the image of a GPU machine may lack; `sitecustomize` below makes them look as if they were not installed.
LACKING = (
    "hydra",
    "omegaconf",
    "paramiko",
    "hypothesis",
    "jinja2",
    "matplotlib",
    "pytest_timeout",
    "xdist",
    "tensorboard",
    "torchao",
)
LEAN_MACHINE = f"""
import sys
from importlib.machinery import PathFinder

class LeanFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {LACKING!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = LeanFinder
"""
PARTS = ["overlap", "tiles", "blocked", "elementwise", "offload", "loss", "steps", "parity"]
MEASURED = {"label", "status", "error"}
SECONDS = 240


def run_script(
    folder: Path, *arguments: str, test_seconds: int = 60, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """scripts/gpu.sh on a machine without the packages of LACKING."""
    (folder / "sitecustomize.py").write_text(LEAN_MACHINE)
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins that are not there
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CI": "1",
        "OMP_NUM_THREADS": "1",
        "GPU_SECONDS": str(SECONDS),
        "GPU_TEST_SECONDS": str(test_seconds),
    }
    command = ["sh", "scripts/gpu.sh", str(python), "--device", "cpu", "--size", "small"]
    return subprocess.run(
        [*command, "--output-dir", str(folder), *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS + 60,
    )


def stand_in(folder: Path, what: str) -> Path:
    """A python that does `what` when it is told to run the module $2."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{what}\n")
    python.chmod(0o755)
    return python


def test_gpu_tests_are_collected_without_the_packages_of_a_development_environment(tmp_path: Path) -> None:
    tests_alone = stand_in(tmp_path, f'[ "$2" != pytest ] || exec {sys.executable} "$@"')
    done = run_script(tmp_path, test_seconds=180, python=tests_alone)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ skipped, \d+ deselected", done.stdout), done.stdout
    marked = {path.name for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert marked - {Path(__file__).name} == set(re.findall(r"SKIPPED .*?/(test_\w+\.py)", done.stdout))


def test_gpu_benchmarks_start_without_them_too(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--help", test_seconds=0)
    assert done.returncode == 0, done.stdout
    assert "usage: bench_gpu.py" in done.stdout, done.stdout


@pytest.mark.thorough
def test_the_whole_command_measures_every_part(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stdout
    document, page = (next(tmp_path.glob(f"gpu_*.{kind}")).read_text() for kind in ("json", "md"))
    check_results(json.loads(document))
    check_page(json.loads(document), page)


def check_results(document: dict[str, Any]) -> None:
    """Every part has figures, which are exact and possible."""
    assert document["complete"]
    assert document["seconds"] < document["budget_s"] < SECONDS
    assert [part["name"] for part in document["parts"]] == PARTS
    rows = {part["name"]: [row for row in part["rows"] if row["status"] == "measured"] for part in document["parts"]}
    for name in PARTS[1:]:
        assert rows[name], name
        assert all(row.keys() >= MEASURED and row["error"] is None for row in rows[name])
    assert {row["kernel"] for row in rows["tiles"]} == {"reference", "cpu_flash"}
    assert {(row["mask"], row["kv_heads"]) for row in rows["tiles"]} == {
        (mask, kv_heads) for mask in ("causal", "full") for kv_heads in (4, 2)
    }
    assert {row["kind"] for row in rows["blocked"]} == {"whole ring", "one rank"}
    assert {row["kind"] for row in rows["loss"]} == {"fused", "plain"}
    assert {row["preset"] for row in rows["parity"]} == {"burst", "ulysses"}
    assert all(row["losses"][-1] < row["losses"][1] for row in rows["steps"])
    for row in (row for row in rows["blocked"] if row["kind"] == "whole ring"):
        for name in ("out", "dq", "dk", "dv"):
            # bf16 rounds to 2^-9; at these lengths single elements make up much of the difference between the two.
            assert 0 < row[f"blocked_{name}_error"] <= 2 * row[f"whole_{name}_error"] < 2**-6
    for row in rows["parity"]:
        assert max(row["loss_difference"], row["gradient_difference"]) < 1e-5  # float32, sums in another order
    ratios = [row["measured_over_predicted"] for row in rows["steps"]]
    assert [ratio for ratio in ratios if ratio is not None] == [pytest.approx(1.0, abs=0.05)]
    for row in (row for part in document["parts"] for row in part["rows"]):
        shares = [value for key, value in row.items() if key.endswith("_of_peak")]
        assert (max(shares, default=0.0) > 1) == (row["status"] == "above peak"), row


def check_page(document: dict[str, Any], page: str) -> None:
    """A table per part, all goals, and what is missing with its reason."""
    assert all(f"## {part['title']}" in page for part in document["parts"])
    assert all(f"| {goal['target']} | {goal['verdict']} |" in page for goal in document["targets"])
    assert "dry run" in page
    assert "Not complete" not in page
    for line in ("kernel", "what", "loss", "preset", "layers"):
        assert re.search(rf"^\| {line} \|", page, flags=re.MULTILINE), line
    (tiles,) = [part for part in document["parts"] if part["name"] == "tiles"]
    missing = {row["label"]: row["error"] for row in tiles["rows"] if row["status"] == "not available"}
    assert "runs on cuda only" in missing["aten_cudnn"]
    assert "- not available: aten_cudnn: " in page


@pytest.mark.parametrize("benchmarks_exit", [0, 1])
def test_a_failed_test_run_does_not_keep_the_benchmarks_from_running(tmp_path: Path, benchmarks_exit: int) -> None:
    python = stand_in(tmp_path, 'echo "$*"; [ "$2" != pytest ] || exit 3; exit "$BENCHMARKS_EXIT"')
    environment = os.environ | {"BENCHMARKS_EXIT": str(benchmarks_exit), "GPU_SECONDS": "300"}
    done = subprocess.run(
        ["sh", "scripts/gpu.sh", python, "--only", "tiles"], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    tests, benchmarks = done.stdout.splitlines()
    assert tests.startswith("-m pytest -m gpu")
    first = [re.sub(r".*/", "", word) for word in tests.split() if word.endswith(".py")][:3]
    assert set(first) == {"test_kernels_on_gpu.py", "test_streams_on_gpu.py", "test_fused_kernels_on_gpu.py"}
    budget = re.fullmatch(r"-m benchmarks.bench_gpu --budget-s (\d+) --only tiles", benchmarks)
    assert budget is not None
    assert 270 <= int(budget[1]) <= 275
    assert "GPU tests: exit code 3" in done.stderr
    assert ("benchmarks: exit code 1" in done.stderr) == (benchmarks_exit == 1)
    assert done.returncode == 1
