"""What breaks in the middle of a push to four nodes in a chain, over real SSH, with a stand-in for the engine."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit import KIT, write_program
from testkit.image_rig import Midway, PushRig, noise, saved_image, tar_of
from testkit.waiting import wait_for

from cluster.image.archive import PackedImage, Packing, pack_archive
from cluster.image.engine import Image
from cluster.image.push import NodeResult
from cluster.testbed.faults import clear_faults, set_fault
from cluster.testbed.testbed import Testbed

ENGINE = KIT / "fakes/container_engine.py"
NAME = "rig/app:1"
LAYERS = (tar_of({"a": noise(1 << 20, 1)}), tar_of({"b": noise(2 << 20, 2)}))
SIZE = sum(len(layer) for layer in LAYERS)
SLOW = 2 << 20  # bytes/s: the push takes 1.5 s
HALF = SIZE // 2


class FakeRig(PushRig):
    """Four nodes with stand-ins for engines. seen: what others of a machine saw of a relay; lost: nodes cut off."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed, self.names, self.damage = testbed, testbed.node_names, b""
        self.archive, config = saved_image(*LAYERS)
        facts = json.loads(config)
        shown = {key: facts[key.lower()] for key in ("Architecture", "Os", "Created", "Config")}
        self.image_here = Image.of(
            NAME, {**shown, "Id": "", "Size": SIZE, "RootFS": {"Layers": facts["rootfs"]["diff_ids"]}}
        )
        self.seen: list[str] = []
        self.lost: set[str] = set()

    def pack(self, image: Image, packing: Packing) -> PackedImage:
        packed = pack_archive(io.BytesIO(self.archive), packing)
        blob = max(packed.blobs.values(), key=lambda blob: blob.size)
        os.pwrite(blob.descriptor, self.damage, blob.size // 2)
        return packed

    def tool(self, node: str, name: str, script: str) -> None:
        """A shell script in the place of a tool of one node."""
        write_program(self.testbed.node(node).bin / name, script)

    def engine_of(self, node: str) -> Path:
        """The folder of its stand-in."""
        return self.testbed.node(node).home / "engine"

    def holding(self) -> set[str]:
        """Nodes whose engines have the whole image under its name."""
        images = {name: self.engine_of(name) / "images.json" for name in self.names}
        return {name for name, file in images.items() if file.exists() and list(json.loads(file.read_text())) == [NAME]}

    def cut_off(self, node: str) -> None:
        self.lost.add(node)
        set_fault(self.testbed, node, "link_down")

    def kill_relay(self, node: str) -> None:
        """After a look at what others of its machine see of it."""
        (relay,) = self.relays(node)
        self.seen = [*relay.cmdline(), *relay.environ().values()]
        relay.kill()

    def end_sessions(self, node: str) -> None:
        """The SSH connection goes, the node lives on: its relay ends with its stdin."""
        for relay in self.relays(node):
            for process in reversed(relay.parents()):
                if process.name().startswith("sshd") and "burst" not in process.name() and process.ppid() != 1:
                    process.kill()


@pytest.fixture
def rig(testbed4: Testbed) -> Iterator[FakeRig]:
    """After every test: no relay is left, and nodes are as they were."""
    rig = FakeRig(testbed4)
    keys = {node: node.authorized_keys.read_bytes() for node in testbed4.nodes}
    for name in rig.names:
        rig.tool(name, "docker", f'exec {sys.executable} {ENGINE} "$@"')
        rig.engine_of(name).mkdir()
    yield rig
    for node in testbed4.nodes:
        clear_faults(testbed4, node.name)
        for relay in rig.relays(node.name) if node.name in rig.lost else []:
            relay.kill()  # it was cut off, and would notice by itself after 40 s
        wait_for(lambda node=node: not rig.relays(node.name), f"the end of the relay on {node.name}")
        node.authorized_keys.write_bytes(keys[node])
        shutil.rmtree(rig.engine_of(node.name))
        for tool in node.bin.iterdir():
            tool.unlink()


DEAD = "connection ended"


# What happens to a node, the how-many-th, once it has half of the image, and what is said: of it, or of its way.
@pytest.mark.parametrize(
    ("act", "position", "error", "note"),
    [
        pytest.param(FakeRig.cut_off, 1, DEAD, "", id="node-dies"),
        pytest.param(FakeRig.cut_off, 0, DEAD, "", id="first-node-dies", marks=pytest.mark.thorough),
        pytest.param(FakeRig.kill_relay, 1, "", "its relay failed .*: pulled from here", id="relay-killed"),
        pytest.param(FakeRig.end_sessions, 2, DEAD, "", id="connection-lost"),
    ],
)
def test_a_node_that_breaks_midway_stops_no_other(act, position, error, note, rig):
    victim = rig.names[position]
    midway = Midway(victim, HALF, functools.partial(act, rig, victim))
    pushed = rig.push(rig.image_here, midway=midway, limit=SLOW, patience_s=1.5)
    result = pushed.nodes[victim]
    assert pushed.failed == ({victim} if error else set()), pushed.nodes
    assert rig.holding() >= set(rig.names) - pushed.failed
    assert pushed.sent_bytes <= 2.1 * (SIZE + 10_000)
    assert re.search(error or note, result.error or " ".join(result.notes)), result
    assert bool(result.notes) == bool(note)
    assert bool(rig.seen) == (act is FakeRig.kill_relay)
    assert not [word for word in rig.seen if "PRIVATE KEY" in word]


def test_what_nodes_lack_from_the_start_is_told_of_each(rig):
    no_engine, no_port, full, no_python = rig.names
    rig.tool(no_engine, "docker", "exit 1")
    keys = rig.testbed.node(no_port).authorized_keys
    keys.write_text("".join(f"no-port-forwarding {line}\n" for line in keys.read_text().splitlines()))
    (rig.engine_of(full) / "full").touch()
    rig.tool(no_python, "python3", "echo no such thing >&2; exit 127")
    pushed = rig.push(rig.image_here)
    assert pushed.failed == {no_engine, no_port, full}
    assert rig.holding() == {no_python}
    assert pushed.sent_bytes <= 2.1 * (SIZE + 10_000)
    refused = pushed.nodes[no_engine]
    assert refused == NodeResult(no_engine, False, "refused", 0, 0.0, None, refused.error)
    assert "docker image: " in refused.error
    assert pushed.plan.nodes[1].engine == "Client: Version: 28.2.2 Server: Engine: Version: 20.10.24"
    assert "cannot forward a port" in pushed.nodes[no_port].error
    assert "no space left on device" in pushed.nodes[full].error
    assert re.search("no relay there .*there is no python3", " ".join(pushed.nodes[no_python].notes))


def test_engines_that_hang_or_name_nothing_are_told_and_stop_no_other(rig):
    hung, other, forgetful = rig.names[:3]
    (rig.engine_of(hung) / "hung").touch()
    rig.tool(forgetful, "docker", f'[ "$1" = tag ] || exec {sys.executable} {ENGINE} "$@"')
    pushed = rig.push(rig.image_here, rig.names[:3], stall_s=1.5)
    assert (pushed.failed, rig.holding()) == ({hung, forgetful}, {other})
    assert "nothing has come to any node for 1.5 s" in pushed.nodes[hung].error
    assert f"the engine holds nothing instead of {rig.image_here.identity[:12]}" in pushed.nodes[forgetful].error


def test_a_pull_that_moves_is_waited_for_though_all_has_left_here(rig):
    rig.tool(rig.names[0], "python3", f'sleep 0.5; exec {sys.executable} "$@"')
    set_fault(rig.testbed, rig.names[-1], "link_slow", "6mbit")
    pushed = rig.push(rig.image_here, stall_s=1.5)
    assert (pushed.failed, rig.holding()) == (set(), set(rig.names))
    assert pushed.sent_bytes < 1.1 * SIZE


def test_a_damaged_layer_is_taken_by_no_engine(rig):
    rig.damage = b"\0" * 100
    pushed = rig.push(rig.image_here)
    assert pushed.failed == set(rig.names)
    assert {"verification failed" in node.error for node in pushed.nodes.values()} == {True}
    assert rig.holding() == set()
