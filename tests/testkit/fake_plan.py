"""Launch plans of fake ranks on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.launch.local import build_local_plan, probe_local_node
from cluster.plan import LaunchPlan, MachineFacts
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig
from testkit import FAKE_PYTHON_PATH, PYTHON_PATH

TWO_RANKS = RunConfig(cluster=ClusterConfig(ranks_per_node=2))


def node_facts(hostname: str = "node1", **changes: Any) -> MachineFacts:
    """A machine without GPUs, which runs nothing: for plans that are only looked at."""
    facts = {"cores": 8, "gpus": 0, "python": "/usr/bin/python3", "cwd": "/home/me", **changes}
    return MachineFacts(hostname, **facts)


def fake_plan(path: Path, config: RunConfig = TWO_RANKS, *, real: bool = False) -> LaunchPlan:
    """The plan of a run in folder `path` of fake ranks, which do what FAKE_MODE says. real: torchrun starts them."""
    facts = replace(probe_local_node(), python_path=PYTHON_PATH if real else FAKE_PYTHON_PATH)
    return build_local_plan(config, facts, path, module="fake_rank")


def fake_torchrun(ranks: int, *words: str) -> tuple[str, ...]:
    """A command that starts so many fake ranks with `words`, without FAKE_PYTHON_PATH in its environment."""
    path = Path(__file__).with_name("fakes") / "torch" / "distributed" / "run.py"
    return (sys.executable, str(path), f"--nproc-per-node={ranks}", "-m", "fake_rank", *words)
