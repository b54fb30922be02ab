"""scripts/setup_venv.sh: which Python it starts from, what it installs, and when it says that it is ready."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]

# Stands for an interpreter: writes down what it is asked to do. Its environments have copies of itself.
STAND_IN = """#!/bin/sh
case "$*" in
    *version_info*) exit $IS_OLD ;;
    "-") cat >/dev/null; exit $NO_ACCELERATOR ;;
    "-m venv "*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python"
        case "$*" in *--system*) echo "include-system-site-packages = true" ;; esac >"$folder/pyvenv.cfg" ;;
    *"pip install"*) [ -z "$PIP_FAILS" ] || exit 1 ;;
esac
echo "$*" >>"$LEDGER"
"""


class Machine:
    """A PATH with a stand-in for python3 and the tools of any system, and a checkout's script to run there."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.tools, self._ledger = folder / "venv", folder / "bin", folder / "ledger"
        self.tools.mkdir()
        for name in ("sh", "cat", "cp", "dirname", "grep", "mkdir", "rm", "touch"):
            (self.tools / name).symlink_to(str(shutil.which(name)))
        (self.tools / "python3").write_text(STAND_IN)
        (self.tools / "python3").chmod(0o755)

    def set_up(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.tools), "LEDGER": str(self._ledger), "IS_OLD": "0", "NO_ACCELERATOR": "1"}
        return subprocess.run(
            ["sh", str(ROOT / "scripts/setup_venv.sh"), str(self.venv)],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=200,
        )

    @property
    def is_ready(self) -> bool:
        return (self.venv / ".ready").exists()

    def asked(self, what: str) -> list[str]:
        """What interpreters were asked to do, of this kind."""
        return [line for line in self._ledger.read_text().splitlines() if what in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_torch_of_the_constraints_comes_first_then_burst_with_everything(machine: Machine) -> None:
    done = machine.set_up()
    assert (done.returncode, machine.is_ready) == (0, True), done.stderr
    assert machine.asked("venv ") == [f"-m venv {machine.venv}"]
    first, second = machine.asked("pip install")
    assert first.endswith(f"-c {ROOT}/constraints.txt hatchling {TORCH}")
    assert second.endswith(f"-c {ROOT}/constraints.txt --no-build-isolation -e {ROOT}[dev]")


def test_a_torch_for_accelerators_is_kept(machine: Machine) -> None:
    assert machine.set_up(NO_ACCELERATOR="0").returncode == 0
    assert machine.asked("venv ") == [f"-m venv --system-site-packages {machine.venv}"]
    constraints = machine.venv / "constraints.txt"
    installs = machine.asked("pip install")
    assert not any(TORCH in line for line in installs)
    assert all(f"-c {constraints} " in line for line in installs)
    left_out = set((ROOT / "constraints.txt").read_text().split()) - set(constraints.read_text().split())
    assert {name.partition("==")[0] for name in left_out} <= {"torch", "triton"}
    assert TORCH in left_out


def test_an_environment_that_exists_is_brought_up_to_date(machine: Machine) -> None:
    machine.set_up()
    assert machine.set_up().returncode == 0
    assert (len(machine.asked("venv ")), len(machine.asked("pip install"))) == (1, 4)


def test_a_failed_installation_leaves_nothing_that_looks_ready(machine: Machine) -> None:
    machine.set_up()
    assert machine.set_up(PIP_FAILS="yes").returncode != 0
    assert not machine.is_ready


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"IS_OLD": "1"}, "no Python >= 3.11 found"),
        ({"IS_OLD": "1", "PYTHON": "python3"}, "PYTHON=python3 does not run or is older than Python 3.11"),
        ({"PYTHON": "/no/such/python"}, "PYTHON=/no/such/python does not run"),
    ],
)
def test_without_a_python_that_is_new_enough_it_says_what_to_do(
    machine: Machine, variables: dict[str, str], words: str
) -> None:
    done = machine.set_up(**variables)
    assert (done.returncode, machine.venv.exists()) == (1, False)
    assert words in done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(3600)  # it downloads torch
def test_the_environment_runs_burst_with_the_versions_of_the_constraints(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["sh", str(ROOT / "scripts/setup_venv.sh"), str(tmp_path / "venv")]
    subprocess.run(command, env=environment, check=True, timeout=3500)
    python = str(tmp_path / "venv/bin/python")
    subprocess.run([python, "-m", "burst_cli", "config", "exp=tiny"], cwd=tmp_path, check=True, capture_output=True)
    frozen = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    installed, pinned = versions(frozen), versions((ROOT / "constraints.txt").read_text())
    assert {"torch", "typer", "pytest"} <= set(installed)
    assert {name: found for name, found in installed.items() if found != pinned.get(name, found)} == {}


def versions(lines: str) -> dict[str, str]:
    """Package -> version, without the build."""
    pairs = (line.split("==") for line in lines.splitlines() if "==" in line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version.partition("+")[0] for name, version in pairs}
