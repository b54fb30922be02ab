"""Supervisors of one run, and nothing of them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.supervise_rig import Rig

from cluster.agent.start import node_lock_path


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
    assert made.processes() == []
    assert not Path(node_lock_path(made.name())).exists()
