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


def test_a_session_sees_fake_gpus_and_adapters(testbed):
    node = testbed.node_names[0]

    assert run(testbed, node, "nvidia-smi -L").count("GPU ") == 8
    assert "mlx5_0" in run(testbed, node, "ls $BURST_PROBE_ROOT/sys/class/infiniband").split()


def test_what_has_no_fake_is_the_nodes_own(testbed):
    node = testbed.node_names[0]
    links = run(testbed, node, "ls $BURST_PROBE_ROOT/sys/class/net/").split()

    assert {"eth0", "lo", "rail0"} <= set(links)
    assert run(testbed, node, "cat $BURST_PROBE_ROOT/etc/hostname").strip() == node
    assert "MemTotal" in run(testbed, node, "cat $BURST_PROBE_ROOT/proc/meminfo")
    assert "State" in run(testbed, node, "cat $BURST_PROBE_ROOT/proc/self/status")


def test_hardware_faults_show_on_their_node_and_are_taken_back(testbed):
    one, other = testbed.node_names
    set_fault(testbed, one, "hardware", "gpu_lost:3")
    set_fault(testbed, one, "hardware", "driver:535.104.05")
    set_fault(testbed, one, "hardware", "no_peermem")
    broken = run(testbed, one, "nvidia-smi -L")
    clear_faults(testbed, one, "hardware", "gpu_lost:3")

    assert "Unable to determine the device handle" in broken
    assert "nvidia_peermem" not in run(testbed, one, "ls $BURST_PROBE_ROOT/sys/module")
    assert "535.104.05" in run(testbed, one, "nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    clear_faults(testbed, one)
    assert "535.104.05" not in run(testbed, one, "nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    assert run(testbed, other, "nvidia-smi -L").count("GPU ") == 8


def test_a_node_with_adapters_may_lock_memory(testbed):
    limits = run(testbed, testbed.node_names[0], "cat $BURST_PROBE_ROOT/proc/self/limits")

    assert "Max locked memory         unlimited            unlimited            bytes" in limits.splitlines()[9]
    assert limits.splitlines()[0].startswith("Limit ")
