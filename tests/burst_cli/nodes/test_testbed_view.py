"""A testbed as people see it: its table, what to type next, what is left of one that does not stand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testkit.terminal import lines_of

from burst_cli.nodes.testbed import next_steps, status_table
from cluster.testbed.node import Service
from cluster.testbed.status import NodeStatus, TestbedStatus


def node(number: int, **changes: object) -> NodeStatus:
    addresses = {"eth0": f"10.0.0.{number}", "rail0": f"10.1.0.{number}"}
    return replace(NodeStatus(f"lab{number}", addresses, Service.UP, Service.NONE, ()), **changes)  # type: ignore[arg-type]


PLAIN = TestbedStatus(
    "lab", True, "/lab", (node(1), node(2, sshd=Service.REFUSED, faults=("sshd_stop", "busy:0"))), "lab[1-2]", 1,
    ssh_config="/lab/ssh_config",
)  # fmt: skip
RICH = replace(
    PLAIN, nodes=(node(1, docker=Service.UP, slurm="idle"), node(2, slurm="down")), rails=2, rate="200mbit",
    hardware="h100x8", slurm_conf="/lab/slurm.conf",
)  # fmt: skip
REACH = "burst ... cluster=lab ssh -F /lab/ssh_config lab1"


def test_a_row_per_node_with_the_daemons_that_there_are() -> None:
    assert lines_of(status_table(PLAIN), status_table(RICH)) == [
        "lab: lab[1-2], 2 nodes, 1 rail, links unlimited, hardware none",
        "node eth0 rail0 sshd faults",
        "lab1 10.0.0.1 10.1.0.1 up –",
        "lab2 10.0.0.2 10.1.0.2 refused sshd_stop, busy:0",
        REACH,
        "lab: lab[1-2], 2 nodes, 2 rails, links 200mbit, hardware h100x8",
        "node eth0 rail0 sshd docker slurm faults",
        "lab1 10.0.0.1 10.1.0.1 up up idle –",
        f"lab2 10.0.0.2 10.1.0.2 up {Service.NONE.value} down –",
        REACH,
        "export SLURM_CONF=/lab/slurm.conf",
    ]


@pytest.mark.parametrize("sudo", ["", "sudo "])
def test_what_to_type_names_the_testbed(monkeypatch: pytest.MonkeyPatch, sudo: str) -> None:
    monkeypatch.setenv("SUDO_USER", "me" if sudo else "")
    partly = TestbedStatus("lab", False, "/lab", leftovers=("namespace lab1", "folder /lab"))
    assert lines_of(next_steps(PLAIN, 2.34), status_table(partly)) == [
        "Built in 2.3 s. Next:",
        f"{sudo}burst check-nodes cluster=lab",
        f"{sudo}burst testbed fault lab2 sshd_hang --name lab and check again; --clear mends it",
        f"{sudo}burst testbed down --name lab",
        "lab: stands only in part",
        "namespace lab1",
        "folder /lab",
        f"remove it: {sudo}burst testbed down --name lab",
    ]
    assert next_steps(replace(PLAIN, name="testbed"), 2.34).plain.endswith(f"  {sudo}burst testbed down")
