"""NCCL's own log against the plan."""

from __future__ import annotations

import time

import pytest

from cluster.checks.finding import Verdict
from cluster.env.facts import HcaDecision, NodeEnvironment
from cluster.env.nccl_log import check_nccl_log
from cluster.survey.adapters import HcaPort


def planned(node: str, *devices: str) -> NodeEnvironment:
    ports = [HcaPort(device, 1, "InfiniBand", "ACTIVE", "LinkUp", 400.0) for device in devices]
    return NodeEnvironment(node, (), hcas=tuple(HcaDecision(port, True, "up") for port in ports), interface="eth0")


TWO = {"node1": planned("node1", "mlx5_0", "mlx5_3")}
HEAD = "node1:4711:4790 [0] NCCL INFO "
USING = f"{HEAD}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB/SHARP [RO]; OOB eth0:10.0.0.1<0>\n"
DIRECT = f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
GOOD = (
    "node1:4711:4711 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n"
    "node1:4711:4711 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"
    f"{USING}{HEAD}Using network IB\n{DIRECT}"
    f"{HEAD}Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1/GDRDMA/Shared\n"
)


def verdicts(text: str, environments: dict[str, NodeEnvironment] = TWO) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in check_nccl_log(text, environments):
        found.setdefault(finding.severity.value, []).append(finding.observed)
    return found


def test_a_log_as_planned_is_ok() -> None:
    assert verdicts(GOOD) == {
        "OK": ["2 ports, as planned", "all 2 channels over NET/IB with GPUDirect RDMA"],
    }


def test_a_port_that_nccl_does_not_take_is_named() -> None:
    found = check_nccl_log(GOOD.replace(" [1]mlx5_3:1/IB/SHARP", ""), TWO)
    assert [(one.device, one.severity) for one in found if one.device] == [("mlx5_3:1", Verdict.FAIL)]
    assert "NET/IB : Using" in next(one.evidence for one in found if one.device)


def test_a_port_that_begins_like_a_planned_one_is_named() -> None:
    assert "NCCL uses mlx5_30:1" in verdicts(GOOD.replace("[RO]", "[2]mlx5_30:1/RoCE [RO]"))["FAIL"]


@pytest.mark.parametrize(
    "line",
    [
        f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n",
        f"{HEAD}Using network Socket\n",
    ],
)
def test_sockets_where_ports_were_planned_fail(line: str) -> None:
    assert any("ocket" in text for text in verdicts(USING + line)["FAIL"])


def test_no_device_found_is_a_failure_for_every_planned_port() -> None:
    found = verdicts(f"{HEAD}NET/IB : No device found.\n{HEAD}Using network Socket\n")
    assert found["FAIL"] == ["NCCL does not use mlx5_0:1", "NCCL does not use mlx5_3:1", "NCCL uses network Socket"]


def test_channels_through_host_memory_are_a_warning_with_their_share() -> None:
    staged = DIRECT.replace("/GDRDMA", "")
    assert verdicts(GOOD + staged)["WARN"] == ["1 of 3 channels over NET/IB without GPUDirect RDMA"]
    assert verdicts(USING + staged)["WARN"] == ["1 of 1 channels over NET/IB without GPUDirect RDMA"]


def test_another_interface_than_planned_fails() -> None:
    found = verdicts(GOOD.replace("Bootstrap: Using eth0", "Bootstrap : Using docker0"))
    assert found["FAIL"] == ["NCCL meets the other ranks over docker0"]
    indexed = verdicts(GOOD.replace("Bootstrap: Using eth0", "Bootstrap : Using [0]docker0"))
    assert indexed == found


@pytest.mark.parametrize("text", ["", "hello\n", f"{HEAD}NCCL version 2.27.5\n", "node1:1:1 [0] NCCL WARN oops\n"])
def test_a_log_that_says_nothing_is_unknown_not_ok(text: str) -> None:
    assert list(verdicts(text)) == ["UNKNOWN"]


def test_a_node_that_plans_sockets_is_content_with_sockets() -> None:
    assert verdicts(f"{HEAD}Using network Socket\n", {"node1": planned("node1")}) == {"OK": ["sockets, as planned"]}


def test_lines_of_several_hosts_are_judged_apart() -> None:
    environments = {name: planned(name, "mlx5_0", "mlx5_3") for name in ("node1", "node2", "node3")}
    other = GOOD.replace("node1:", "node2.cluster.example:").replace("[1]mlx5_3:1/IB/SHARP ", "")
    by_node = {
        node: {one.severity for one in check_nccl_log(GOOD + other, environments) if one.node == node}
        for node in environments
    }
    assert by_node["node1"] == {Verdict.OK}
    assert Verdict.FAIL in by_node["node2"]
    assert by_node["node3"] == {Verdict.UNKNOWN}


def test_hosts_that_nobody_planned_are_unknown() -> None:
    environments = {name: planned(name, "mlx5_0") for name in ("a", "b")}
    assert {one.node for one in check_nccl_log(GOOD, environments)} == {"a", "b", "node1"}


@pytest.mark.parametrize("form", ["[rank0]: \x1b[33m{}\x1b[0m\n", "node1:0 | {}\n"])
def test_prefixes_of_launchers_and_escapes_do_not_hide_lines(form: str) -> None:
    assert verdicts("".join(form.format(line) for line in GOOD.splitlines())) == verdicts(GOOD)


def test_the_plugin_of_hpcx_is_infiniband() -> None:
    external = GOOD.replace("NET/IB", "NET/IBext_v10").replace("network IB", "network IBext_v10")
    assert verdicts(external) == verdicts(GOOD)


def test_a_network_that_is_not_compared_is_unknown() -> None:
    found = verdicts(f"{HEAD}Using network AWS Libfabric\n")
    assert found == {"UNKNOWN": ["NCCL uses network AWS Libfabric, a plugin that is not compared"]}


def test_reading_takes_time_in_proportion_to_the_log() -> None:
    line = "a:1:1 [" * 500 + " NCCL INFO " + "x.y-z " * 100 + "\n"
    begin = time.thread_time()  # nothing here waits, and what else the machine does is no matter
    check_nccl_log(line * 300 + "a" * 4_000_000, TWO)
    assert time.thread_time() - begin < 5


def test_a_hostile_log_is_bounded_and_harmless() -> None:
    text = f"{HEAD}NET/IB : Using [0]{'x' * 3_000_000}:1/IB\n" + f"\x1b]0;x\x07{USING}"
    for finding in check_nccl_log(text, TWO):
        assert "\x1b" not in finding.evidence + finding.observed
        assert len(finding.evidence) < 300
