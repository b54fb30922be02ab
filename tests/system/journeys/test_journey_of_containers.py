"""An image goes to the nodes, ranks run in it, and a cancelled run leaves nothing of them: as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.fault_rig import FOREVER, START_S, FaultRig
from testkit.image_rig import launcher_engine
from testkit.testbed_fixture import Testbeds

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]


def test_cancelling_a_run_removes_its_containers(testbeds: Testbeds, tmp_path: Path) -> None:
    testbed = testbeds.make(nodes=2, docker=True, docker_in_memory=True)
    rig = FaultRig(testbed, testbeds.config_dir, tmp_path)
    with launcher_engine() as engine:
        in_containers = rig.push_host_image(engine, testbed.node_names)
        words = ("image", "status", "--image", "rig/host:1", f"cluster={testbed.name}")
        told = rig.burst(*words, env={"DOCKER_HOST": engine.host})
        assert told.returncode == 0, told.stdout + told.stderr
    launched = rig.launch(*rig.words(FOREVER, "cluster.ranks_per_node=2", *in_containers))
    run = launched.wait_for_step(2)
    assert [rig.containers(name) for name in testbed.node_names] == [
        [f"burst-{run.run_id}-{name}"] for name in testbed.node_names
    ]
    ranks = {values["RANK"] for values in rig.processes(run.run_id).values() if "RANK" in values}
    assert ranks == {"0", "1", "2", "3"}
    cancelled = rig.burst("cancel", run.run_id, "--json")
    assert cancelled.returncode == 0, cancelled.stderr
    assert launched.end(START_S) == 130, launched.said()
    rig.wait_until_gone(run.run_id)
    assert [rig.containers(name) for name in testbed.node_names] == [[], []]
    status = rig.burst("status", run.run_id, "--json")
    assert status.returncode == 130
    assert json.loads(status.stdout)["status"] == "cancelled"
    assert run.read_state()["state"] == "cancelled"
