"""The group `ib` over time: error counters, flapping links, failing firmware; and GPUDirect."""

from __future__ import annotations

import json

import pytest
from fabric_nodes import COMPUTE, FabricNode, lines
from testkit.check_fakes import ended, only

from cluster.checks.finding import Verdict

ONE = "mlx5_5"
FAIL, WARN, UNKNOWN = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN


@pytest.fixture
def node() -> FabricNode:
    return FabricNode.healthy()


@pytest.mark.parametrize(
    "name",
    [
        *("excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors"),
        *("port_rcv_errors", "port_rcv_remote_physical_errors", "symbol_error"),
    ],
)
def test_one_error_between_two_samples_fails(node: FabricNode, name: str):
    node.counters[ONE][name], node.later = 5, {ONE: {name: 6}}
    assert node.complaints() == [("ib.counters", f"{ONE}:1", FAIL)]


@pytest.mark.parametrize("name", ["out_of_sequence", "packet_seq_err", "port_xmit_discards", "rnr_nak_retry_err"])
def test_what_a_crowded_network_counts_is_a_warning(node: FabricNode, name: str):
    node.counters[ONE][name], node.later = 5, {ONE: {name: 6}}
    assert node.complaints() == [("ib.counters", f"{ONE}:1", WARN)]


def test_traffic_is_no_error(node: FabricNode):
    node.later = {name: {"port_xmit_data": 10**15} for name in COMPUTE}
    assert not node.complaints()


def test_what_a_counter_stands_at_is_no_error(node: FabricNode):
    node.counters[ONE]["link_downed"] = 255
    assert not node.complaints()


def test_counters_that_went_backwards_tell_nothing(node: FabricNode):
    node.counters[ONE]["symbol_error"], node.later = 9, {ONE: {"symbol_error": 0}}
    assert node.complaints() == [("ib.counters", f"{ONE}:1", UNKNOWN)]


def test_a_port_without_counters_is_unknown_and_a_virtual_function_is_skipped(node: FabricNode):
    for told in ({}, {"symbol_error": 0}):
        node.counters[ONE] = told
        assert node.complaints() == [("ib.counters", f"{ONE}:1", UNKNOWN)]
    node.all_compute(physfn=True)
    node.ports = {name: node.ports[name] for name in COMPUTE}
    node.counters = {name: node.counters[name] for name in COMPUTE}
    assert not node.complaints()


def lose_link(node: FabricNode, *at: float, device: str = ONE) -> None:
    address = str(node.ports[device]["path"])[-12:]
    node.kernel += [f"[{time:12.6f}] mlx5_core {address} ib3: Link down" for time in at]


@pytest.mark.parametrize(
    ("at", "severity"),
    [
        ((599.0, 600.0, 10.0), None),  # while it boots
        ((601.0,), WARN),
        ((899000.0, 899001.0), WARN),
        ((899000.0, 899001.0, 899002.0), FAIL),
        ((813000.0, 899001.0, 899002.0), WARN),  # one of them a day ago
    ],
)
def test_a_link_that_was_lost_three_times_in_a_day_fails(node: FabricNode, at: tuple[float, ...], severity: Verdict):
    lose_link(node, *at)
    assert node.complaints() == ([("ib.flaps", ONE, severity)] if severity else [])


def test_a_time_after_the_time_of_the_probe_is_now(node: FabricNode):
    lose_link(node, 900001.0)
    assert "the last 0 s ago" in only([one for one in node.check() if one.device], "ib.flaps").observed


def test_without_places_on_the_bus_nobody_knows_whose_lines_matter(node: FabricNode):
    node.all_compute(path="")
    assert [check for check, _, _ in node.complaints(hcas=8)] == ["ib.flaps", "ib.health"]


def test_links_of_other_ports_may_flap(node: FabricNode):
    lose_link(node, 899000.0, 899001.0, 899002.0, device="mlx5_3")
    assert not node.complaints()


def test_firmware_that_failed_and_heat_are_in_the_kernel_log(node: FabricNode):
    address = str(node.ports[ONE]["path"])[-12:]
    node.kernel.append(
        f"[ 5000.000000] mlx5_core {address}: poll_health:830: device's health compromised - reached miss"
    )
    assert node.complaints() == [("ib.health", ONE, FAIL)]
    node.kernel[-1] = f"[ 5000.000000] mlx5_core {address}: High temperature on sensors with bit set 0x1"
    assert node.complaints() == [("ib.health", ONE, WARN)]


@pytest.mark.parametrize(("gbps", "bad"), [("252.056", True), ("504.112", False)])
def test_pcie_that_is_slow_on_the_way_fails_when_it_cannot_feed_the_port(node: FabricNode, gbps: str, bad: bool):
    address = str(node.ports[ONE]["path"])[-12:]
    text = (
        f"{gbps} Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x16 link at 0000:30:01.0 (capable of 9 Gb/s)"
    )
    node.kernel.append(f"[   12.100000] mlx5_core {address}: {text}")
    assert node.complaints() == ([("ib.health", ONE, FAIL)] if bad else [])
    node.ports[ONE]["current_link_width"] = 8
    assert node.complaints() == [("ib.pcie", ONE, FAIL)]


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15"


@pytest.mark.parametrize(
    ("told", "severity"),
    [
        ({"peermem": "yes"}, Verdict.OK),
        ({"peermem": "no", "driver": OPEN, "dmabuf": "yes"}, Verdict.OK),
        ({"peermem": "no", "driver": OPEN, "dmabuf": "no"}, FAIL),
        ({"peermem": "no", "driver": OPEN, "dmabuf": "unreadable"}, UNKNOWN),
        ({"peermem": "no", "driver": CLOSED, "dmabuf": "yes"}, FAIL),
        ({"peermem": "no", "driver": ""}, FAIL),
        ({"peermem": "no", "driver": "", "nvidia": "no"}, FAIL),
    ],
)
def test_adapters_must_reach_gpu_memory(node: FabricNode, told: dict[str, str], severity: Verdict):
    node.gpudirect = told
    assert only(node.check(), "ib.gpudirect").severity is severity


def test_a_node_without_gpus_needs_no_gpudirect(node: FabricNode):
    node.gpus, node.gpudirect = [], {"peermem": "no", "nvidia": "no"}
    assert only(node.check(), "ib.gpudirect").severity is Verdict.SKIP


def test_samples_about_different_ports_and_what_is_no_counter_tell_nothing(node: FabricNode):
    bad = [lines([("sample1", {"dev": "mlx5_0", "port": 1, "link_downed": 0})])]
    for text in ("-1", "N/A"):
        samples = [(f"sample{at}", {"dev": "mlx5_0", "port": 1, "link_downed": text}) for at in (1, 2)]
        bad.append(lines(samples))
    for output in bad:
        node.sections = {"ib.counters": ended("ib.counters", output)}
        assert node.complaints() == [("ib.counters", None, UNKNOWN)]


@pytest.mark.parametrize("code", [0, 1])
def test_a_kernel_log_that_may_not_be_read_is_not_a_quiet_one(node: FabricNode, code: int):
    text = "uptime\t900\ndmesg: read kernel buffer failed: Operation not permitted"
    node.sections = {"kernel.log": ended("kernel.log", text, code)}
    assert node.complaints() == [("ib.flaps", None, UNKNOWN), ("ib.health", None, UNKNOWN)]
    assert "kernel.dmesg_restrict" in only(node.check(), "ib.flaps").remedy


def test_gpudirect_that_lost_a_field_is_unknown(node: FabricNode):
    whole = json.loads(node.probe().section("ib.gpudirect").output)
    for lost in whole:
        text = json.dumps({key: value for key, value in whole.items() if key != lost})
        node.sections = {"ib.gpudirect": ended("ib.gpudirect", text)}
        assert node.complaints() == [("ib.gpudirect", None, UNKNOWN)], lost
