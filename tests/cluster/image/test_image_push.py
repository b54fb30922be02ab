"""Pushes to four nodes with an sshd and a Docker engine each: what moves, and what happens when something breaks.

What test_image_plan, test_image_agent and test_image_mishaps show without Docker is thorough here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from testkit.image_rig import PushRig, Watcher, launcher_engine, noise
from testkit.testbed_fixture import Testbeds
from testkit.waiting import wait_for

from burst_cli.app import main
from cluster.access.ssh import connect
from cluster.errors import ClusterError
from cluster.image.fleet import open_fleet
from cluster.image.local import LocalImage
from cluster.image.prune import prune_nodes
from cluster.image.status import read_node_image
from cluster.testbed.faults import clear_faults, set_fault

MIB = 1 << 20
RATE = "200mbit"
SLOW = 4 * MIB  # bytes/s of a push that a test interrupts


@pytest.fixture(scope="module")
def testbeds(testbed_machine, tmp_path_factory):
    made = Testbeds(tmp_path_factory.mktemp("image"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def rig(testbeds, tmp_path_factory):
    testbed = testbeds.make(nodes=4, docker=True, docker_in_memory=True, rate=RATE)
    with launcher_engine() as engine:
        yield PushRig(testbed, engine, tmp_path_factory.mktemp("launcher"))


@pytest.fixture(autouse=True)
def nothing_stays(rig):
    """After every test: no agent, no key, no socket, and authorized_keys as they were."""
    before = {node.name: node.folder.authorized_keys.read_bytes() for node in rig.testbed.nodes}
    yield
    for node in rig.testbed.nodes:
        clear_faults(rig.testbed, node.name)
        wait_for(lambda node=node: not rig.agents(node.name), f"the end of the agent on {node.name}")
        assert node.folder.authorized_keys.read_bytes() == before[node.name]
    assert not list(Path("/dev/shm").glob("burst-image-*"))


def verified(rig: PushRig, image: LocalImage, nodes: tuple[str, ...] | None = None) -> None:
    """Asks every node's engine, not the push."""
    for name in nodes or rig.names:
        with connect(rig.testbed.host(name)) as connection:
            assert read_node_image(connection, ["docker"], image.name).identity == image.identity


def sizes(paths: Sequence[Path]) -> list[int]:
    """Of those that are still there: a part that is whole gets another name."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append(path.stat().st_size)
    return found


class StopError(Exception):
    """Ends a push as Ctrl-C does."""


def interrupt() -> None:
    raise StopError


def interrupted_push(rig: PushRig, image: LocalImage, after_bytes: int, nodes: tuple[str, ...] | None = None) -> None:
    with pytest.raises(StopError):
        rig.push(image, nodes, limit=SLOW, observer=Watcher((nodes or rig.names)[0], after_bytes, interrupt))


def test_every_node_of_a_chain_gets_the_image_and_a_second_push_moves_nothing(rig):
    image = rig.image(6, 4, 2)
    first, second = rig.push(image), rig.push(image)

    assert [node.feeder for node in first.plan.nodes] == [None, *rig.names[:3]]
    assert not first.failed
    assert all(node.is_verified and node.identity == image.identity for node in first.nodes.values())
    verified(rig, image)
    assert second.received_bytes == 0
    assert second.elapsed_s < 5
    assert all(node.ok and node.is_verified for node in second.nodes.values())


def test_one_changed_layer_moves_only_that_layer(rig):
    rig.push(rig.image(4, 2, 4, name="rig/changed:1", seed=7))
    files = {"layer0": noise(4 * MIB, 7000), "layer1": noise(2 * MIB, 1), "layer2": noise(4 * MIB, 7002)}
    image = rig.build("rig/changed:1", files)
    pushed = rig.push(image)

    assert not pushed.failed
    assert all(2 * MIB <= node.received_bytes < 2.1 * MIB for node in pushed.nodes.values())
    assert {diff_id for node in pushed.nodes.values() for diff_id in node.received} == {image.diff_ids[2]}
    verified(rig, image)


@pytest.mark.thorough
def test_an_interrupted_push_goes_on_where_it_stopped(rig):
    image = rig.image(3, 5)
    interrupted_push(rig, image, 4 * MIB)
    left = sum(path.stat().st_size for node in rig.names for path in rig.cache(node).iterdir())
    pushed = rig.push(image)

    assert left >= 4 * MIB
    assert not pushed.failed
    total = sum(node.received_bytes + node.resumed_bytes for node in pushed.nodes.values())
    assert total == 4 * sum(layer.packings["zstd"].size for layer in image.export(rig.store).layers[1:])
    assert sum(node.resumed_bytes for node in pushed.nodes.values()) >= 4 * MIB
    verified(rig, image)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.thorough
def test_a_killed_launcher_leaves_nothing_but_layers_and_the_next_push_goes_on(rig, testbeds, tmp_path, number):
    image = rig.image(2, 5)
    command = [sys.executable, "-m", "burst_cli", "image", "push", f"cluster={rig.testbed.name}", "--limit", "2MB/s"]
    environment = {
        **os.environ,
        "DOCKER_HOST": rig.engine.host,
        "XDG_CONFIG_HOME": str(testbeds.config_dir),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen([*command, "--image", image.name], env=environment, stdout=log, stderr=log)
        wait_for(lambda: any(size > MIB for size in sizes(rig.parts(rig.names[3]))), "a part on the last node")
        launcher.send_signal(number)
        code = launcher.wait(200)
    wait_for(lambda: not any(rig.agents(node) for node in rig.names), "the end of all agents")
    left = {node: {path.stem: path.stat().st_size for path in rig.cache(node).iterdir()} for node in rig.names}
    pushed = rig.push(image)

    assert not pushed.failed
    for name, node in pushed.nodes.items():
        fetched = [rig.packed(image)[number].sha256 for number in pushed.plan.node(name).fetch]
        assert node.resumed_bytes == sum(left[name].get(sha256, 0) for sha256 in fetched) > 0
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert ("the same command goes on from there" in (tmp_path / "log").read_text()) == (code == 130)
    assert all(node.received_bytes == pushed.plan.node(name).move_bytes for name, node in pushed.nodes.items())


@pytest.mark.thorough
def test_a_damaged_part_is_dropped_named_and_sent_again(rig):
    image = rig.image(5)
    node = rig.names[0]
    interrupted_push(rig, image, 2 * MIB, (node,))
    (part,) = rig.parts(node)
    with part.open("r+b") as file:
        file.seek(MIB)
        byte = file.read(1)
        file.seek(MIB)
        file.write(bytes([byte[0] ^ 1]))
    pushed = rig.push(image, (node,))

    assert not pushed.failed
    assert f"layer {image.diff_ids[-1][7:19]} was damaged" in pushed.nodes[node].notes[0]
    verified(rig, image, (node,))


@pytest.mark.thorough
def test_an_agent_that_is_killed_does_not_stop_the_others(rig):
    image = rig.image(8)
    victim = rig.names[1]
    pushed = rig.push(image, limit=SLOW, observer=Watcher(victim, 2 * MIB, lambda: rig.agents(victim)[0].kill()))

    assert pushed.failed == {victim}
    assert "its agent was killed" in pushed.nodes[victim].error
    again = rig.push(image)
    assert not again.failed
    assert again.nodes[victim].resumed_bytes > 0
    assert again.received_bytes == again.nodes[victim].received_bytes


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.thorough
def test_a_node_that_dies_in_the_chain_does_not_stop_the_others(rig, position):
    image = rig.image(8)
    victim = rig.names[position]
    watcher = Watcher(rig.names[3], 2 * MIB, lambda: set_fault(rig.testbed, victim, "link_down"))
    pushed = rig.push(image, limit=SLOW, observer=watcher)
    clear_faults(rig.testbed, victim)
    for agent in rig.agents(victim):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may hear of the end as soon as its link is back
            agent.terminate()  # else it would notice by itself after 40 s of silence

    assert {name: pushed.nodes[name].error for name in pushed.failed if name != victim} == {}
    assert "said nothing" in pushed.nodes[victim].error
    assert f"{victim} is lost" in pushed.nodes[rig.names[position + 1]].notes[0]
    assert sum(node.received_bytes for node in pushed.nodes.values() if node.ok) < 3 * 8.1 * MIB  # nothing twice
    verified(rig, image, tuple(name for name in rig.names if name != victim))


def test_the_key_of_a_push_is_in_no_file_once_links_stand_and_in_no_command_line(rig):
    files: list[Path] = []
    commands: list[str] = []

    def look() -> None:
        files.extend(Path("/dev/shm").glob("burst-image-*/**/key"))
        commands.extend(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))

    pushed = rig.push(rig.image(4), rig.names[:3], limit=SLOW, observer=Watcher(rig.names[2], 2 * MIB, look))

    assert not pushed.failed
    assert files == []
    assert sum("IdentityFile=/dev/shm/burst-image-" in command for command in commands) == 2
    assert not [command for command in commands if "PRIVATE KEY" in command]


def test_nodes_that_cannot_reach_each_other_are_fed_from_here(rig):
    image = rig.image(4)
    with rig.tool(rig.names[0], "ssh", 'echo "Permission denied" >&2; exit 255'):
        pushed = rig.push(image, rig.names[:3])

    assert not pushed.failed
    assert "cannot send to it (Permission denied): sent from here" in pushed.nodes[rig.names[1]].notes[0]
    verified(rig, image, rig.names[:3])


@pytest.mark.thorough
def test_a_node_without_authorized_keys_is_not_reached_by_others(rig):
    image = rig.image(2)
    keys = rig.testbed.node(rig.names[1]).folder.authorized_keys
    moved = keys.with_name("elsewhere")
    script = f'mv {keys} {moved}; trap "mv {moved} {keys}" EXIT; {sys.executable} "$@"'
    with rig.tool(rig.names[1], "python3", script):
        pushed = rig.push(image, rig.names[:3], route="chain")

    assert not pushed.failed
    assert pushed.plan.chains[0][0] == rig.names[1]


@pytest.mark.thorough
def test_an_engine_that_refuses_a_partial_archive_gets_a_whole_one(rig):
    rig.push(rig.image(3, 1, name="rig/refuse:1", seed=8), rig.names[:1])
    image = rig.build("rig/refuse:1", {"layer0": noise(3 * MIB, 8000), "layer1": noise(MIB, 2)})
    marker = rig.testbed.folder.path / "refused"
    real = rig.run(rig.names[0], "sh", "-c", "command -v docker")
    script = f'if [ "$1" = load ] && [ ! -e {marker} ]; then touch {marker}; echo "layer missing" >&2; exit 1; fi'
    with rig.tool(rig.names[0], "docker", f'{script}\nexec {real} "$@"'):
        pushed = rig.push(image, rig.names[:1])

    assert not pushed.failed
    assert "its engine wants all layers" in pushed.nodes[rig.names[0]].notes[0]
    verified(rig, image, rig.names[:1])


@pytest.mark.thorough
def test_a_full_disk_is_reported_before_anything_is_sent(rig):
    image = rig.image(6)
    victim = rig.names[1]
    folder = rig.testbed.node(victim).folder.home
    set_fault(rig.testbed, victim, "disk_full", f"{folder / '.cache'}:3m")
    pushed = rig.push(image, rig.names[:3])

    assert pushed.failed == {victim}
    assert "disk full: needs" in pushed.nodes[victim].error
    assert pushed.nodes[victim].received_bytes == 0
    assert pushed.plan.chains == ((rig.names[0], rig.names[2]),)


@pytest.mark.thorough
def test_a_node_without_python_is_named_and_the_others_go_on(rig):
    image = rig.image(1)
    with rig.tool(rig.names[0], "python3", "exit 127"):
        pushed = rig.push(image, rig.names[:2])

    assert pushed.failed == {rig.names[0]}
    assert "no python3" in pushed.nodes[rig.names[0]].error


@pytest.mark.thorough
def test_a_node_without_zstd_gets_gzip(rig, tmp_path):
    image = rig.image(1, files={"text": b"the same again " * 100_000})
    node = rig.names[0]
    for name in ("docker", "ssh"):
        (tmp_path / name).symlink_to(rig.run(node, "sh", "-c", f"command -v {name}"))
    with rig.tool(node, "python3", f'PATH={tmp_path} exec {sys.executable} -S "$@"'):
        pushed = rig.push(image, (node,))

    assert pushed.plan.node(node).encoding == "gzip"
    assert not pushed.failed
    verified(rig, image, (node,))


@pytest.mark.thorough
def test_layers_go_through_a_shared_folder_once(rig):
    image = rig.image(4, 2)
    shared = str(rig.testbed.folder.shared)
    pushed = rig.push(image, shared_folder=shared)

    assert not pushed.failed
    assert 6 * MIB <= pushed.received_bytes < 6.1 * MIB
    verified(rig, image)


def test_a_folder_that_is_not_shared_is_noticed(rig):
    image = rig.image(1)
    folder = rig.testbed.folder.path / "not-shared"
    folder.mkdir()
    other = rig.names[1]
    set_fault(rig.testbed, other, "disk_full", f"{folder}:100m")
    pushed = rig.push(image, rig.names[:2], shared_folder=str(folder))

    assert pushed.failed == {other}
    assert "do all nodes share that folder?" in pushed.nodes[other].error


def test_the_limit_holds_for_every_sender(rig):
    image = rig.image(3)
    pushed = rig.push(image, rig.names[:2], limit=4 * MIB, route="direct")

    assert pushed.elapsed_s > 2 * 3 / 4


@pytest.mark.thorough
def test_an_image_that_is_there_under_another_name_is_only_named(rig):
    image = rig.image(1)
    rig.push(image, rig.names[:1])
    rig.engine("tag", image.name, "rig/other:name")
    other = rig.find("rig/other:name")
    pushed = rig.push(other, rig.names[:1])

    assert pushed.received_bytes == 0
    verified(rig, other, rig.names[:1])


@pytest.mark.thorough
def test_lines_of_killed_agents_are_removed_by_the_next_push(rig):
    keys = rig.testbed.node(rig.names[1]).folder.authorized_keys
    before = keys.read_bytes()
    stale = f'restrict,command="false" ssh-ed25519 AAAA burst-image-push push-dead {rig.names[1]}\n'
    keys.write_bytes(before + stale.encode())
    rig.push(rig.image(1), rig.names[:2], route="chain")

    assert keys.read_bytes() == before


def test_prune_removes_what_pushes_keep_and_only_unused_images_of_that_name(rig):
    node = rig.names[0]
    ours = rig.image(1, name="rig/ours:1", labels={"org.burst.image": "1"})
    used = rig.image(1, name="rig/ours:2", labels={"org.burst.image": "1"})
    theirs = rig.image(1, name="rig/built-upon-ours:1", labels={"org.burst.image": "1"})
    foreign = rig.image(1, name="rig/ours:3", labels={"org.burst.image": "0"})
    for image in (ours, used, theirs, foreign):
        rig.push(image, (node,))
    container = rig.run(node, "docker", "create", "--network", "none", used.name)
    hosts = [rig.testbed.host(node)]
    with open_fleet(hosts, connect) as fleet:
        (would,) = prune_nodes(fleet, hosts, engine=["docker"], repository="rig/ours", dry_run=True)
        kept = list(rig.cache(node).iterdir())
        size = sum(path.stat().st_size for path in kept)
        (did,) = prune_nodes(fleet, hosts, engine=["docker"], repository="rig/ours", dry_run=False)
    left = rig.run(node, "docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    rig.run(node, "docker", "rm", container)

    assert (would.files, would.bytes) == (did.files, did.bytes) == (len(kept), size)
    assert not rig.cache(node).exists()
    assert ours.name not in left
    assert {used.name, theirs.name, foreign.name} <= set(left)
    assert would.images == did.images == (ours.name,)


def test_a_packed_layer_that_is_damaged_here_is_named_and_made_anew_by_the_next_push(rig):
    image = rig.image(2)
    layer = image.export(rig.store).layers[-1]
    path = rig.store.path(layer, "zstd")
    body = bytearray(path.read_bytes())
    body[MIB] ^= 1
    path.write_bytes(body)
    pushed = rig.push(image, rig.names[:1])

    assert pushed.failed == {rig.names[0]}
    assert f"layer {layer.diff_id[7:19]} is damaged in {rig.store.root}" in pushed.nodes[rig.names[0]].error
    assert not rig.push(image, rig.names[:1]).failed


@pytest.mark.parametrize(
    ("given", "name"), [("rig/named", "rig/named:latest"), ("rig/named:latest", "rig/named:latest")]
)
def test_an_image_is_known_by_its_whole_name(rig, given, name):
    rig.engine("tag", rig.image(0.01).name, "rig/named:latest")

    assert rig.find(given).name == name


def test_an_image_named_by_its_id_goes_under_its_name(rig):
    image = rig.image(0.01)

    assert rig.find(rig.engine("image", "inspect", "--format", "{{.Id}}", image.name)).name == image.name


def test_an_image_that_is_not_there_is_told_with_what_to_do(rig):
    with pytest.raises(ClusterError, match="has no image 'rig/none:1'; build it with"):
        rig.find("rig/none:1")


def test_push_and_status_as_a_person_types_them(rig, testbeds, monkeypatch, capsys):
    image = rig.image(0.5)
    monkeypatch.setenv("DOCKER_HOST", rig.engine.host)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(testbeds.config_dir))
    monkeypatch.setenv("XDG_CACHE_HOME", str(rig.store.root))
    cluster = (f"cluster={rig.testbed.name}", "--image", image.name)

    def burst(*words: str) -> tuple[int, str]:
        code = main(["image", *words])
        return code, capsys.readouterr().out

    code, plan = burst("push", *cluster, "--dry-run", "--json")
    assert (code, [node["route"] for node in json.loads(plan)["nodes"]]) == (0, ["direct", "chain", "chain", "chain"])
    assert burst("status", *cluster)[0] == 1
    code, pushed = burst("push", *cluster, "--hosts", rig.names[0], "--json")
    assert (code, json.loads(pushed)["ok"]) == (0, True)
    code, table = burst("status", *cluster)
    assert code == 1
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["missing", image.identity[:12]]
    assert burst("push", *cluster)[0] == 0
    code, status = burst("status", *cluster, "--json")
    assert (code, json.loads(status)["groups"][0]["nodes"]) == (0, list(rig.names))
