"""NCCL's own log against the plan."""

from __future__ import annotations

import time

import pytest
from testkit.check_fakes import told

from cluster.checks.check import Verdict
from cluster.checks.nccl_log import check_nccl_log
from cluster.env.hcas import HcaDecision
from cluster.env.plan import NodeEnvironment
from cluster.remote_text import clean_text
from cluster.survey.rdma import HcaPort


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
SOCKET = f"{HEAD}Using network Socket\n"
CHANNEL = f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"
# What is said of ports and network where all is well; then what is not.
PORTS, NETWORK = "OK .hcas: 2 ports, as planned", "OK .network: all 2 channels over NET/IB with GPUDirect RDMA"
UNUSED = [
    f"FAIL .hcas ({port}): NCCL does not use {port}; expected: a planned port" for port in ("mlx5_0:1", "mlx5_3:1")
]
BY_SOCKET = "FAIL .network: NCCL uses network Socket; expected: NET/IB"
OTHER = "FAIL .hcas (mlx5_30:1): NCCL uses mlx5_30:1; expected: a port the plan drops"
MEETS = "FAIL .interface: NCCL meets the other ranks over docker0; expected: eth0"
STAGED = "WARN .network: 1 of 3 channels over NET/IB without GPUDirect RDMA; expected: GDRDMA"
PLUGIN = "UNKNOWN .network: NCCL uses network AWS Libfabric, a plugin that is not compared"
SILENT = "UNKNOWN : the log does not say what NCCL uses"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, [PORTS, NETWORK]),
        (GOOD.replace(" [1]mlx5_3:1/IB/SHARP", ""), [UNUSED[1], NETWORK]),
        (GOOD.replace("[RO]", "[2]mlx5_30:1/RoCE [RO]"), [OTHER, NETWORK]),
        (USING + CHANNEL, [PORTS, "FAIL .network: 1 channels go over NET/Socket; expected: NET/IB"]),
        (USING + SOCKET, [PORTS, BY_SOCKET]),
        (f"{HEAD}NET/IB : No device found.\n{SOCKET}", [*UNUSED, BY_SOCKET]),
        (GOOD + DIRECT.replace("/GDRDMA", ""), [PORTS, STAGED]),
        (GOOD.replace("Bootstrap: Using eth0", "Bootstrap : Using docker0"), [PORTS, NETWORK, MEETS]),
        (GOOD.replace("Bootstrap: Using eth0", "Bootstrap : Using [0]docker0"), [PORTS, NETWORK, MEETS]),
        *(
            (text, [SILENT])
            for text in ("", "hello\n", f"{HEAD}NCCL version 2.27.5\n", "node1:1:1 [0] NCCL WARN oops\n")
        ),
        (f"{HEAD}Using network AWS Libfabric\n", [PLUGIN]),
        # The plugin of HPC-X; what launchers put before a line, and escapes, hide nothing.
        (GOOD.replace("NET/IB", "NET/IBext_v10").replace("network IB", "network IBext_v10"), [PORTS, NETWORK]),
        *(
            ("".join(form.format(line) for line in GOOD.splitlines()), [PORTS, NETWORK])
            for form in ("[rank0]: \x1b[33m{}\x1b[0m\n", "node1:0 | {}\n")
        ),
    ],
)
def test_a_log_against_the_plan_of_two_ports(text: str, expected: list[str]) -> None:
    found = check_nccl_log(text, TWO)
    assert [line.replace("env.nccl_log", "") for line in told(found, whole=True)] == expected
    assert all(one.evidence in clean_text(text) for one in found)
    assert all(one.evidence and one.remedy for one in found if one.severity in (Verdict.WARN, Verdict.FAIL))


def test_a_node_that_plans_sockets_is_content_with_sockets() -> None:
    found = check_nccl_log(SOCKET, {"node1": planned("node1")})
    assert told(found, whole=True) == ["OK env.nccl_log.network: sockets, as planned"]


def test_hosts_are_matched_by_name_and_judged_apart() -> None:
    environments = {name: planned(name, "mlx5_0", "mlx5_3") for name in ("node1", "node2", "node3")}
    other = GOOD.replace("node1:", "NODE2.cluster.example:").replace("[1]mlx5_3:1/IB/SHARP ", "")
    found = check_nccl_log(GOOD + other + GOOD.replace("node1:", "stranger:"), environments)
    names = [("node1", "OK")] * 2 + [("node2", "FAIL"), ("node2", "OK"), ("node3", "UNKNOWN"), ("stranger", "UNKNOWN")]
    assert [(one.node, str(one.severity)) for one in found] == names
    assert found[2].evidence.startswith("NODE2.cluster.example:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB")


def test_a_hostile_log_is_bounded_and_harmless_and_takes_time_in_proportion() -> None:
    text = f"{HEAD}NET/IB : Using [0]{'x' * 3_000_000}:1/IB\n" + f"\x1b]0;x\x07{USING}"
    for finding in check_nccl_log(text, TWO):
        assert "\x1b" not in finding.evidence + finding.observed
        assert len(finding.evidence) < 300
    line = "a:1:1 [" * 500 + " NCCL INFO " + "x.y-z " * 100 + "\n"
    begin = time.thread_time()  # nothing here waits, and what else the machine does is no matter
    check_nccl_log(line * 300 + "a" * 4_000_000, TWO)
    assert time.thread_time() - begin < 5
