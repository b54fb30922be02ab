"""Nodes as a survey finds them, for tests of plans and of judgements: healthy ones, of which tests change a fact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.env.facts import NodeEnvironmentFacts
from cluster.preflight.survey import GpuFacts, PythonFacts, RemoteFacts, Survey
from cluster.survey.interfaces import NetInterface
from engine.config.errors import BurstError
from engine.config.settings import RunConfig, config_from_dict

CODE = "c0de" * 16
MODULES = {"torch": "2.13.0", "numpy": "2.1.0", "yaml": "6.0", "safetensors": "0.8"}
PYTHON = PythonFacts("/opt/venv/bin/python", (3, 11, 7), MODULES)
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 81559)


def node(name: str, number: int = 1, *, gpus: int = 0, **changes: Any) -> RemoteFacts:
    """A healthy node with address 10.0.0.NUMBER and so many H100."""
    interface = NetInterface(
        name="eth0", is_up=True, mtu=1500, kind="ether", addresses=(f"10.0.0.{number}/24",), is_default_route=True
    )
    environment = NodeEnvironmentFacts(
        name, interfaces=(interface,), interface=interface, interface_reason="the default route leaves here", cores=16
    )
    facts = RemoteFacts(
        node=name,
        home="/home/me",
        user="me",
        uid=1000,
        gid=100,
        root="/home/me/.burst",
        code_root="/home/me/.burst/code",
        python=PYTHON,
        gpus=(H100,) * gpus,
        memory_bytes=64 << 30,
        disk_free_bytes=100 << 30,
        port=23456,
        environment=environment,
        clock_offset_s=0.1,
        clock_error_s=0.05,
    )
    return replace(facts, **changes)


def nodes(count: int, **facts: Any) -> tuple[RemoteFacts, ...]:
    """n1, n2, ..., all alike."""
    return tuple(node(f"n{number}", number, **facts) for number in range(1, count + 1))


def survey(*found: RemoteFacts, **errors: BurstError) -> Survey:
    """The survey of these nodes, and of those that did not answer."""
    names = (*(one.node for one in found), *errors)
    return Survey(names, {one.node: one for one in found}, errors)


def run_config(**sections: Any) -> RunConfig:
    """A configuration for nodes n1, n2, ... with these sections."""
    cluster = {"nodes": "n[1-4]", **sections.pop("cluster", {})}
    return config_from_dict({"cluster": cluster, **sections})
