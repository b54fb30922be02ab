"""Docker engines of a testbed: one per node, apart from each other, gone afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from testkit.connecting import connect
from testkit.image_rig import busybox_tree
from testkit.machine_clock import machine_time

from cluster.testbed.teardown import leftovers, tear_down

IMAGE = "burst-testbed-test:1"
_SECONDS = 1_000_000 + os.getpid()  # how long a container sleeps: no other process has this argument


@pytest.fixture(scope="module")
def testbed(module_testbeds):
    return module_testbeds.make(nodes=2, docker=True, docker_in_memory=True)


def run(testbed, node: str, *argv: str, stdin: bytes = b"") -> str:
    with connect(testbed.host(node)) as connection:
        result = connection.run(argv, stdin=stdin)
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode().strip()


def test_an_image_lies_in_the_memory_of_the_node_that_got_it_and_its_containers_are_there(testbed):
    one, other = testbed.node_names
    run(testbed, one, "docker", "import", "-", IMAGE, stdin=busybox_tree())

    assert run(testbed, one, "docker", "run", "--rm", "--network", "host", IMAGE, "/bin/hostname") == one
    assert run(testbed, one, "docker", "images", "--quiet")
    assert run(testbed, other, "docker", "images", "--quiet") == ""
    assert run(testbed, one, "stat", "-f", "-c", "%T", str(testbed.nodes[0].docker / "data")) == "tmpfs"


def test_down_ends_containers_without_any_network_and_their_control_groups(make_testbed):
    testbed = make_testbed(nodes=1, docker=True)
    node = testbed.node_names[0]
    run(testbed, node, "docker", "import", "-", IMAGE, stdin=busybox_tree())
    run(testbed, node, "docker", "run", "-d", "--network", "none", IMAGE, "/bin/sleep", str(_SECONDS))
    assert any("control group" in left for left in leftovers(testbed.name))
    begin = machine_time()
    tear_down(testbed.name, Path("/nowhere"))
    elapsed_s = machine_time() - begin

    assert leftovers(testbed.name) == []
    assert elapsed_s < 5
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(_SECONDS) in (process.info["cmdline"] or ())
    ]
