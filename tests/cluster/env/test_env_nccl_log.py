"""NCCL's own log against the plan."""

from __future__ import annotations

import time

import pytest

from cluster.checks.finding import Finding, Verdict
from cluster.env.facts import HcaDecision, NodeEnvironment
from cluster.env.nccl_log import check_nccl_log
from cluster.remote_text import clean_text
from cluster.survey.adapters import HcaPort


def planned(node: str, *devices: str) -> NodeEnvironment:
    ports = [HcaPort(device, 1, "InfiniBand", "ACTIVE", "LinkUp", 400.0) for device in devices]
    return NodeEnvironment(node, (), hcas=tuple(HcaDecision(port, True, "up") for port in ports), interface="eth0")


TWO = {"node1": planned("node1", "mlx5_0", "mlx5_3")}
HEAD = "node1:4711:4790 [0] NCCL INFO "
USING = f"{HEAD}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB/SHARP [RO]; OOB eth0:10.0.0.1<0>\n"
DIRECT = f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
EXTERNAL = ("NET/IB", "NET/IBext_v10"), ("network IB", "network IBext_v10")  # the plugin of HPC-X
GOOD = (
    "node1:4711:4711 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n"
    "node1:4711:4711 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"
    f"{USING}{HEAD}Using network IB\n{DIRECT}"
    f"{HEAD}Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1/GDRDMA/Shared\n"
)


FINE = ["OK .hcas: 2 ports, as planned", "OK .network: all 2 channels over NET/IB with GPUDirect RDMA"]
STAGED = DIRECT.replace("/GDRDMA", "")
SOCKET = f"{HEAD}Using network Socket\n"
UNKNOWN = ["UNKNOWN : the log does not say what NCCL uses"]


def said(text: str, environments: dict[str, NodeEnvironment] = TWO) -> list[str]:
    def line(one: Finding) -> str:
        return f"{one.severity} {one.check.removeprefix('env.nccl_log')} ({one.device}): {one.observed}".replace(
            " (None)", ""
        )

    found = check_nccl_log(text, environments)
    assert all(one.evidence in clean_text(text) for one in found)
    assert all(one.evidence for one in found if one.severity in (Verdict.WARN, Verdict.FAIL))
    return [line(one) for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, FINE),
        (GOOD.replace(" [1]mlx5_3:1/IB/SHARP", ""), ["FAIL .hcas (mlx5_3:1): NCCL does not use mlx5_3:1", FINE[1]]),
        (GOOD.replace("[RO]", "[2]mlx5_30:1/RoCE [RO]"), ["FAIL .hcas (mlx5_30:1): NCCL uses mlx5_30:1", FINE[1]]),
        (
            f"{USING}{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n",
            [FINE[0], "FAIL .network: 1 channels go over NET/Socket"],
        ),
        (USING + SOCKET, [FINE[0], "FAIL .network: NCCL uses network Socket"]),
        (
            f"{HEAD}NET/IB : No device found.\n{SOCKET}",
            [
                *(f"FAIL .hcas ({port}): NCCL does not use {port}" for port in ("mlx5_0:1", "mlx5_3:1")),
                "FAIL .network: NCCL uses network Socket",
            ],
        ),
        (GOOD + STAGED, [FINE[0], "WARN .network: 1 of 3 channels over NET/IB without GPUDirect RDMA"]),
        *(
            (
                GOOD.replace("Bootstrap: Using eth0", words),
                [*FINE, "FAIL .interface: NCCL meets the other ranks over docker0"],
            )
            for words in ("Bootstrap : Using docker0", "Bootstrap : Using [0]docker0")
        ),
        *(
            (text, UNKNOWN)
            for text in ("", "hello\n", f"{HEAD}NCCL version 2.27.5\n", "node1:1:1 [0] NCCL WARN oops\n")
        ),
        (
            f"{HEAD}Using network AWS Libfabric\n",
            ["UNKNOWN .network: NCCL uses network AWS Libfabric, a plugin that is not compared"],
        ),
        (GOOD.replace(*EXTERNAL[0]).replace(*EXTERNAL[1]), FINE),
        # What launchers put before a line, and escapes, hide nothing.
        *(
            ("".join(form.format(line) for line in GOOD.splitlines()), FINE)
            for form in ("[rank0]: \x1b[33m{}\x1b[0m\n", "node1:0 | {}\n")
        ),
    ],
)
def test_a_log_against_the_plan_of_two_ports(text: str, expected: list[str]) -> None:
    assert said(text) == expected


def test_a_node_that_plans_sockets_is_content_with_sockets() -> None:
    assert said(SOCKET, {"node1": planned("node1")}) == ["OK .network: sockets, as planned"]


def test_hosts_are_matched_by_name_and_judged_apart() -> None:
    environments = {name: planned(name, "mlx5_0", "mlx5_3") for name in ("node1", "node2", "node3")}
    other = GOOD.replace("node1:", "NODE2.cluster.example:").replace("[1]mlx5_3:1/IB/SHARP ", "")
    text = GOOD + other + GOOD.replace("node1:", "stranger:")
    found = check_nccl_log(text, environments)
    told = [("node1", "OK")] * 2 + [("node2", "FAIL"), ("node2", "OK"), ("node3", "UNKNOWN"), ("stranger", "UNKNOWN")]
    assert [(one.node, str(one.severity)) for one in found] == told
    assert found[2].evidence.startswith("NODE2.cluster.example:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB")


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
