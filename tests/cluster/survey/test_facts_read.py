"""What a node said of adapters, ways to storage and GPUs, field by field: what is told is taken, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from xml.etree import ElementTree

import pytest
from testkit.check_fakes import ended

from cluster.survey.drivers import Fields, GpuAddress, PciDevices, Unavailable, read_pci_devices
from cluster.survey.network import Carriers, NetInterface, StorageRoute, read_carriers
from cluster.survey.rdma import Adapters, HcaPort, has_roce_gid, parse_adapters
from cluster.survey.section import NotApplicableError, Section, UnreadableError

T = TypeVar("T")
GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
HEAD: dict[str, Any] = {"device": "mlx5_0", "port": "1", "link_layer": "InfiniBand"}
STATE = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "numa_node": "0", "netdev": "ib0", "mtu": "4092"}
PCI = {"current_link_width": "16", "max_link_width": "32", "current_link_speed": "32.0 GT/s PCIe"}
PLACE = {"path": "/sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0", "rate": "400 Gb/sec (4X NDR)"}
FLAGS = {"is_virtual_function": False, "is_bond": False, "ways": ["ib0", "bond0"], "default_route": "bond0"}
FLAGS |= {"has_counters": True, "is_iwarp": False}
ROW = {**HEAD, **STATE, **PCI, **PLACE, **FLAGS, "gids": {"3": ["RoCE v2", GID]}, "errors": {"link_downed": 2}}
BARE = HcaPort("mlx5_0", 1, "InfiniBand", "", "")
WHOLE = HcaPort(
    *("mlx5_0", 1, "InfiniBand", "ACTIVE", "LinkUp", 400.0, ("0000:15:01.0", "0000:18:00.0"), "ib0", 0, False, False),
    *(16, 32, {3: ("RoCE v2", GID)}, ("ib0", "bond0"), "bond0", 32.0, 4092, {"link_downed": 2}),
)


def take(reader: Callable[[Section], T], **told: Any) -> T:
    return reader(ended("told", json.dumps(told)))


def ports(*rows: Any, **broken: str) -> Adapters:
    return take(parse_adapters, ports=rows, broken=broken)


def test_a_port_is_what_the_node_said_and_what_it_cannot_say_is_not_known() -> None:
    silent = dict.fromkeys([*STATE, *PCI, *PLACE, "default_route"], "")
    nothing = {**silent, "max_link_width": "63", "ways": [], "gids": {}, "errors": {}}
    found = ports(ROW, {**ROW, **nothing, "port": "2"}, **{"0000:18:00.0": "no driver"})
    assert found == Adapters((WHOLE, replace(BARE, port=2)), {"0000:18:00.0": "no driver"})
    none = (None, (), None, None, False, False, None, None, {}, (), "", None, None, {})
    assert HcaPort("mlx5_0", 1, "InfiniBand", "", "", *none) == BARE
    assert NetInterface("e", True) == NetInterface("e", True, None, "ether", (), False, None)
    widths = [ports({**ROW, "max_link_width": str(lanes)}).ports[0].pcie_width_max for lanes in range(64)]
    assert [lanes for lanes in widths if lanes is not None] == [1, 2, 4, 8, 12, 16, 32]
    assert all(ports({**ROW, **row}).ports[0].is_bond for row in ({"is_bond": True}, {"device": "mlx5_bond_0"}))
    for rows, broken in (([ROW, ROW], {}), ([{**ROW, "device": "a b"}], {}), ([], {"a b": "x"})):
        with pytest.raises(UnreadableError, match=r"comes twice|no name of an adapter"):
            ports(*rows, **broken)


def test_a_port_knows_whether_it_works_and_how_it_is_called() -> None:
    assert (WHOLE.pci_address, WHOLE.name) == ("0000:18:00.0", "mlx5_0:1")
    assert (WHOLE.is_active, has_roce_gid(WHOLE)) == (True, True)
    assert not replace(WHOLE, state="DOWN").is_active | replace(WHOLE, phys_state="Polling").is_active
    assert (BARE.is_active, BARE.pci_address, has_roce_gid(BARE)) == (False, None, False)
    for gid in (("RoCE v1", GID), ("RoCE v2", "fe80:" + GID[5:])):
        assert not has_roce_gid(replace(WHOLE, gids={0: gid}))


def test_ways_to_storage_and_devices_on_the_bus_are_read() -> None:
    told = take(read_carriers, storage=[["/data", "10.0.0.9", "eth0"]], cores=4)
    assert told == Carriers((StorageRoute("/data", "10.0.0.9", "eth0"),), 4)
    devices = [["0000:43:00.0", "0x030000", "-1", "", ""], ["0000:1b:00.0", "0x030200", "1", PLACE["path"], "8"]]
    others = [["0000:1b:00.1", "0x040300", "1", "", ""], ["0000:05:00.0", "0x068000", "0", "", ""]]
    gpus = GpuAddress(0, ("0000:15:01.0", "0000:18:00.0"), 1, 8), GpuAddress(1, ("0000:43:00.0",), None)
    assert take(read_pci_devices, total=9, devices=devices + others) == PciDevices(9, gpus, 1)
    assert take(read_pci_devices, total=9, devices=[["x", "0x030000", "-1", ""]]) is None


def test_what_nvidia_smi_leaves_out_does_not_have_or_cannot_read_stay_apart() -> None:
    text = "<gpu><memory><used>1 MiB</used></memory><mig>N/A</mig><power>ERR!</power><odd>-2 kg</odd></gpu>"
    gpu = Fields(ElementTree.fromstring(text))
    assert (gpu.look("none", "memory/used"), gpu.number("memory/used")) == ("1 MiB", 1)
    assert gpu.total("memory/used", "mig") == 1
    gaps = {
        "memory": Unavailable.MISSING,
        "none/x": Unavailable.MISSING,
        "mig/x": Unavailable.NOT_SUPPORTED,
        "power/x": Unavailable.UNREADABLE,
    }
    assert {path: gpu.look(path) for path in gaps} == gaps
    with pytest.raises(NotApplicableError):
        gpu.total("mig", "none")
    for paths, words in ((("memory/used", "power"), "unreadable"), (("odd",), "unreadable"), (("none",), "not in the")):
        with pytest.raises(UnreadableError, match=words):
            gpu.total(*paths)
