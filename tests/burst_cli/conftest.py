"""No configuration of the person who runs the tests, no Slurm around them, no run folder outside of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("BURST_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "320")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    return tmp_path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where runs lie."""
    return tmp_path / "runs"
