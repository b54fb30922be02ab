"""The group `ib` over time: error counters, flapping links, failing firmware; and GPUDirect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fabric_nodes import COMPUTE, FabricNode, lines
from testkit.check_fakes import ended, only

from cluster.checks.finding import Verdict

ONE = "mlx5_5"
UNKNOWN = Verdict.UNKNOWN


@pytest.fixture
def node() -> FabricNode:
    return FabricNode.healthy()


ERRORS = (
    *("excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors"),
    *("port_rcv_errors", "port_rcv_remote_physical_errors", "symbol_error"),
)
CROWD = ("local_ack_timeout_err", "out_of_sequence", "packet_seq_err", "port_xmit_discards", "rnr_nak_retry_err")


@pytest.mark.parametrize(
    ("grown", "expected"),
    [
        *(({name: 1}, [f"FAIL ib.counters (mlx5_5:1): errors are being counted: {name} +1"]) for name in ERRORS),
        *(({name: 2}, [f"WARN ib.counters (mlx5_5:1): packets are lost or late: {name} +2"]) for name in CROWD),
        (
            {"symbol_error": 1, "link_downed": 3, "packet_seq_err": 9},
            ["FAIL ib.counters (mlx5_5:1): errors are being counted: link_downed +3, symbol_error +1"],
        ),
        ({"port_xmit_data": 10**15}, []),  # traffic
        ({"link_downed": 0, "symbol_error": 0}, []),  # what a counter stands at
    ],
)
def test_what_was_counted_between_two_samples_decides(node: FabricNode, grown: dict[str, int], expected: list[str]):
    node.counters[ONE] |= dict.fromkeys(grown, 5)
    node.later = {ONE: {name: 5 + by for name, by in grown.items()}}
    assert node.told() == expected


def test_a_port_without_counters_is_unknown_and_a_virtual_function_is_skipped(node: FabricNode):
    for told in ({}, {"symbol_error": 0}):
        node.counters[ONE] = told
        assert node.complaints() == [("ib.counters", f"{ONE}:1", UNKNOWN)]
    node.all_compute(physfn=True)
    node.ports = {name: node.ports[name] for name in COMPUTE}
    node.counters = {name: node.counters[name] for name in COMPUTE}
    assert not node.complaints()


def test_samples_about_different_ports_and_what_is_no_counter_tell_nothing(node: FabricNode):
    bad = [lines([("sample1", {"dev": "mlx5_0", "port": 1, "link_downed": 0})])]
    for text in ("-1", "N/A"):
        samples = [(f"sample{at}", {"dev": "mlx5_0", "port": 1, "link_downed": text}) for at in (1, 2)]
        bad.append(lines(samples))
    for output in bad:
        node.sections = {"ib.counters": ended("ib.counters", output)}
        assert node.complaints() == [("ib.counters", None, UNKNOWN)]


DOWN, LOST = "ib3: Link down", "FAIL ib.flaps (mlx5_5): its link was lost {} since boot, the last {} ago"
SICK = "poll_health:830: device's health compromised - reached miss"
SLOW = "available PCIe bandwidth, limited by 16.0 GT/s PCIe x16 link at 0000:30:01.0 (capable of 9 Gb/s)"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(at, DOWN) for at in (599.0, 600.0, 10.0)], []),  # while it boots
        ([(601.0, DOWN)], ["WARN" + LOST[4:].format("1 time", "10 days")]),
        ([(899000.0, DOWN), (899001.0, DOWN)], ["WARN" + LOST[4:].format("2 times", "17 min")]),
        ([(899000.0, DOWN), (899001.0, DOWN), (899940.0, DOWN)], [LOST.format("3 times", "60 s")]),
        ([(813600.0, DOWN), (899001.0, DOWN), (899940.0, DOWN)], ["WARN" + LOST[4:].format("3 times", "60 s")]),
        ([(813601.0, DOWN), (899001.0, DOWN), (900001.0, DOWN)], [LOST.format("3 times", "0 s")]),  # later than now
        ([(None, DOWN)] * 3, [LOST.format("3 times", "0 s")]),  # a log without times
        ([(5000.0, SICK)] * 2, ["FAIL ib.health (mlx5_5): its firmware failed (2 lines in the kernel log)"]),
        (
            [(5000.0, "High temperature on sensors with bit set 0x1")],
            ["WARN ib.health (mlx5_5): it is too hot (1 lines in the kernel log)"],
        ),
        (
            [(9.0, f"504.112 Gb/s {SLOW}"), (12.1, f"252.056 Gb/s {SLOW}"), (13.0, "Link up")],  # the last one counts
            [
                "FAIL ib.health (mlx5_5): PCIe carries 252 Gb/s to it, its port 400 Gb/s: "
                "limited by 16.0 GT/s PCIe x16 link at 0000:30:01.0 (capable of 9 Gb/s)"
            ],
        ),
        ([(12.1, f"252.056 Gb/s {SLOW}"), (13.0, f"400.000 Gb/s {SLOW}")], []),
    ],
)
def test_the_kernel_log_tells_of_links_and_firmware(
    node: FabricNode, said: list[tuple[float | None, str]], expected: list[str]
):
    address = str(node.ports[ONE]["path"])[-12:]
    node.kernel += [f"{f'[{at:12.6f}] ' if at else ''}mlx5_core {address}: {text}" for at, text in said]
    assert node.told() == expected
    node.kernel = [line.replace(address, str(node.ports["mlx5_3"]["path"])[-12:]) for line in node.kernel]
    assert not node.told()  # of a port that is not for training


def test_lost_lanes_are_told_once(node: FabricNode):
    node.kernel.append(f"[   12.1] mlx5_core {str(node.ports[ONE]['path'])[-12:]}: 252.056 Gb/s {SLOW}")
    node.ports[ONE]["current_link_width"] = 8
    assert node.told() == ["FAIL ib.pcie (mlx5_5): x8 at 32 GT/s; expected: x16"]


def test_without_places_on_the_bus_nobody_knows_whose_lines_matter(node: FabricNode):
    node.all_compute(path="")
    assert [check for check, _, _ in node.complaints(hcas=8)] == ["ib.flaps", "ib.health"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_kernel_log_that_may_not_be_read_is_not_a_quiet_one(node: FabricNode, code: int):
    text = "uptime\t900\ndmesg: read kernel buffer failed: Operation not permitted"
    node.sections = {"kernel.log": ended("kernel.log", text, code)}
    assert node.complaints() == [("ib.flaps", None, UNKNOWN), ("ib.health", None, UNKNOWN)]
    assert "kernel.dmesg_restrict" in only(node.check(), "ib.flaps").remedy


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15"
PEERS = ["/sys/module/nvidia_peermem/version"]
NO_WAY = (Verdict.FAIL, "adapters cannot reach GPU memory")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"peers": PEERS}, (Verdict.OK, "nvidia_peermem")),
        ({"driver": OPEN, "dmabuf": True}, (Verdict.OK, "DMA-BUF")),
        ({"peers": PEERS, "driver": OPEN, "dmabuf": True}, (Verdict.OK, "nvidia_peermem and DMA-BUF")),
        ({"driver": OPEN}, NO_WAY),
        (
            {"driver": OPEN, "dmabuf": None},
            (UNKNOWN, "no module nvidia_peermem; whether the kernel has DMA-BUF cannot be read"),
        ),
        ({"driver": CLOSED, "dmabuf": True}, NO_WAY),
        ({}, NO_WAY),
        ({"module": False}, NO_WAY),
    ],
)
def test_adapters_must_reach_gpu_memory(node: FabricNode, told: Mapping[str, object], expected: tuple[Verdict, str]):
    node.gpudirect |= {"peers": [], "driver": "", "dmabuf": False, **told}
    found = only(node.check(), "ib.gpudirect")
    assert (found.severity, found.observed) == expected
    assert (found.evidence == PEERS[0]) == ("peers" in told)


def test_a_node_without_gpus_needs_no_gpudirect(node: FabricNode):
    node.gpus, node.gpudirect = [], {**node.gpudirect, "peers": [], "driver": "", "module": False}
    assert only(node.check(), "ib.gpudirect").severity is Verdict.SKIP
