"""Faults as a session sees them, and that they can be taken back; those of SSH itself are seen by the checks."""

from __future__ import annotations

import time

import pytest
from testkit.connections import connect, run_on
from testkit.waiting import wait_for

from cluster.testbed.faults import clear_faults, set_fault
from cluster.testbed.machine import TestbedError
from engine.config.errors import ConfigError


@pytest.fixture(scope="module")
def testbed(module_testbeds):
    return module_testbeds.make(nodes=2, rails=1, hardware="h100x8")


@pytest.fixture
def node(testbed):
    """The node that gets faults; healthy again afterwards."""
    yield testbed.node_names[0]
    clear_faults(testbed, testbed.node_names[0])


def shell(testbed, node: str, script: str) -> str:
    return run_on(testbed, node, "sh", "-c", script)


def test_sessions_live_on_when_sshd_stops(testbed, node):
    with connect(testbed.host(node)) as connection:
        set_fault(testbed, node, "sshd_stop")

        assert connection.run(["hostname"]).stdout.decode().strip() == node


def test_a_cut_rail_leaves_the_way_of_ssh(testbed, node):
    set_fault(testbed, node, "link_down", "rail0")
    assert "NO-CARRIER" in run_on(testbed, node, "ip", "link", "show", "rail0")
    clear_faults(testbed, node, "link_down", "rail0")
    assert "NO-CARRIER" not in run_on(testbed, node, "ip", "link", "show", "rail0")


def test_a_slow_link_carries_less(testbed, node):
    def seconds() -> float:
        with connect(testbed.host(node)) as connection:
            begin = time.monotonic()
            assert len(connection.run(["head", "-c", "1500000", "/dev/zero"]).stdout) == 1_500_000
            return time.monotonic() - begin

    set_fault(testbed, node, "link_slow", "10mbit")
    slow = seconds()
    clear_faults(testbed, node, "link_slow")
    assert slow > 0.7  # 1.2 s of 10 mbit/s, less what the bucket lets through at once
    wait_for(lambda: seconds() < 0.7, "the link as it was before")  # a busy machine may need more than one try


def test_a_full_disk_is_full_for_new_sessions_of_that_node_only_and_may_have_some_space_left(testbed, node):
    other, home = testbed.node_names[1], testbed.node(node).home
    shell(testbed, node, "mkdir -p ~/'my däta' ~/space; echo kept >~/'my däta/file'")
    folder = str(home / "my däta")
    set_fault(testbed, node, "disk_full", folder)
    set_fault(testbed, node, "disk_full", f"{home}/space:3m")
    assert shell(testbed, node, f"echo text >'{folder}/new' || echo failed") == "failed"
    assert run_on(testbed, node, "df", "--output=avail", f"{home}/space").split()[1] == "3072"
    assert run_on(testbed, other, "cat", f"{folder}/file") == "kept"
    clear_faults(testbed, node, "disk_full")
    assert run_on(testbed, node, "cat", f"{folder}/file") == "kept"


LOOK = (
    "cd $BURST_PROBE_ROOT; (nvidia-smi -L; nvidia-smi -q -x; ls -m sys/class/infiniband sys/module;"
    " cat proc/mounts proc/net/dev proc/self/limits) 2>&1 || :"
)


def test_a_session_sees_fake_hardware_with_its_faults_until_they_are_taken_back(testbed, node):
    def seen(name: str = node) -> list[bool]:
        told = shell(testbed, name, LOOK)
        # What has no fake is the node's own.
        common = ("mlx5_0", " /etc overlay ", "rail0:", "Max locked memory         unlimited            unlim")
        assert [word for word in common if word not in told] == []
        changed = ("Unable to determine the device handle", "535.104.05", "nvidia_peermem", "GPU 7: ")
        return [word in told for word in changed]

    healthy = [False, False, True, True]
    assert seen() == healthy
    for fault in ("gpu_lost:3", "driver:535.104.05", "no_peermem"):
        set_fault(testbed, node, "hardware", fault)
    assert (seen(), seen(testbed.node_names[1])) == ([True, False, False, False], healthy)
    clear_faults(testbed, node, "hardware", "gpu_lost:3")
    assert seen() == [False, True, False, True]
    clear_faults(testbed, node)
    assert seen() == healthy


def test_faults_add_up_and_a_kind_that_can_be_once_is_replaced(testbed, node):
    clear_faults(testbed, node, "key_swap")  # which is not there
    set_fault(testbed, node, "link_slow", "50mbit")
    set_fault(testbed, node, "login_refused")
    after = set_fault(testbed, node, "link_slow", "60mbit")
    assert [str(fault) for fault in after.faults[node]] == ["login_refused", "link_slow 60mbit"]
    assert clear_faults(testbed, node).faults[node] == ()


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("earthquake", None, "no fault 'earthquake'; there are link_down"),
        ("sshd_stop", "now", "takes no value"),
        ("link_slow", None, "needs a value: link_slow RATE"),
        ("link_slow", "slow", "expected one such as"),
        ("link_down", "eth9", "has the interfaces eth0, rail0"),
        ("disk_full", "data", "expected a folder"),
        ("disk_full", "/", "expected a folder"),
        ("disk_full", "/no/such/folder", "has no folder"),
        ("hardware", "gpu_lost:9", "8 GPUs"),
    ],
)
def test_a_fault_without_sense_is_refused_in_words(testbed, node, kind, value, text):
    with pytest.raises(ConfigError) as caught:
        set_fault(testbed, node, kind, value)
    assert text in str(caught.value)


def test_a_node_that_is_not_there_is_named_with_those_that_are(testbed):
    with pytest.raises(TestbedError, match=r"no node 'elsewhere'; it has .*\[1-2\]"):
        set_fault(testbed, "elsewhere", "sshd_stop")
