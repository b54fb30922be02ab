"""Recorded machines of fixtures: NAME.yaml says what sysfs and ip show and what must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from testkit.known_facts import known_facts

from cluster.env.plan import NodeEnvironment, plan_environment
from cluster.survey.drivers import GpuAddress
from cluster.survey.facts import NodeFacts
from cluster.survey.network import NetInterface, StorageRoute
from cluster.survey.rdma import HcaPort
from engine.config.cluster import ClusterConfig

FOLDER = Path(__file__).parent / "fixtures"
MACHINES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SISTERS = ("sister1", "sister2", "sister3", "sister4")


def recorded(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def machine(name: str, **changes: Any) -> NodeFacts:
    """The facts of the recorded machine; `changes` replace what the file says."""
    given = recorded(name)
    interfaces = tuple(interface(**entry) for entry in given["interfaces"])
    routed = {one.name for one in interfaces if one.is_default_route}

    def above(netdev: str) -> dict[str, Any]:
        ways = (netdev, *(upper for upper, names in given.get("lower", {}).items() if netdev in names))
        return {"ways": ways, "default_route": next((way for way in ways if way in routed), "")}

    facts: dict[str, Any] = {
        "node": name,
        "ports": tuple(port(**entry, **above(entry.get("netdev", ""))) for entry in given["ports"]),
        "interfaces": interfaces,
        "gpus": tuple(
            GpuAddress(index, tuple(entry["path"].split("/")), entry["numa"])
            for index, entry in enumerate(given["gpus"])
        ),
        "interface": next(one for one in interfaces if one.name == given["interface"]),
        "gateways": given.get("gateways", ()),
        "storage": tuple(StorageRoute(**entry) for entry in given.get("storage", ())),
        "cores": given["cores"],
    }
    return known_facts(**facts | changes)


def interface(name: str, *, addresses: tuple[str, ...] = (), **fields: Any) -> NetInterface:
    return NetInterface(name, is_up=True, addresses=tuple(addresses), **fields)


def port(device: str, *, roce_v2: dict[int, str] | None = None, path: str = "", **fields: Any) -> HcaPort:
    """A port that is up, on InfiniBand with 400 Gbit/s, unless told otherwise. roce_v2: GID index -> IPv4 address."""
    facts: dict[str, Any] = {"link_layer": "InfiniBand", "state": "ACTIVE", "phys_state": "LinkUp", "rate_gbps": 400.0}
    fields["numa_node"] = fields.pop("numa", None)
    fields.setdefault("ways", (fields.get("netdev", ""),))
    gids = {index: ("RoCE v2", _gid(address)) for index, address in (roce_v2 or {}).items()}
    return HcaPort(device, 1, pci_path=tuple(path.split("/")) if path else (), gids=gids, **facts | fields)


def node(*ports: HcaPort, config: ClusterConfig | None = None, **facts: Any) -> NodeEnvironment:
    """The environment of a machine with one GPU, eth0 and these ports."""
    eth0 = interface("eth0", addresses=("10.0.0.1/24",), is_default_route=True)
    known: dict[str, Any] = {
        "node": "node1",
        "ports": ports,
        "interfaces": (eth0,),
        "interface": eth0,
        "gpus": (GpuAddress(0),),
        "cores": 8,
    }
    return plan_environment(known_facts(**known | facts), config or ClusterConfig())


def _gid(address: str) -> str:
    numbers = [int(part) for part in address.split(".")]
    return "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*numbers)
