"""Fake hardware of testbed nodes: what a session sees, and that faults change it."""

from __future__ import annotations

import pytest
from testkit.connecting import connect

from cluster.testbed.faults import clear_faults, set_fault


@pytest.fixture(scope="module")
def testbed(module_testbeds):
    return module_testbeds.make(nodes=2, rails=1, hardware="h100x8")


def run(testbed, node: str, script: str) -> str:
    with connect(testbed.host(node)) as connection:
        result = connection.run(["sh", "-c", script])
    return (result.stdout + result.stderr).decode()


def test_a_session_sees_fake_gpus_and_adapters_and_what_has_no_fake_is_the_nodes_own(testbed):
    node = testbed.node_names[0]
    told = run(
        testbed,
        node,
        "cd $BURST_PROBE_ROOT && nvidia-smi -L && ls -m sys/class/infiniband &&"
        " cat proc/mounts proc/net/dev proc/self/limits",
    )

    assert told.count("GPU ") == 8
    assert [word for word in ("mlx5_0", " /etc/hosts ", "rail0:") if word not in told] == []
    assert "Max locked memory         unlimited            unlimited            bytes" in told


def test_hardware_faults_show_on_their_node_and_are_taken_back(testbed):
    one, other = testbed.node_names
    set_fault(testbed, one, "hardware", "gpu_lost:3")
    set_fault(testbed, one, "hardware", "driver:535.104.05")
    set_fault(testbed, one, "hardware", "no_peermem")
    broken = run(testbed, one, "nvidia-smi -L")
    clear_faults(testbed, one, "hardware", "gpu_lost:3")

    assert "Unable to determine the device handle" in broken
    assert "nvidia_peermem" not in run(testbed, one, "ls $BURST_PROBE_ROOT/sys/module")
    assert "535.104.05" in run(testbed, one, "nvidia-smi -q -x")
    clear_faults(testbed, one)
    assert "535.104.05" not in run(testbed, one, "nvidia-smi -q -x")
    assert run(testbed, other, "nvidia-smi -L").count("GPU ") == 8
