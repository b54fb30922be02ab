"""Facts of nodes of which the values are known, whatever an answer would look like."""

from __future__ import annotations

from collections.abc import Collection

from cluster.survey.drivers import GpuAddress
from cluster.survey.facts import NodeFacts
from cluster.survey.network import Carriers, InterfaceChoice, NetInterface, Network, StorageRoute
from cluster.survey.rdma import Adapters, GpuDirect, HcaPort
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig


def known_facts(
    node: str,
    *,
    ports: Collection[HcaPort] = (),
    interfaces: Collection[NetInterface] = (),
    gpus: Collection[GpuAddress] = (),
    interface: NetInterface | None = None,
    reason: str = "the default route leaves here",
    gateways: Collection[str] = (),
    storage: Collection[StorageRoute] = (),
    cores: int | None = None,
    gpudirect: bool | None = None,
    trouble: str = "",
) -> NodeFacts:
    """What is not given the node has not, or does not tell. reason: why `interface` is the one that nodes talk over."""
    facts = NodeFacts(NodeProbe(node), ClusterConfig())
    facts.__dict__.update(  # where its properties keep what they have read
        adapters=Adapters(tuple(ports)),
        network=Network(tuple(interfaces), frozenset(gateways)),
        interface=InterfaceChoice(interface, reason),
        gpu_addresses=tuple(gpus),
        carriers=Carriers(tuple(storage), cores, trouble),
        gpudirect=GpuDirect("/sys/module/nvidia_peermem/version" if gpudirect else None, True, gpudirect),
    )
    return facts
