"""What plans are made of: machines and nodes of which tests change a fact, and plans of fake ranks on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.checks.launch import NodeResources
from cluster.launch.local import build_local_plan, probe_local_node
from cluster.launch.ssh import SshNode
from cluster.plan import LaunchPlan, MachineFacts
from cluster.survey.network import NetInterface
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig, config_from_dict
from engine.predict.memory import Gpu
from testkit import FAKE_PYTHON_PATH, PYTHON_PATH
from testkit.known_facts import known_facts

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


# --- over SSH ---------------------------------------------------------------------------------------------------------

CODE = f"~/.burst/code/{'c0de' * 16}.zip"
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20)
OFFER = NodeResources(
    home="/home/me",
    user="me",
    uid=1000,
    gid=100,
    groups=(),
    has_infiniband_devices=False,
    memory_bytes=64 << 30,
    room=(100 << 30, ""),
    port=(23456, ""),
    locks={},
    data=(),
    checkpoint_room=(100 << 30, ""),
    checkpoint_disk="",
    has_source=None,
    model=None,
)


def node(name: str, number: int = 1, *, gpus: int = 0, **offer: Any) -> SshNode:
    """A node with address 10.0.0.NUMBER, so many H100 and `offer` changed."""
    interface = NetInterface(
        name="eth0", is_up=True, mtu=1500, kind="ether", addresses=(f"10.0.0.{number}/24",), is_default_route=True
    )
    facts = known_facts(name, interfaces=(interface,), interface=interface, cores=16)
    return SshNode(facts, replace(OFFER, **offer), "/opt/venv/bin/python", (H100,) * gpus)


def nodes(count: int, **changes: Any) -> tuple[SshNode, ...]:
    """n1, n2, ..., all alike."""
    return tuple(node(f"n{number}", number, **changes) for number in range(1, count + 1))


def run_config(**sections: Any) -> RunConfig:
    """A configuration for nodes n1, n2, ... with these sections."""
    cluster = {"nodes": "n[1-4]", **sections.pop("cluster", {})}
    return config_from_dict({"cluster": cluster, **sections})
