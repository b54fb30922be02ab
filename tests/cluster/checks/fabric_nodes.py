"""Answers of a node to the probes `ib` and `net`, written by hand: `FabricNode` is healthy until a test changes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from testkit.check_fakes import Groups, bad, ended, told

from cluster.checks.finding import Finding, Verdict
from cluster.survey.section import NodeProbe, Section
from engine.config.cluster import ClusterConfig, ExpectedHardware

GROUP = Groups("ib")

COMPUTE = tuple(f"mlx5_{number}" for number in (0, 1, 2, 5, 6, 7, 8, 11))


def lines(words: Iterable[tuple[str, Mapping[str, object]]]) -> str:
    """The rows of an answer."""
    return json.dumps([*words])


def switch(number: int) -> str:
    """The path of a PCI switch."""
    return f"/sys/devices/pci0000:{number:02x}/0000:{number:02x}:01.0/0000:{number + 1:02x}:00.0"


def port(device: str, place: int, **changes: object) -> dict[str, object]:
    """Fields of the port of an H100 node's adapter below switch `place`."""
    return {
        "dev": device,
        "port": 1,
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        "path": f"{switch(place)}/0000:{place + 2:02x}:01.0/0000:{place + 4:02x}:00.0",
        "numa_node": 0,
        "current_link_width": 16,
        "max_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
        "physfn": False,
        "netdev": f"ib{place // 16}",
        "netdev_state": "up",
        "netdev_mtu": 4092,
        "gid.0": "fe80:0000:0000:0000:5200:0001:0010:0001 IB/RoCE v1",
        **changes,
    }


def roce_gids(address: str, first: int = 0) -> dict[str, str]:
    """The four GIDs of a RoCE port with that IPv4 address (as `0a00:0001`)."""
    local, mapped = "fe80:0000:0000:0000:5200:00ff:fe00:0001", f"0000:0000:0000:0000:0000:ffff:{address}"
    values = [f"{gid} {kind}" for gid in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]
    return {f"gid.{first + index}": value for index, value in enumerate(values)}


@dataclass
class FabricNode:
    """A node with eight GPUs, an adapter beside each, an Ethernet port, a spare port without cable and a bond."""

    ports: dict[str, dict[str, object]]
    gpus: list[str]
    counters: dict[str, dict[str, int]]
    later: dict[str, dict[str, int]]  # what the second sample says otherwise
    kernel: list[str]
    others: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    gpudirect: dict[str, str] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)  # instead of what would be made of the rest

    @classmethod
    def healthy(cls) -> FabricNode:
        """Everything works."""
        ports = {name: port(name, 16 * place) for place, name in enumerate(COMPUTE)}
        gpus = [
            f"{switch(16 * place)}/0000:{16 * place + 2:02x}:00.0/0000:{16 * place + 3:02x}:00.0" for place in range(8)
        ]
        ports |= {
            "mlx5_3": port("mlx5_3", 0xE0, link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", netdev="ens1"),
            "mlx5_4": port("mlx5_4", 0xD0, state="1: DOWN", phys_state="3: Disabled", rate="10 Gb/sec (4X SDR)"),
            "mlx5_bond_0": port(
                "mlx5_bond_0",
                0xF0,
                link_layer="Ethernet",
                rate="200 Gb/sec (2X NDR)",
                netdev="bond0",
                default_route=True,
            ),
        }
        counters = {
            name: {"link_downed": 0, "symbol_error": 0, "out_of_sequence": 0, "port_xmit_data": 7} for name in ports
        }
        kernel = ["[    0.000000] Linux version 5.15.0"]
        kernel += [
            f"[   12.000000] mlx5_core {str(fields['path'])[-12:]}: firmware version: 28.41.1000"
            for fields in ports.values()
        ]
        return cls(ports, gpus, counters, {}, kernel, gpudirect={"peermem": "yes", "driver": "", "dmabuf": "no"})

    def all_compute(self, **changes: object) -> None:
        """Change every port for training."""
        for name in COMPUTE:
            self.ports[name] |= changes

    def probe(self, name: str = "n1") -> NodeProbe:
        """Its answer."""
        listed = [("port", fields) for fields in self.ports.values()] + self.others
        samples: list[tuple[str, Mapping[str, object]]] = []
        for number in (1, 2):
            for device, values in self.counters.items():
                told = values | (self.later.get(device, {}) if number == 2 else {})
                samples.append((f"sample{number}", {"dev": device, "port": 1, **told}))
        kernel = ["uptime\t900000.00", *(f"line\t{line}" for line in self.kernel), "log\tdmesg\t99\tsince boot"]
        made = {
            "ib.ports": ended("ib.ports", lines(listed)),
            "gpu.lspci": ended("gpu.lspci", self._pci()),
            "ib.counters": ended("ib.counters", lines(samples)),
            "kernel.log": ended("kernel.log", "\n".join(kernel)),
            "ib.gpudirect": ended("ib.gpudirect", self._gpudirect()),
        }
        return NodeProbe(name, made | self.sections)

    def _pci(self) -> str:
        return json.dumps({"total": 99, "devices": [[path[-12:], "0x030200", "0", path] for path in self.gpus]})

    def check(self, **expected: Any) -> list[Finding]:
        """Findings of the group `ib`, with `expected` as cluster.expected."""
        return GROUP.check(self.probe(), ClusterConfig(expected=ExpectedHardware(**expected)))

    def complaints(self, **expected: Any) -> list[tuple[str, str | None, Verdict]]:
        """(check, device, severity) of all that is neither OK nor skipped."""
        return bad(self.check(**expected))

    def told(self, **expected: Any) -> list[str]:
        """The same in words."""
        return told(self.check(**expected))

    def _gpudirect(self) -> str:
        told = {"peermem": "no", "driver": "", "dmabuf": "no", "nvidia": "yes"} | self.gpudirect
        document = {
            "peers": ["/sys/module/nvidia_peermem/version"] if told["peermem"] == "yes" else [],
            "module": told["nvidia"] == "yes",
            "driver": told["driver"],
            "kernel": "5.15.0-105-generic",
            "dmabuf": {"yes": True, "no": False}.get(told["dmabuf"]),
        }
        return json.dumps(document)


def link(name: str, *addresses: str, kind: str = "", state: str = "UP", **more: Any) -> dict[str, Any]:
    """One interface as `ip -json -details addr` prints it."""
    flags = ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"] if state == "UP" else ["BROADCAST", "MULTICAST"]
    return {
        "ifindex": 1,
        "ifname": name,
        "flags": flags,
        "mtu": 1500,
        "operstate": state,
        "link_type": "ether",
        "addr_info": [
            {"family": "inet", "local": local, "prefixlen": int(length), "scope": "global"}
            for local, length in (address.split("/") for address in addresses)
        ],
        **({"linkinfo": {"info_kind": kind}} if kind else {}),
        **more,
    }


LO = {
    **link("lo"),
    "flags": ["LOOPBACK", "UP", "LOWER_UP"],
    "link_type": "loopback",
    "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8, "scope": "host"}],
}


def net_probe(links: object, routes: object = (), *, name: str = "n1", sysfs: str = "{}") -> NodeProbe:
    """A node that answers with these interfaces and routes."""
    return NodeProbe(
        name,
        {
            "net.links": ended("net.links", json.dumps(links)),
            "net.route": ended("net.route", json.dumps(routes)),
            "net.sysfs": ended("net.sysfs", sysfs),
        },
    )


def default_route(device: str, **more: object) -> dict[str, object]:
    """A default route as `ip -json route` prints it."""
    return {"dst": "default", "gateway": "10.0.0.254", "dev": device, "flags": [], **more}
