"""Ports of adapters: from the lines of the probe to values."""

from __future__ import annotations

import pytest
from fabric_nodes import COMPUTE, FabricNode, ended, lines, port, roce_gids

from cluster.parse.infiniband import ipv4_of_gid, parse_adapters, pci_path, roce_gid_index
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import Section


def ports_section(*fields: dict[str, object]) -> Section:
    return ended("ib.ports", lines([("port", one) for one in fields]))


def one_port(**changes: object):
    return parse_adapters(ports_section(port("mlx5_0", 0x0C, **changes))).ports[0]


def test_a_port_has_all_that_the_probe_told():
    found = one_port()
    assert (found.name, found.state, found.phys_state, found.rate_gbps) == ("mlx5_0:1", "ACTIVE", "LinkUp", 400.0)
    assert found.pci_path == ("0000:0c:01.0", "0000:0d:00.0", "0000:0e:01.0", "0000:10:00.0")
    assert (found.pcie_width, found.pcie_width_max, found.pcie_gts) == (16, 16, 32.0)
    assert (found.netdev, found.netdev_is_up, found.netdev_mtu, found.numa_node) == ("ib0", True, 4092, 0)
    assert found.is_active
    assert (found.is_bond, found.is_virtual_function, found.has_default_route) == (False, False, False)


def test_a_port_that_is_down_is_not_active_though_its_rate_reads_40():
    found = one_port(state="1: DOWN", phys_state="3: Disabled", rate="40 Gb/sec (4X QDR)")
    assert (found.rate_gbps, found.is_active) == (40.0, False)


@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED", "1: DOWN", "5: ACTIVE_DEFER", "", "ACTIVE", "4 ACTIVE", "4:"])
def test_only_state_active_is_active(state: str):
    assert not one_port(state=state).is_active


@pytest.mark.parametrize("phys_state", ["2: Polling", "3: Disabled", "6: LinkErrorRecovery", "", "LinkUp"])
def test_only_phys_state_link_up_is_active(phys_state: str):
    assert not one_port(phys_state=phys_state).is_active


@pytest.mark.parametrize(
    ("text", "rate"),
    [("2.5 Gb/sec (1X SDR)", 2.5), ("800 Gb/sec (4X XDR)", 800.0), ("", None), ("fast", None), ("1e9 Gb/sec", None)],
)
def test_rates(text: str, rate: float | None):
    assert one_port(rate=text).rate_gbps == rate


@pytest.mark.parametrize("width", ["0", "63", "255", "Unknown", "", "-16"])
def test_a_width_that_says_nothing_is_not_a_width(width: str):
    assert one_port(width=width).pcie_width is None


def test_virtual_functions_and_bonds_are_known_as_such():
    assert one_port(physfn=1).is_virtual_function
    assert one_port(bonded=1).is_bond
    assert parse_adapters(ports_section(port("mlx5_bond_0", 0x0C))).ports[0].is_bond


def test_ports_are_ordered_as_people_count():
    names = [found.device for found in parse_adapters(FabricNode.healthy().probe().section("ib.ports")).ports]
    assert names[:3] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert names.index("mlx5_11") > names.index("mlx5_8")
    assert len(names) == len(COMPUTE) + 3


@pytest.mark.parametrize("device", ["", "../../etc", "mlx5_0\x1b[31m", "a b", "x" * 65, "$(reboot)"])
def test_an_adapter_with_a_hostile_name_is_unreadable(device: str):
    with pytest.raises(UnreadableError):
        parse_adapters(ports_section(port("mlx5_0", 0x0C, dev=device)))


def test_the_same_port_twice_is_unreadable():
    with pytest.raises(UnreadableError, match="twice"):
        parse_adapters(ports_section(port("mlx5_0", 0x0C), port("mlx5_0", 0x1C)))


def test_more_ports_than_a_node_can_have_are_unreadable():
    with pytest.raises(UnreadableError, match="more than"):
        parse_adapters(ports_section(*({"dev": f"mlx5_{number}", "port": 1} for number in range(2049))))


def test_percent_and_tabs_in_values_come_back():
    assert one_port(link_layer="a%25b%09c").link_layer == "a%b c"
    assert one_port(link_layer="%2509").link_layer == "%09"


def test_gids_that_are_garbage_are_left_out():
    gids = {
        "gid.0": "garbage RoCE v2",
        "gid.x": roce_gids("0a00:0001")["gid.3"],
        "gid.1": "",
        **roce_gids("0a00:0001", 2),
    }
    assert sorted(one_port(**gids).gids) == [2, 3, 4, 5]


def test_the_gid_index_is_that_of_roce_v2_over_ipv4():
    assert roce_gid_index(one_port(**roce_gids("0a00:0001"))) == 3
    assert roce_gid_index(one_port(**roce_gids("0a00:0001", first=8))) == 11
    assert roce_gid_index(one_port(**roce_gids("0a00:0001"), **roce_gids("0a00:0002", first=4))) == 3
    assert roce_gid_index(one_port()) is None


def test_a_gid_without_readable_type_is_no_index():
    gids = roce_gids("0a00:0001") | {"gid.3": "0000:0000:0000:0000:0000:ffff:0a00:0001 "}
    assert roce_gid_index(one_port(**gids)) is None


def test_ipv4_of_a_gid():
    assert ipv4_of_gid("0000:0000:0000:0000:0000:ffff:0a01:02ff") == "10.1.2.255"
    assert ipv4_of_gid("fe80:0000:0000:0000:5200:00ff:fe00:0001") is None
    assert ipv4_of_gid("0000:0000:0000:0000:0000:ffff:0a01:zzzz") is None


def test_pci_paths_keep_addresses_only():
    path = "/sys/devices/pci0000:0c/0000:0c:01.0/0000:0D:00.0/infiniband/mlx5_0"
    assert pci_path(path) == ("0000:0c:01.0", "0000:0d:00.0")
    assert pci_path("/sys/devices/pci10000:00/10000:00:02.0") == ("10000:00:02.0",)
    assert pci_path("") == ()
