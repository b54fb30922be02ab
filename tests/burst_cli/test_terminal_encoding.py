"""Terminals and pipes that are not UTF-8: every verb prints, in ASCII where a sign is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.run_maker import make_run, write_log

from burst_cli.app import VERBS

WORDS = {
    "launch": "exp=tiny --dry-run --skip-checks",
    "sweep": "exp=tiny train.steps=1,2 --dry-run",
    "status": "aaaaaa",
    "logs": "aaaaaa",
    "report": "tiny",
    "model": "/nowhere/\u6a21\u578b",
    "plan": "exp=tiny --device cpu --details --memory-by none attention=auto",
    "config": "--fields --groups",
    "checkpoint": "list aaaaaa",
    "hosts": "list -w node1",
    "image": "list",
    "testbed": "status",
    "env": "show",
}


def run(encoding: str, *words: str, runs: Path) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "BURST_RUNS_DIR": str(runs), "COLUMNS": "100"}
    command = [sys.executable, "-m", "burst_cli", *words]
    return subprocess.run(command, capture_output=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that failed, whose log has other scripts."""
    folder = tmp_path_factory.mktemp("runs")
    made = make_run(folder, state="failed", steps=40, exit_code=1)
    write_log(made, "tb1", 0, "\u8bad\u7ec3 \u2026 \u00e9 fertig\n")
    return folder


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_no_verb_fails_for_the_encoding(verb: str, encoding: str, runs: Path) -> None:
    words = WORDS.get(verb, "--help").split()
    usual, other = (run(one, verb, *words, runs=runs) for one in ("utf-8", encoding))
    printed = other.stdout + other.stderr
    assert (other.returncode, b"bug in burst" in printed) == (usual.returncode, False), printed
    printed.decode(encoding)


@pytest.mark.parametrize("words", ["--help", "launch --help", "lanch"])
def test_help_and_mistakes_are_ascii_there(words: str, runs: Path) -> None:
    result = run("ascii", *words.split(), runs=runs)
    assert b"Usage: " in result.stdout + result.stderr or b"No such command" in result.stderr


def test_a_document_is_the_same_in_any_encoding(runs: Path) -> None:
    words = ("config", "exp=tiny", "model.name='\u00e9\u6a21'", "--json")
    assert json.loads(run("ascii", *words, runs=runs).stdout)["config"]["model"]["name"] == "\u00e9\u6a21"


def test_yaml_that_is_printed_reads_back_the_same(runs: Path) -> None:
    from engine.config.yaml_text import load_yaml

    shown = run("ascii", "config", "exp=tiny", "model.name='\u00e9\u6a21'", runs=runs).stdout.decode("ascii")
    assert load_yaml(shown)["model"]["name"] == "\u00e9\u6a21"
