"""`make mutants`: what counts as noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
def test_passes(): pass
def test_fails(): assert False
"""
SLOW = """
import pytest
def pytest_sessionfinish(session):
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
"""


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/mutants.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import mutants

    return mutants


@pytest.mark.parametrize(
    ("conftest", "tests", "how"),
    [
        ("", "passes", "survived"),
        ("", "passes fails", "failed"),
        ("import nothing_of_this_name", "passes", "failed"),
        ("", "passes gone", "open"),
        (SLOW, "passes", "open"),
    ],
)
def test_a_mutant_is_caught_by_a_test_that_fails_and_by_nothing_else(
    mutants: Any, tmp_path: Path, conftest: str, tests: str, how: str
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "conftest.py").write_text(conftest)
    (copy / "test_it.py").write_text(TESTS)
    assert mutants.run([f"test_it.py::test_{name}" for name in tests.split()], copy) == how


def test_what_is_not_decided_stands_beside_the_rates(mutants: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mutant = mutants.Mutant("engine/config/reader.py", 1, 0, 1, "b", "a", "a")
    mutants.show([mutants.Outcome(mutant, how, 1.0) for how in ("failed", "open", "survived", "late", "open")])
    (line,) = {tuple(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if "caught" in line}
    assert line == ("1", "of", "3", "caught", "33.3%", "2", "not", "decided")


def test_equivalent_mutants_are_of_lines_that_are_there(mutants: Any) -> None:
    for row in mutants._equivalents():
        lines = [line.strip() for line in (ROOT / row["path"]).read_text().splitlines()]
        assert row["line"] in lines, row
        assert row["before"] in row["line"], row


@pytest.mark.parametrize("source", ["zip(a, b, strict=True)", 'read(encoding="utf-8")', "wait(now < deadline)"])
def test_what_nobody_could_notice_is_no_mutant(mutants: Any, source: str) -> None:
    (found,) = mutants.mutants_of("a.py", f"{source}\n").values()
    assert [mutant.text for mutant in found] == ["None"]


def test_whether_there_is_a_limit_of_time_at_all_is_a_mutant(mutants: Any) -> None:
    (found,) = mutants.mutants_of("a.py", "wait(deadline is None)\n").values()
    assert [mutant.text for mutant in found] == ["None", "is not"]
