"""A run that a controller leads among scripted nodes; a link's run folder here, and the node's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_rig import RUN_ID, FakeNode
from control_fakes import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / RUN_ID
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path / "there" / RUN_ID)
