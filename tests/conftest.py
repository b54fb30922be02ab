"""Fixtures of every test: `ranks(world_size).run(function, *args)` runs a function on processes of a gloo group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pools

pytest_plugins = ("skip_rule", "testbed_fixture")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Pools of worker processes, by world size; started at first use and shared by all tests of the session."""
    pools = Pools()
    yield pools
    pools.close()
