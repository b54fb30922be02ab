"""scripts/lint_names.py: which names it refuses."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

RULE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "lint_names.py"))


@pytest.mark.parametrize("name", ["kept_rows", "KeptRows", "_tell_everybody", "HeldLock", "found"])
def test_a_name_with_a_refused_word_gets_advice(name: str) -> None:
    assert RULE["advice"](name), f"{name} passed"


@pytest.mark.parametrize("name", ["keep_last", "keepalive", "copy_in_place", "found_files", "home_path", "sunset"])
def test_a_term_of_the_field_is_allowed(name: str) -> None:
    assert RULE["advice"](name) is None, f"{name} was refused"


def test_a_name_in_a_new_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "told.py"
    path.write_text("class A:\n    kept: int\n\ndef tell(own): ...\n")
    assert {"told", "kept", "tell", "own"} <= set(RULE["names_of"](path)), "a name was not seen"
