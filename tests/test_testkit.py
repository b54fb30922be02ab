"""The plugins of the suite itself: cases that cover every pair, and the pace."""

from __future__ import annotations

import itertools

import pytest
from testkit import PYTHON_PATH
from testkit.covering import covering

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
    pytester.makeconftest(
        "from testkit import pace\npace.TEST_S, pace.REFERENCE_S = 0.4, 1.0\npytest_plugins = ('testkit.pace',)\n"
    )
    pytester.makeini("[pytest]\nmarkers = thorough\n")
    decorator = f"@pytest.mark.{mark}" if mark else ""
    pytester.makepyfile(NAP.format(decorator=decorator, seconds=seconds))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == code, result.outlines
    assert any("too slow" in line for line in result.outlines) is is_named
