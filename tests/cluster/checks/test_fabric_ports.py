"""Adapters, counters and the kernel's words: from the lines of the probe to values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabric_nodes import COMPUTE, FabricNode, damaged, ended, lines, port, roce_gids
from hypothesis import given
from hypothesis import strategies as st

from cluster.parse.infiniband import (
    ipv4_of_gid,
    parse_adapters,
    parse_counters,
    parse_gpudirect,
    parse_kernel,
    parse_ports,
    pci_path,
    roce_gid_index,
)
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import Section, SectionState


def ports_section(*fields: dict[str, object]) -> Section:
    return ended("ib.ports", lines([("port", one) for one in fields]))


def one_port(**changes: object):
    return parse_adapters(ports_section(port("mlx5_0", 0x0C, **changes))).ports[0]


def test_a_port_has_all_that_the_probe_told():
    found = one_port()
    assert (found.name, found.state, found.phys_state, found.rate_gbps) == ("mlx5_0:1", "ACTIVE", "LinkUp", 400.0)
    assert found.pci_path == ("0000:0c:01.0", "0000:0d:00.0", "0000:0e:01.0", "0000:10:00.0")
    assert (found.pcie_width, found.pcie_width_max, found.pcie_gts, found.pcie_gts_max) == (16, 16, 32.0, 32.0)
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
    names = [found.device for found in parse_ports(FabricNode.healthy().probe())]
    assert names[:3] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert names.index("mlx5_11") > names.index("mlx5_8")
    assert len(names) == len(COMPUTE) + 3


def test_parse_ports_adds_the_counters_of_the_second_sample():
    node = FabricNode.healthy()
    node.later = {"mlx5_0": {"symbol_error": 9}}
    assert parse_ports(node.probe())[0].counters["symbol_error"] == 9


def test_parse_ports_lives_without_counters():
    probe = damaged(FabricNode.healthy().probe(), "ib.counters", state=SectionState.TIMED_OUT)
    assert {len(found.counters) for found in parse_ports(probe)} == {0}


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


def test_counters_give_differences_of_what_both_samples_tell():
    node = FabricNode.healthy()
    node.later = {"mlx5_0": {"symbol_error": 5, "new": 1}}
    samples = parse_counters(node.probe().section("ib.counters"))
    assert samples.deltas("mlx5_0:1") == {
        "link_downed": 0,
        "symbol_error": 5,
        "out_of_sequence": 0,
        "port_xmit_data": 0,
    }
    assert samples.deltas("mlx5_99:1") == {}


def test_samples_about_different_ports_are_unreadable():
    section = ended("ib.counters", lines([("sample1", {"dev": "mlx5_0", "port": 1, "link_downed": 0})]))
    with pytest.raises(UnreadableError, match="same ports"):
        parse_counters(section)


@pytest.mark.parametrize("text", ["-1", "N/A", "18446744073709551616", "9" * 400])
def test_what_is_no_counter_is_unreadable(text: str):
    samples = [(f"sample{number}", {"dev": "mlx5_0", "port": 1, "link_downed": text}) for number in (1, 2)]
    with pytest.raises(UnreadableError, match="no counter"):
        parse_counters(ended("ib.counters", lines(samples)))


def test_kernel_lines_have_time_and_device():
    node = FabricNode.healthy()
    node.kernel.append("[  123.456789] node7 kernel: mlx5_core 0000:9c:00.0 ib3: Link down")
    log = parse_kernel(node.probe().section("ib.kernel"))
    assert log.uptime_s == 900000.0
    assert (log.events[-1].at_s, log.events[-1].address) == (123.456789, "0000:9c:00.0")


@pytest.mark.parametrize("output", ["end", "uptime\t5\nend", "first\tx", "", "dmesg: read kernel buffer failed"])
def test_a_kernel_log_without_a_line_is_unreadable(output: str):
    with pytest.raises(UnreadableError):
        parse_kernel(ended("ib.kernel", output))


def test_gpudirect_tells_modules_and_driver():
    node = FabricNode.healthy()
    node.gpudirect = {"driver": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15", "dmabuf": "yes"}
    found = parse_gpudirect(node.probe().section("ib.gpudirect"))
    assert (found.peer_memory, found.has_open_driver, found.kernel_has_dmabuf) == (None, True, True)


def test_gpudirect_that_lost_a_line_is_unreadable():
    section = FabricNode.healthy().probe().section("ib.gpudirect")
    rows = [
        row for row in section.output.splitlines() if not row.startswith(("driver", "kernel", "exists\t/sys/kernel"))
    ]
    for lost in range(len(rows)):
        if "peermem" not in rows[lost]:
            with pytest.raises(UnreadableError):
                parse_gpudirect(replace(section, output="\n".join(rows[:lost] + rows[lost + 1 :])))


def test_gpudirect_with_another_answer_than_yes_or_no_is_unreadable():
    node = FabricNode.healthy()
    node.gpudirect = {"peermem": "maybe"}
    with pytest.raises(UnreadableError):
        parse_gpudirect(node.probe().section("ib.gpudirect"))


@given(st.text(max_size=400), st.sampled_from(["ib.ports", "ib.counters", "ib.kernel", "ib.gpudirect"]))
def test_any_text_is_read_or_refused(text: str, name: str):
    parse = {
        "ib.ports": parse_adapters,
        "ib.counters": parse_counters,
        "ib.kernel": parse_kernel,
        "ib.gpudirect": parse_gpudirect,
    }[name]
    for output in (text, f"{text}\nend", f"{text}\nend\t0", f"port\t{text}\nend\t1"):
        try:
            parse(ended(name, output))
        except UnreadableError as error:
            assert str(error)  # noqa: PT017
