"""What breaks in the middle of a push to four nodes in a chain, over real SSH, with a stand-in for the engine."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from testkit.image_rig import Midway, PushRig, noise, saved_image, tar_of
from testkit.waiting import wait_for

from cluster.image.archive import PackedImage, Packing
from cluster.image.engine import Image
from cluster.ssh.pool import SshPool
from cluster.testbed.faults import clear_faults, set_fault

ENGINE = Path(__file__).resolve().parents[2] / "testkit/fakes/container_engine.py"
NAME = "rig/app:1"
LAYERS = (tar_of({"a": noise(1 << 20, 1)}), tar_of({"b": noise(2 << 20, 2)}))
SIZE = sum(len(layer) for layer in LAYERS)
SLOW = 2 << 20  # bytes/s: the push takes 1.5 s
HALF = SIZE // 2


class FakeRig(PushRig):
    """Four nodes, and this machine, with stand-ins for engines."""

    def __init__(self, testbed, folder: Path) -> None:
        self.testbed, self.names, self.folder = testbed, testbed.node_names, folder
        folder.mkdir()
        archive, config = saved_image(*LAYERS)
        facts = json.loads(config)
        shown = {key: facts[key.lower()] for key in ("Architecture", "Os", "Created", "Config")}
        shown |= {
            "Id": "sha256:here",
            "Size": SIZE,
            "RepoTags": [NAME],
            "RootFS": {"Layers": facts["rootfs"]["diff_ids"]},
        }
        (folder / "saved.tar").write_bytes(archive)
        (folder / "images.json").write_text(json.dumps({NAME: shown}))
        self._write(folder / "docker", f'FAKE_ENGINE={folder} exec {sys.executable} {ENGINE} "$@"')
        self.words = (str(folder / "docker"),)
        self.image_here = self.find(NAME)
        for name in self.names:
            self.tool(name, "docker", f'exec {sys.executable} {ENGINE} "$@"')

    def tool(self, node: str, name: str, script: str) -> None:
        """A shell script in the place of a tool of one node."""
        self._write(self.testbed.node(node).bin / name, script)

    def home(self, node: str) -> Path:
        return self.testbed.node(node).home

    def holding(self) -> set[str]:
        """Nodes whose engines have the whole image under its name."""
        found = set()
        for name in self.names:
            images = self.home(name) / "engine/images.json"
            found |= {name} if images.exists() and set(json.loads(images.read_text())) == {NAME} else set()
        return found

    def reset(self) -> None:
        self.seen: list[str] = []
        for name in self.names:
            clear_faults(self.testbed, name)
            engine = self.home(name) / "engine"
            engine.unlink() if engine.is_file() else shutil.rmtree(engine, ignore_errors=True)
            (self.testbed.node(name).bin / "python3").unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture(scope="module")
def standing(testbed4, tmp_path_factory):
    rig = FakeRig(testbed4, tmp_path_factory.mktemp("faults") / "engine")
    yield rig
    for name in rig.names:
        (rig.testbed.node(name).bin / "docker").unlink()


@pytest.fixture
def rig(standing):
    """After every test: no relay is left."""
    standing.reset()
    keys = {node.name: node.authorized_keys.read_bytes() for node in standing.testbed.nodes}
    yield standing
    standing.reset()
    for node in standing.testbed.nodes:
        for relay in standing.relays(node.name) if node.name in LOST else []:
            relay.kill()  # it was cut off, and would notice by itself after 40 s
        wait_for(lambda node=node: not standing.relays(node.name), f"the end of the relay on {node.name}")
        node.authorized_keys.write_bytes(keys[node.name])
    LOST.clear()


LOST: set[str] = set()


def cut_off(rig: FakeRig, node: str) -> None:
    LOST.add(node)
    set_fault(rig.testbed, node, "link_down")


def kill_relay(rig: FakeRig, node: str) -> None:
    """After a look at what others of its machine see of it."""
    (relay,) = rig.relays(node)
    rig.seen = [*relay.cmdline(), *relay.environ().values()]
    relay.kill()


def end_sessions(rig: FakeRig, node: str) -> None:
    """The SSH connection goes, the node lives on: its relay ends with its stdin."""
    for relay in rig.relays(node):
        for process in reversed(relay.parents()):
            if process.name().startswith("sshd") and "burst" not in process.name() and process.ppid() != 1:
                process.kill()


def fill_disk(rig: FakeRig, node: str) -> None:
    (rig.home(node) / "engine").mkdir()
    (rig.home(node) / "engine/full").touch()


def fill_relay_disk(rig: FakeRig, node: str) -> None:
    set_fault(rig.testbed, node, "disk_full", "/var/tmp:500k")


def remove_python(rig: FakeRig, node: str) -> None:
    rig.tool(node, "python3", "echo no such thing >&2; exit 127")


def forbid_forwarding(rig: FakeRig, node: str) -> None:
    path = rig.testbed.node(node).authorized_keys
    path.write_text("".join(f"no-port-forwarding {line}\n" for line in path.read_text().splitlines()))


def old_engine(rig: FakeRig, node: str) -> None:
    """One that answers nothing."""
    rig.home(node).joinpath("engine").write_text("not a folder")


DEAD = "connection ended"


# What happens to a node, the how-many-th, once it has half of the image, and what is said: of it, or of its way.
@pytest.mark.parametrize(
    ("act", "position", "error", "note"),
    [
        pytest.param(cut_off, 1, DEAD, "", id="node-dies"),
        pytest.param(cut_off, 0, DEAD, "", id="first-node-dies", marks=pytest.mark.thorough),
        pytest.param(kill_relay, 1, "", "its relay failed .*: pulled from here", id="relay-killed"),
        pytest.param(end_sessions, 2, "connection ended", "", id="connection-lost"),
    ],
)
def test_a_node_that_breaks_midway_stops_no_other(act, position, error, note, rig):
    victim = rig.names[position]
    midway = Midway(victim, HALF, functools.partial(act, rig, victim))
    with SshPool(patience_s=1.5) as pool:
        pushed = rig.push(rig.image_here, midway=midway, limit=SLOW, connect=pool.connect)
    result = pushed.nodes[victim]
    assert pushed.failed == ({victim} if error else set()), pushed.nodes
    assert rig.holding() >= set(rig.names) - pushed.failed
    assert pushed.sent_bytes <= 2.1 * (SIZE + 10_000)
    assert re.search(error or note, result.error or " ".join(result.notes)), result
    assert bool(rig.seen) == (act is kill_relay)
    assert not [word for word in rig.seen if "PRIVATE KEY" in word]


def test_what_nodes_lack_from_the_start_is_told_of_each(rig):
    no_engine, no_port, full, no_python = rig.names
    old_engine(rig, no_engine)
    forbid_forwarding(rig, no_port)
    fill_disk(rig, full)
    remove_python(rig, no_python)
    pushed = rig.push(rig.image_here)
    assert pushed.failed == {no_engine, no_port, full}
    assert rig.holding() == {no_python}
    assert pushed.sent_bytes <= 2.1 * (SIZE + 10_000)
    assert "docker image: " in pushed.nodes[no_engine].error
    assert "cannot forward a port" in pushed.nodes[no_port].error
    assert "no space left on device" in pushed.nodes[full].error
    assert re.search("no relay there .*there is no python3", " ".join(pushed.nodes[no_python].notes))


def test_an_engine_that_hangs_is_given_up_and_stops_no_other(rig):
    hung, *others = rig.names[:2]
    (rig.home(hung) / "engine").mkdir()
    (rig.home(hung) / "engine/hung").touch()
    pushed = rig.push(rig.image_here, rig.names[:2], stall_s=1.5)
    assert (pushed.failed, rig.holding()) == ({hung}, set(others))
    assert "nothing has come to any node for 1.5 s" in pushed.nodes[hung].error


def test_a_pull_that_moves_is_waited_for_though_all_has_left_here(rig):
    set_fault(rig.testbed, rig.names[-1], "link_slow", "6mbit")
    pushed = rig.push(rig.image_here, stall_s=1.5)
    assert (pushed.failed, rig.holding()) == (set(), set(rig.names))


@pytest.mark.thorough  # it fails as a relay that is killed
def test_a_relay_without_room_is_done_without(rig):
    fill_relay_disk(rig, rig.names[1])
    pushed = rig.push(rig.image_here)
    assert rig.holding() == set(rig.names)
    assert pushed.sent_bytes <= 3.1 * (SIZE + 10_000)
    assert re.search("its relay failed .*: pulled from here", " ".join(pushed.nodes[rig.names[1]].notes))


def test_a_damaged_layer_is_taken_by_no_engine(standing, rig):
    class DamagedRig(FakeRig):
        def __init__(self) -> None:
            vars(self).update(vars(standing))

        def pack(self, image: Image, packing: Packing) -> PackedImage:
            packed = super().pack(image, packing)
            blob = max(packed.blobs.values(), key=lambda blob: blob.size)
            os.pwrite(blob.descriptor, b"\0" * 100, blob.size // 2)
            return packed

    pushed = DamagedRig().push(rig.image_here)
    assert pushed.failed == set(rig.names)
    assert {"verification failed" in node.error for node in pushed.nodes.values()} == {True}
    assert rig.holding() == set()
