"""The network of a testbed as a value: the commands that build it, and every address in it.

Every node is a network namespace; a further one, the switch, holds a bridge per network. This machine has one link into
the management network, `eth0` of the nodes. Rails exist between nodes only.

                 this machine (.254)
                        |
        +------+--------+------ management ------+      10.A.B.0/24
      eth0   eth0     eth0                     eth0
     node 1  node 2  node 3       ...         node N
      rail0  rail0   rail0                    rail0
        +------+-------+--------- rail 0 --------+      10.A.B+1.0/24
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.testbed.spec import MANAGEMENT, TestbedSpec
from cluster.testbed.templates import render

PREFIX = "btb"  # of every namespace and link on this machine; tear-down finds leftovers by it
BLOCKS = 256  # of 16 networks each: 10.100.0.0/20, 10.100.16.0/20, ... 10.115.240.0/20
HEAD_NUMBER = 254
_BURST_BYTES = 256 << 10

Command = tuple[str, ...]


@dataclass(frozen=True)
class Network:
    """The network of the testbed `spec` in the block of addresses number `block`."""

    spec: TestbedSpec
    block: int

    @property
    def switch(self) -> str:
        """The namespace with the bridges."""
        return f"{namespace_prefix(self.spec.name)}switch"

    @property
    def head_link(self) -> str:
        """This machine's interface into the management network; at most 15 characters."""
        return f"{PREFIX}{self.spec.name}"

    @property
    def head_address(self) -> str:
        """This machine's address in the management network."""
        return self._address(0, HEAD_NUMBER)

    def namespace(self, node: str) -> str:
        """The network namespace of a node."""
        return f"{namespace_prefix(self.spec.name)}{node}"

    def address(self, node: str, interface: str = MANAGEMENT) -> str:
        """Address of a node's interface."""
        return self._address(self._network_of(interface), self.number(node))

    def commands(self) -> Iterator[Command]:
        """All commands that build the network, in order."""
        text = render("network", net=self, spec=self.spec, management=MANAGEMENT)
        yield from (tuple(line.split()) for line in text.splitlines())
        if self.spec.rate_bits_per_s is not None:
            yield shape_command(None, self.head_link, self.spec.rate_bits_per_s)
            yield shape_command(self.switch, "head", self.spec.rate_bits_per_s)
            for node in self.spec.node_names:
                yield from self.shape_commands(node, self.spec.rate_bits_per_s)

    def shape_commands(self, node: str, rate_bits_per_s: int | None) -> Iterator[Command]:
        """Give every link of a node this rate, both ways; None: no limit."""
        for interface in self.spec.interfaces:
            for namespace, link in (
                (self.namespace(node), interface),
                (self.switch, self.port(node, interface)),
            ):
                yield shape_command(namespace, link, rate_bits_per_s)

    def link_command(self, node: str, interface: str, *, up: bool) -> Command:
        """Cut or mend the switch's end of a node's link: the node keeps its carrier's address and is silent."""
        return ("ip", "-n", self.switch, "link", "set", self.port(node, interface), "up" if up else "down")

    def port(self, node: str, interface: str) -> str:
        """The switch's end of a node's link."""
        return f"{interface}.{self.number(node)}"

    def mac(self, node: str, interface: str = MANAGEMENT) -> str:
        """The hardware address of a node's interface."""
        return f"02:b7:00:{self.block:02x}:{self._network_of(interface):02x}:{self.number(node):02x}"

    def number(self, node: str) -> int:
        """Which of the nodes it is, from 1."""
        return self.spec.node_names.index(node) + 1

    def _network_of(self, interface: str) -> int:
        return self.spec.interfaces.index(interface)

    def _address(self, network: int, number: int) -> str:
        return str(block_network(self.block).network_address + (network << 8) + number)


def namespace_prefix(name: str) -> str:
    """What all namespaces of the testbed `name`, and of no other, begin with."""
    return f"{PREFIX}.{name}."


def block_network(block: int) -> ipaddress.IPv4Network:
    """The addresses of a block."""
    return ipaddress.IPv4Network((int(ipaddress.IPv4Address("10.100.0.0")) + (block << 12), 20))


def shape_command(namespace: str | None, link: str, rate_bits_per_s: int | None) -> Command:
    """Limit what leaves through `link` to this rate; None: no limit. `namespace` None: this machine's own."""
    where = ("tc",) if namespace is None else ("tc", "-n", namespace)
    if rate_bits_per_s is None:
        return (*where, "qdisc", "delete", "dev", link, "root")
    # The bucket must hold what the rate brings between two ticks of the kernel's timer.
    burst = max(_BURST_BYTES, rate_bits_per_s // 8 // 100)
    bucket = ("tbf", "rate", f"{rate_bits_per_s}bit", "burst", f"{burst}b", "latency", "50ms")
    return (*where, "qdisc", "replace", "dev", link, "root", *bucket)
