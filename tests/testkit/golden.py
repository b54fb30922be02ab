"""A pytest plugin: `golden("traces/ring.txt", text)` compares with a file of tests/golden; --update-golden rewrites it.

A golden file is a screen or a document as users see it, read by people when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "golden"
Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--update-golden."""
    parser.addoption("--update-golden", action="store_true", help="Rewrite the files of tests/golden; review the diff.")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with a golden file, or write it with --update-golden."""
    updates = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = FOLDER / name
        if updates:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"tests/golden/{name} is missing: run pytest --update-golden and review it"
        expected = path.read_text(encoding="utf-8")
        assert text == expected, f"differs from tests/golden/{name}: if that is meant, run pytest --update-golden"

    return compare
