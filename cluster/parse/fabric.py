"""Ports of adapters, and network interfaces, as values; `cluster.parse.infiniband` and `.interfaces` make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HcaPort:
    """One port of one InfiniBand or RoCE adapter, from /sys/class/infiniband.

    device, port: `mlx5_0`, 1. link_layer: InfiniBand or Ethernet. state: ACTIVE, DOWN, INIT, ... phys_state: LinkUp,
    Polling, Disabled, ... rate_gbps: what is set up now. pci_path: PCI addresses from the root complex to the adapter
    (`0000:00:01.0`, ..., the adapter last). netdev: its network interface. gids: index -> (type, address).
    pcie_gts: GT/s per lane. None, or "" for a state: the node did not
    tell.
    """

    device: str
    port: int
    link_layer: str
    state: str
    phys_state: str
    rate_gbps: float | None = None
    pci_path: tuple[str, ...] = ()
    netdev: str | None = None
    numa_node: int | None = None
    is_virtual_function: bool = False
    is_bond: bool = False
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    gids: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    netdev_is_up: bool | None = None
    has_default_route: bool = False
    netdev_mtu: int | None = None
    pcie_gts: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether traffic can pass: the link is up, and the port was set up (by a subnet manager, or as Ethernet)."""
        return self.state == "ACTIVE" and self.phys_state == "LinkUp"

    @property
    def pci_address(self) -> str | None:
        """Where the adapter itself sits."""
        return self.pci_path[-1] if self.pci_path else None

    @property
    def name(self) -> str:
        """`mlx5_0:1`, as NCCL_IB_HCA spells it."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class NetInterface:
    """One network interface. addresses: IPv4 with prefix length, `10.0.0.1/24`. kind: ether, loopback, infiniband,
    bridge, bond, veth, tun, vlan, ... is_default_route: IPv4 packets to unknown places leave here. master: the bridge
    or bond that it is a part of. is_up: switched on, and the link is there."""

    name: str
    is_up: bool
    mtu: int | None = None
    kind: str = "ether"
    addresses: tuple[str, ...] = ()
    is_default_route: bool = False
    pci_path: tuple[str, ...] = ()
    master: str | None = None


@dataclass(frozen=True)
class GpuAddress:
    """Where a GPU sits: `index` as nvidia-smi counts, `pci_path` as in HcaPort."""

    index: int
    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
