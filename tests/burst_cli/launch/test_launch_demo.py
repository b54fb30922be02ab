"""A launch that names no experiment asks before it trains the demo."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.command_line import Burst


@pytest.mark.parametrize("words", [(), ("train.steps=3",), ("--json",)])
def test_it_is_refused_where_nobody_can_answer(burst: Burst, root: Path, words: tuple[str, ...]) -> None:
    result = burst("launch", *words)
    assert (result.code, root.exists()) == (2, False)
    assert "`burst launch exp=tiny" in result.err
    assert "4 ranks" in result.err


def test_a_dry_run_asks_nothing(burst: Burst) -> None:
    assert burst("launch", "--dry-run", "--skip-checks").code == 0


def test_no_on_a_terminal_starts_nothing(root: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "burst_cli", "launch"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, b"n\n")
        assert process.wait(120) == 1
    assert not root.exists()
