"""Nodes as plans read them, for tests: healthy ones, of which tests change a fact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.checks.launch import Offer
from cluster.env.facts import NodeEnvironmentFacts
from cluster.launch.ssh import SshNode
from cluster.survey.network import NetInterface
from engine.config.settings import RunConfig, config_from_dict
from engine.planning.memory.capacity import Gpu

CODE = f"~/.burst/code/{'c0de' * 16}.zip"
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20)
OFFER = Offer(
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
)


def node(name: str, number: int = 1, *, gpus: int = 0, **offer: Any) -> SshNode:
    """A node with address 10.0.0.NUMBER, so many H100 and `offer` changed."""
    interface = NetInterface(
        name="eth0", is_up=True, mtu=1500, kind="ether", addresses=(f"10.0.0.{number}/24",), is_default_route=True
    )
    environment = NodeEnvironmentFacts(
        name, interfaces=(interface,), interface=interface, interface_reason="the default route leaves here", cores=16
    )
    return SshNode(name, replace(OFFER, **offer), environment, "/opt/venv/bin/python", (H100,) * gpus)


def nodes(count: int, **changes: Any) -> tuple[SshNode, ...]:
    """n1, n2, ..., all alike."""
    return tuple(node(f"n{number}", number, **changes) for number in range(1, count + 1))


def run_config(**sections: Any) -> RunConfig:
    """A configuration for nodes n1, n2, ... with these sections."""
    cluster = {"nodes": "n[1-4]", **sections.pop("cluster", {})}
    return config_from_dict({"cluster": cluster, **sections})
