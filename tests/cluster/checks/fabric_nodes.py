"""Answers of a node to the probes `ib` and `net`: `FabricNode` is a healthy h100x8 until a test changes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import rehearsal
from testkit.check_fakes import Groups, bad, ended, told

from cluster.checks.finding import Finding, Verdict
from cluster.survey.section import NodeProbe
from cluster.testbed.hardware.devices import compute_adapters
from engine.config.cluster import ClusterConfig, ExpectedHardware

GROUP = Groups("ib")

COMPUTE = compute_adapters("h100x8", 1)


def roce_gids(address: str, first: int = 0) -> dict[str, dict[str, list[str]]]:
    """The four GIDs of a RoCE port with that IPv4 address (as `0a00:0001`)."""
    local, mapped = "fe80:0000:0000:0000:5200:00ff:fe00:0001", f"0000:0000:0000:0000:0000:ffff:{address}"
    values = [[kind, gid] for gid in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]
    return {"gids": {str(first + index): value for index, value in enumerate(values)}}


@dataclass
class FabricNode:
    """A node with eight GPUs, an adapter beside each, an Ethernet port, a spare port without cable and a bond."""

    ports: dict[str, dict[str, Any]]
    gpus: list[str]  # their places
    gpudirect: dict[str, object]
    kernel: list[tuple[int, str]] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)

    @classmethod
    def healthy(cls) -> FabricNode:
        """Everything works."""

        def told(name: str) -> Any:
            return rehearsal.healthy().section(name).document()

        ports = {row["dev"]: row for row in told("ib.ports")["ports"] if row["dev"] not in ("mlx5_4", "mlx5_10")}
        gpus = [place for _, kind, _, place in told("gpu.lspci")["devices"] if kind.startswith("0x0302")]
        return cls(ports, gpus, told("ib.gpudirect"))

    def all_compute(self, **changes: object) -> None:
        """Change every port for training."""
        for name in COMPUTE:
            self.ports[name] |= changes

    def probe(self, name: str = "n1") -> NodeProbe:
        """Its answer."""
        devices = [[place[-12:], "0x030200", "0", place] for place in self.gpus]
        log = {"reader": "dmesg", "total": 99, "boot": True, "uptime": 900000.0, "seen": self.kernel}
        made = {
            "ib.ports": {"ports": [*self.ports.values()], "broken": self.broken},
            "gpu.lspci": {"total": 99, "devices": devices},
            "kernel.log": log,
            "ib.gpudirect": self.gpudirect,
        }
        return NodeProbe(name, {each: ended(each, json.dumps(document)) for each, document in made.items()})

    def check(self, **expected: Any) -> list[Finding]:
        """Findings of the group `ib`, with `expected` as cluster.expected."""
        return GROUP.check(self.probe(), ClusterConfig(expected=ExpectedHardware(**expected)))

    def complaints(self, **expected: Any) -> list[tuple[str, str | None, Verdict]]:
        """(check, device, severity) of all that is neither OK nor skipped."""
        return bad(self.check(**expected))

    def told(self, **expected: Any) -> list[str]:
        """The same in words."""
        return told(self.check(**expected))


def link(name: str, *addresses: str, kind: str = "ether", up: bool = True, master: str = "", mtu: Any = 1500) -> Any:
    """One interface as a node tells it."""
    told = {"name": name, "kind": kind, "mtu": str(mtu), "up": up, "master": master}
    return {**told, "addresses": [*addresses]}


LO = link("lo", "127.0.0.1/8", kind="loopback")


def net_probe(links: object, routes: object = (), *, name: str = "n1") -> NodeProbe:
    """A node that answers with these interfaces and routes."""
    return NodeProbe(name, {"net.links": ended("net.links", json.dumps({"links": links, "routes": routes}))})


def default_route(device: str, metric: int = 0) -> list[object]:
    """A default route, by a gateway."""
    return [device, True, True, metric]
