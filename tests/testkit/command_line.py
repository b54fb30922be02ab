"""A pytest plugin: `burst("config", "exp=tiny")` runs the command line here: its exit code, stdout and stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Result(NamedTuple):
    """What one call of `burst` did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What --json printed."""
        return json.loads(self.out)


Burst = Callable[..., Result]


@pytest.fixture
def burst(capsys: pytest.CaptureFixture[str]) -> Burst:
    """Run the command line in this process."""
    from burst_cli.app import main  # not where only kernels are tested

    def run(*argv: str) -> Result:
        capsys.readouterr()
        return Result(main(argv), *capsys.readouterr())

    return run
