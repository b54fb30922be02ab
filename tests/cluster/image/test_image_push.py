"""Pushes to three nodes with an sshd and a Docker engine each: what moves, and what the engines hold afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from testkit.connecting import connect
from testkit.image_rig import PushRig, Watcher, launcher_engine, layer
from testkit.waiting import wait_for

from cluster.errors import ClusterError
from cluster.image.local import LocalImage
from cluster.image.status import prune_node, read_node_image

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


def verified(rig: PushRig, image: LocalImage, nodes: tuple[str, ...] | None = None) -> None:
    """Asks every node's engine, not the push; no other name of the image is left there."""
    for name in nodes or rig.names:
        with connect(rig.testbed.host(name)) as connection:
            assert read_node_image(connection, ["docker"], image.name).identity == image.identity
            shown = json.loads(connection.run(["docker", "image", "inspect", image.name]).stdout)[0]
        assert (shown["RepoTags"], shown["RepoDigests"]) == ([image.name], [])


def test_every_node_of_a_chain_gets_the_image_that_leaves_here_once_and_never_again(rig):
    image = rig.image(3, 2, 1)
    first, second = rig.push(image), rig.push(image)
    rig.engine("tag", image.name, "rig/other:name")
    named = rig.push(rig.find("rig/other:name"), rig.names[:1])

    assert not first.failed | named.failed
    assert [node.route.value for node in first.plan.nodes] == ["direct", "chain", "chain"]
    assert named.sent_bytes < 10_000  # what is there under another name is only named
    rig.run(rig.names[0], "docker", "image", "rm", "rig/other:name")
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
    words = ["image", "push", f"cluster={rig.testbed.name}", "--hosts", node, "--image", image.name, "--limit", "1MB/s"]
    environment = {**os.environ, "DOCKER_HOST": rig.engine.host, "XDG_CONFIG_HOME": str(module_testbeds.config_dir)}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "burst_cli", *words]
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_for(lambda: rig.relays(node), "the push")
        launcher.kill()
        launcher.wait(60)
    wait_for(lambda: not rig.relays(node), "the end of the relay")
    pushed = rig.push(image, (node,), observer=Watcher())

    assert not pushed.failed
    verified(rig, image, (node,))


def test_prune_removes_only_unused_images_of_that_name_but_the_one_that_is_named(rig):
    node = rig.names[0]
    socket = f"unix://{rig.testbed.node(node).folder.docker_socket}"
    for number, (name, label) in enumerate(
        [("rig/ours:1", 1), ("rig/ours:2", 1), ("rig/ours:3", 1), ("rig/ours:4", 0), ("rig/built-upon-ours:1", 1)]
    ):
        text = f"FROM scratch\nLABEL org.burst.image={label} number={number}\nCMD x\n".encode()
        environment = {**os.environ, "DOCKER_HOST": socket, "DOCKER_BUILDKIT": "0"}
        subprocess.run(["docker", "build", "-qt", name, "-"], input=text, env=environment, check=True)
    container = rig.run(node, "docker", "create", "--network", "none", "rig/ours:2")
    with connect(rig.testbed.host(node)) as connection:
        would = prune_node(connection, ["docker"], "rig/ours:3", dry_run=True)
        did = prune_node(connection, ["docker"], "rig/ours:3", dry_run=False)
    left = set(rig.run(node, "docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split())
    rig.run(node, "docker", "rm", container)

    assert would.images == did.images == ("rig/ours:1",)
    assert left >= {"rig/ours:2", "rig/ours:3", "rig/ours:4", "rig/built-upon-ours:1"}
    assert "rig/ours:1" not in left


def test_an_image_goes_under_its_whole_name_however_it_is_named(rig):
    image = rig.image(0.01, name="rig/named:latest")

    for given in ("rig/named", "rig/named:latest", image.image_id):
        assert rig.find(given).name == "rig/named:latest"
    with pytest.raises(ClusterError, match="has no image 'rig/none:1'; build it with"):
        rig.find("rig/none:1")


def test_push_and_status_as_a_person_types_them(rig, module_testbeds, monkeypatch, burst):
    image = rig.image(0.5)
    monkeypatch.setenv("DOCKER_HOST", rig.engine.host)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(module_testbeds.config_dir))
    cluster = (f"cluster={rig.testbed.name}", "--image", image.name, "--json", "--hosts", ",".join(rig.names[:2]))

    def asked(*words: str) -> tuple[int, dict[str, Any]]:
        result = burst("image", *words, *cluster)
        return result.code, result.document

    code, plan = asked("push", "--dry-run", "--route", "chain")
    assert (code, [node["route"] for node in plan["nodes"]]) == (0, ["direct", "chain"])
    assert [group["identity"] for group in asked("status")[1]["groups"]] == [None]
    code, pushed = asked("push")
    assert (code, pushed["ok"], pushed["identity"]) == (0, True, image.identity)
    code, status = asked("status")
    assert (code, status["groups"][0]["nodes"]) == (0, list(rig.names[:2]))
