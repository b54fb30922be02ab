"""The command line in this process: `burst("config", "exp=tiny")` gives exit code, stdout and stderr."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from burst_cli.app import main


@dataclass(frozen=True)
class Result:
    """What one call of `burst` did."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: no configuration of the person who runs the tests, no run folder outside tmp_path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("BURST_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "320")
    return tmp_path


@pytest.fixture
def burst(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line in this process."""

    def run(*argv: str) -> Result:
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run
