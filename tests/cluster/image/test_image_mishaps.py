"""What one odd node, or a file that vanished, does to a push: it is told, and ends nothing else."""

from __future__ import annotations

import io
import os
import queue
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_image_agent import Layers, begin, folder_of, node  # noqa: F401
from test_image_store import IDENTITY, SAVED

from burst_cli.commands.image import _repository
from burst_cli.image_view import PlainPushView
from cluster.image.fleet import Fleet
from cluster.image.inventory import parse_survey
from cluster.image.node.blobs import list_blobs
from cluster.image.node.chain import check_own_folder
from cluster.image.node.frames import FrameError
from cluster.image.node.keys import MARKER, remove_lines
from cluster.image.prune import _pruned
from cluster.image.push import EphemeralKey, NodeProgress, host_key_lines
from cluster.image.session import StoredBlobs
from cluster.image.store import Store


def test_a_layer_that_is_gone_from_the_store_ends_its_transfer(tmp_path):
    with pytest.raises(FrameError, match="gone from the store"):
        StoredBlobs({0: (tmp_path / "none", 5)}).follow(0, 0, None, 0.0)


def test_a_layer_that_is_gone_is_not_verified(tmp_path):
    store = Store(tmp_path / "images")
    layer = store.add(io.BytesIO(SAVED["classic"]), IDENTITY, "a:1").layers[0]
    store.path(layer, "zstd").unlink()

    assert not store.verify(layer, "zstd")


def test_a_size_that_is_no_number_is_a_problem_of_that_node():
    sizes = {"blobs": {"a": float("inf")}, "engine": {"partial": True}, "have": {"present": 0}}

    assert "no sense" in parse_survey("node1", sizes).problem
    answer = {"op": "pruned", "error": None, "images": [], "files": float("inf"), "bytes": 0}
    assert "no sense" in _pruned("node1", answer, "").problem


class Asked:
    """A session that only takes the question."""

    def send(self, message):
        pass


def test_a_node_that_dies_after_its_answer_does_not_count_for_another():
    fleet = Fleet({"node1": Asked(), "node2": Asked()}, {}, queue.Queue())
    for event in (("node1", {"op": "survey"}), ("node1", {"op": "gone", "error": "died"}), ("node2", {"op": "survey"})):
        fleet.events.put(event)

    assert list(fleet.ask(lambda name: {"op": "x"}, "survey")) == ["node2"]
    assert fleet.problems == {"node1": "died"}


def test_a_layer_that_cannot_be_unpacked_fails_the_node(node, tmp_path):  # noqa: F811
    layers = Layers(tmp_path / "store", b"x" * 1000)
    layers.rows[0]["encoding"] = "gzip"
    session = begin(node, layers, StoredBlobs({0: (Path(layers.paths[0][0]), layers.paths[0][1])}))
    session.send({"op": "feed"})
    failed = node.wait_for("failed")
    session.close()

    assert failed["stage"] == "load"


def test_a_part_that_is_a_link_is_not_written_through(tmp_path):
    blobs = folder_of(tmp_path / "blobs", Layers(tmp_path / "store", b"x" * 1000))
    Path(blobs.path(0) + ".part").symlink_to(tmp_path / "victim")

    with pytest.raises(OSError, match="symbolic links"):
        blobs.append(0, 0, b"x")
    assert not (tmp_path / "victim").exists()


def test_a_blob_that_vanishes_while_it_is_listed_is_left_out(tmp_path):
    (tmp_path / ("a" * 64)).symlink_to(tmp_path / "gone")

    assert list_blobs(str(tmp_path)) == {}


def test_lines_without_a_terminal_are_not_repeated():
    stream = io.StringIO()
    view = PlainPushView(Console(file=stream, width=100))
    for _ in range(2):
        view._next = 0.0
        view.progress([NodeProgress("node1", "receiving", 5, 5, 5)])

    assert stream.getvalue() == "node1 loading\n"


def test_a_revoked_key_is_told_to_no_other_node(tmp_path):
    good, bad = EphemeralKey().public, EphemeralKey().public
    file = tmp_path / "known_hosts"
    file.write_text(f"node1 {good}\nnode1 {bad}\n@revoked * {bad}\n")

    assert host_key_lines(SimpleNamespace(known_hosts=(str(file),), key_names=("node1",))) == [good]


def test_a_shared_folder_of_others_is_not_written_into(tmp_path: Path) -> None:
    check_own_folder(str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a folder of ours alone"):
        check_own_folder(str(tmp_path / "link"))
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="not a folder of ours alone"):
        check_own_folder(str(tmp_path))


def test_a_key_leaves_a_file_that_cannot_be_replaced(tmp_path: Path) -> None:
    keys = tmp_path / "authorized_keys"
    mine = "ssh-ed25519 AAAA me@laptop\n"
    keys.write_text(f'{mine}restrict,command="false" ssh-ed25519 AAAA {MARKER} push-1 n1\n')
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")  # where CI is set, a skip fails the session
    target = tmp_path / "mounted"
    target.touch()
    subprocess.run(["mount", "--bind", str(keys), str(target)], check=True)
    try:
        assert remove_lines(str(target), "n1") == 1
        assert keys.read_text() == mine
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_repository_is_a_name_without_its_tag() -> None:
    assert [_repository(name) for name in ("a:1", "a", "lab:5000/team/a:1", "lab:5000/a")] == [
        "a",
        "a",
        "lab:5000/team/a",
        "lab:5000/a",
    ]
