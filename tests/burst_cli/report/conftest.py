"""Runs of three methods at two lengths, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_samples import make_methods


@pytest.fixture(scope="session")
def methods_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    make_methods(folder)
    return folder


@pytest.fixture
def methods(burst, methods_dir: Path):
    """`burst report` of the runs of several methods."""
    return lambda *words: burst("report", "--runs-dir", str(methods_dir), *words)
