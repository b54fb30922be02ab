"""Fixtures of every test: `ranks(world_size).run(function, *args)` runs a function on processes of a gloo group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from testkit.ranks import Pools

# Libraries read it when they are loaded. Tests fill all cores as it is: threads that wait for each other while another
# process computes made tests of small matrices three times slower.
os.environ["OMP_NUM_THREADS"] = "1"

# What is shown must not depend on whose terminal, or which CI system, the tests run in: a test that wants colours or a
# width asks for them. (Typer takes GITHUB_ACTIONS for a terminal; on a dumb one Rich has neither colours nor a width.)
_DISPLAY = ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
for _name in (*_DISPLAY, "COLUMNS", "LINES"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm-256color"

# Whoever runs the tests may lack the folders of system tools in PATH, or have Python write unbuffered.
os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"))
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell ignores Ctrl-C in what it runs in the background, and programs inherit that: those of tests must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# That a machine is busy for a second with something else says nothing about the example of that second. The packages of
# a GPU image may lack hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

_PLUGINS = ("needs", "skip_rule", "pace", "covering", "testbed_fixture", "command_line", "golden")
pytest_plugins = tuple(f"testkit.{name}" for name in _PLUGINS)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Pools of worker processes, by world size; started at first use and shared by all tests of the session."""
    pools = Pools()
    yield pools
    pools.close()
