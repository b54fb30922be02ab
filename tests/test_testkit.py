"""The plugins of the suite itself: cases that cover every pair, and the pace."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from testkit import PYTHON_PATH, ROOT
from testkit.covering import covering
from testkit.needs import ABILITIES, closing_line, read_packages

from cluster.testbed.machine import required_tools

pytest_plugins = ("pytester",)

NAP = "import time, pytest\n{decorator}\ndef test_naps():\n    time.sleep({seconds})\n"


def test_chosen_cases_hold_every_pair_of_values() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in itertools.product("01234", "0123", "012")]
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) < len(cases) / 2
    for first, second in itertools.combinations("abc", 2):
        assert {(c[first], c[second]) for c in chosen} == {(c[first], c[second]) for c in cases}


@pytest.mark.parametrize(
    ("seconds", "mark", "is_named", "code"),
    [(0.0, "", False, 0), (0.9, "", True, 0), (1.8, "", True, 1), (1.8, "thorough", False, 0)],
)
def test_a_test_over_its_limit_is_named_and_far_over_it_fails_the_session_unless_it_is_thorough(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, seconds: float, mark: str, is_named: bool, code: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("CI", "1")
    pytester.makeconftest(
        "from testkit import pace\npace.TEST_S, pace.REFERENCE_S = 0.4, 1.0\npytest_plugins = ('testkit.pace',)\n"
    )
    pytester.makeini("[pytest]\nmarkers = thorough\n")
    decorator = f"@pytest.mark.{mark}" if mark else ""
    pytester.makepyfile(NAP.format(decorator=decorator, seconds=seconds))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == code, result.outlines
    assert any("too slow" in line for line in result.outlines) is is_named


NEEDY = """
import pytest
from testkit.needs import require

@pytest.fixture
def tool():
    require("no-such-tool", "sshd-of-nobody")

@pytest.mark.needs("no-such-tool")
def test_marked():
    raise AssertionError

def test_of_a_fixture(tool):
    raise AssertionError

@pytest.mark.needs("sh")
def test_with_all_it_needs():
    pass
"""


def run_needy(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *plugins: str) -> pytest.RunResult:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    pytester.makeconftest(f"pytest_plugins = {tuple(f'testkit.{name}' for name in plugins)}")
    pytester.makepyfile(NEEDY)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.parametrize("ci", ["", "1"])
def test_what_a_test_lacks_is_the_last_line_and_fails_only_where_ci_is_set(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    result = run_needy(pytester, monkeypatch, "needs", "skip_rule")
    result.assert_outcomes(passed=1, skipped=2)
    want = "2 tests were skipped: they need packages (apt-get install no-such-tool sshd-of-nobody)"
    assert result.outlines[-1] == want
    assert result.ret == (1 if ci else 0)


def test_the_closing_line_names_rights_and_packages() -> None:
    want = "2 tests were skipped: they need root, packages (apt-get install iproute2 openssh-server)"
    assert closing_line(["needs sshd, root", "needs ip, sshd", "another reason"], []) == want
    assert closing_line(["another reason"], ["slurmd"]) == ""


def test_the_closing_line_names_packages_that_no_skipped_test_reached() -> None:
    """Tests of Slurm need sshd first, so without it they are skipped before they ask for Slurm."""
    want = "1 test was skipped: it needs packages (apt-get install munge openssh-server slurmd)"
    assert closing_line(["needs sshd"], ["openssh-server", "slurmd", "munge"]) == want


def test_the_last_line_on_a_bare_machine_names_every_package(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    pytester.makeconftest("pytest_plugins = ('testkit.needs',)")
    pytester.makepyfile("import pytest\n@pytest.mark.needs('sshd')\ndef test_marked():\n    pass\n")
    last = pytester.runpytest_subprocess("-p", "no:cacheprovider").outlines[-1]
    assert last.endswith(f"(apt-get install {' '.join(sorted(set(read_packages().values())))})"), last


def test_packages_are_those_that_a_testbed_asks_for() -> None:
    packages = read_packages()
    for package, tools in required_tools(docker=True, slurm=True).items():
        assert {packages.get(tool) for tool in tools} == {package}, f"packages.txt: {package}"


def test_what_tests_need_is_a_known_command_or_ability() -> None:
    """A misspelled need would skip its test everywhere but in CI."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    calls = re.findall(r"(?:mark\.needs|\brequire)\(((?:\"[^\"]+\"(?:, )?)+)\)", text)
    needs = {need for call in calls for need in re.findall(r'"([^"]+)"', call)}
    assert "ssh" in needs
    assert needs - set(read_packages()) - set(ABILITIES) == set()
