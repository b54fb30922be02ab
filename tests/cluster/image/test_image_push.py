"""Pushes to three nodes with an sshd and a Docker engine each: what moves, and what the engines hold afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from testkit.command_line import Result
from testkit.connections import connect, run_on
from testkit.image_rig import PushRig, launcher_engine, layer
from testkit.waiting import wait_for

from cluster.image.engine import Engine, Image

MIB = 1 << 20


@pytest.fixture(scope="module")
def rig(module_testbeds):
    testbed = module_testbeds.make(nodes=3, docker=True, docker_in_memory=True, rate="200mbit")
    with launcher_engine() as engine:
        yield PushRig(testbed, engine)


@pytest.fixture(autouse=True)
def no_relay_stays(rig):
    yield
    for name in rig.names:
        wait_for(lambda name=name: not rig.relays(name), f"the end of the relay on {name}")


def verified(rig: PushRig, image: Image, nodes: tuple[str, ...] | None = None) -> None:
    """Asks every node's engine, not the push; no other name of the image is left there."""
    for name in nodes or rig.names:
        with connect(rig.testbed.host(name)) as connection:
            there = Engine(connection.run, ["docker"]).find(image.name)
            assert there is not None
            assert there.identity == image.identity
            shown = json.loads(connection.run(["docker", "image", "inspect", image.name]).stdout)[0]
        assert shown["RepoTags"] == [image.name]
        # Only the store of containerd gives a digest to what was tagged.
        assert {name.partition("@")[0] for name in shown["RepoDigests"]} <= {image.name.partition(":")[0]}


def test_every_node_of_a_chain_gets_the_image_that_leaves_here_once_and_never_again(rig):
    image = rig.image(3, 2, 1)
    first, second = rig.push(image), rig.push(image)
    rig.engine("tag", image.name, "rig/other:latest")
    named = rig.push(rig.find("rig/other"), rig.names[:1])
    assert not first.failed | named.failed
    assert [node.route for node in first.plan.nodes] == ["direct", "chain", "chain"]
    assert named.sent_bytes < 10_000  # what is there under another name is only named
    run_on(rig.testbed, rig.names[0], "docker", "image", "rm", "rig/other:latest")
    data = str(rig.testbed.nodes[0].docker / "data")
    assert run_on(rig.testbed, rig.names[0], "stat", "-f", "-c", "%T", data) == "tmpfs"  # docker_in_memory
    verified(rig, image)
    assert all(6 * MIB <= node.received_bytes < 8 * MIB for node in first.nodes.values())
    assert first.sent_bytes < 8 * MIB
    assert (second.sent_bytes, second.failed) == (0, set())
    assert all(node.received_bytes == 0 and node.identity == image.identity for node in second.nodes.values())


def test_a_changed_last_layer_moves_alone(rig):
    below = layer(3 * MIB, 1), layer(MIB, 2)
    rig.push(rig.load("rig/changed:1", *below, layer(3 * MIB, 3)), rig.names[:2])
    image = rig.load("rig/changed:1", *below, layer(MIB, 4))
    pushed = rig.push(image, rig.names[:2])
    assert not pushed.failed
    assert all(MIB <= node.received_bytes < 1.1 * MIB for node in pushed.nodes.values())
    verified(rig, image, rig.names[:2])


def test_a_killed_launcher_leaves_no_relay_and_the_next_push_succeeds(rig, module_testbeds, tmp_path):
    image, node = rig.image(3), rig.names[0]
    words = ["image", "push", f"cluster={rig.testbed.name}", "--image", image.name, "--limit", "1MB/s"]
    environment = {**os.environ, "DOCKER_HOST": rig.engine.host, "XDG_CONFIG_HOME": str(module_testbeds.config_dir)}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "burst_cli", *words]
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_for(lambda: rig.relays(node), "the push")
        launcher.kill()
        launcher.wait(60)
    wait_for(lambda: not rig.relays(node), "the end of the relay")
    pushed = rig.push(image)
    assert not pushed.failed
    verified(rig, image)


def test_push_and_status_as_a_person_types_them(rig, module_testbeds, monkeypatch, burst):
    image = rig.image(0.5)
    monkeypatch.setenv("DOCKER_HOST", rig.engine.host)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(module_testbeds.config_dir))
    names = rig.names[:2]

    def asked(*words: str, name: str = image.name) -> Result:
        cluster = (f"cluster={rig.testbed.name}", "--image", name, "--json", "--hosts", ",".join(names))
        return burst("image", *words, *cluster)

    planned, missing = asked("push", "--dry-run", "--limit", "8mbit"), asked("status")
    plan = planned.document
    assert (planned.code, [node["route"] for node in plan["nodes"]], plan["limit"]) == (0, ["direct", "direct"], 10**6)
    assert (missing.code, missing.document["nodes"]) == (1, dict.fromkeys(names))
    assert "this machine has no image 'x:1'" in asked("push", name="x:1").err
    assert asked("status", name="x:1").document["source"] == "nothing"
    done = asked("push")
    pushed = done.document
    assert (done.code, 0 < pushed.pop("seconds") < 60) == (0, True)
    assert sorted(done.err.splitlines()[-2:]) == [f"{name}: done" for name in names]
    assert "to send: layers that a node lacks" in done.err
    received = sum(node["received_bytes"] for node in pushed.pop("nodes"))
    assert 0.9 * received < pushed.pop("sent_bytes") < 1.1 * received
    assert pushed == {"image": image.name, "identity": image.identity, "ok": True, "received_bytes": received}
    found = asked("status")
    assert (found.code, {node["identity"] for node in found.document["nodes"].values()}) == (0, {image.identity})
