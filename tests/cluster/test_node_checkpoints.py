"""Checkpoints on the disks of nodes: listed together, compared where they lie, brought here whole or not at all."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from testkit.connections import LocalConnection
from testkit.saved_checkpoints import newest_verified

from burst_cli.checkpoint.view import prune_run
from cluster.errors import ClusterError, SshError, SshFailure
from cluster.node_checkpoints import NodeCheckpoint, NodeCheckpoints, ask_nodes
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host
from engine.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    Chunk,
    Manifest,
    TensorFacts,
    commit,
    file_facts,
    new_folder,
    read_manifest,
)
from engine.runs.folder import RunFolder, create_run

FILES = ("rank00000.safetensors", "rank00001.safetensors")
PART = bytes(range(250)) * 4


def save(homes: list[Path], step: int, save_id: str = "ab") -> None:
    """A checkpoint of one tensor, a part on every node."""
    folders = [new_folder(home / "saved/run", step, save_id) for home in homes]
    facts = {}
    for number, folder in enumerate(folders):
        (folder / FILES[number]).write_bytes(PART + bytes([number, step]))
        facts[FILES[number]] = file_facts(folder / FILES[number], f"disk{number}")
    chunks = tuple(Chunk((number,), (1,), name, "w") for number, name in enumerate(facts))
    manifest = Manifest(step, save_id, "now", facts, {"w": TensorFacts("float32", (2,), chunks)}, {}, {})
    for number, folder in enumerate(folders):
        commit(folder, replace(manifest, saved_at=f"by the clock of {number}"))


class Nodes:
    """Two nodes with homes of their own; those of `dead` do not answer."""

    def __init__(self, base: Path) -> None:
        self.homes = {name: base / name for name in ("n1", "n2")}
        self.dead: set[str] = set()
        self.environment: dict[str, str] = {}
        self.connections: list[LocalConnection] = []

    def part(self, node: str, step: int, name: str) -> Path:
        return self.homes[node] / f"saved/run/step-{step:08d}" / name

    def connect(self, host: Host) -> Connection:
        if host.name in self.dead:
            raise SshError(host.name, SshFailure.TIMEOUT, "does not answer")
        self.connections.append(LocalConnection(host.name, {"HOME": str(self.homes[host.name]), **self.environment}))
        return self.connections[-1]

    def ask(self) -> NodeCheckpoints:
        hosts = [Host(name, "127.0.0.1") for name in self.homes]
        return ask_nodes(hosts, dict.fromkeys(self.homes, "~/saved/run"), self.connect)

    def newest(self) -> NodeCheckpoint:
        return self.ask().found[0]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    save(list(made.homes.values()), 10)
    save(list(made.homes.values()), 20)
    yield made
    for connection in made.connections:
        connection.close()


def test_parts_of_all_nodes_make_up_what_is_listed_and_compared(nodes: Nodes) -> None:
    answer = nodes.ask()
    assert [(one.step, one.nodes, one.problem) for one in answer.found] == [(20, "n[1-2]", None), (10, "n[1-2]", None)]
    told: list[int] = []
    assert answer.found[0].verify(told.append) is None
    assert told == [len(PART) + 2] * 2


def test_damage_is_named_with_its_node(nodes: Nodes) -> None:
    nodes.part("n2", 20, FILES[1]).write_bytes(PART + b"!!")
    assert "n2: ~/saved/run/step-00000020/rank00001" in str(nodes.newest().verify(lambda size: None))
    nodes.part("n2", 10, FILES[1]).write_bytes(PART)
    nodes.part("n2", 10, "r\u00e9sum\u00e9").touch()  # somebody else's
    none = "of 2 files lie whole on no node that answers"
    assert nodes.ask().found[1].problem == f"rank00001.safetensors {none}"
    nodes.part("n1", 10, FILES[0]).write_bytes(PART)
    newest, damaged = nodes.ask().found
    assert damaged.problem == damaged.verify(lambda size: None) == f"rank00000.safetensors and 1 more {none}"
    shutil.copytree(nodes.part("n1", 20, ""), nodes.part("n1", 30, ""))
    assert nodes.newest().problem == "n1: ~/saved/run/step-00000030/MANIFEST.json is of step 20"
    shutil.rmtree(nodes.homes["n1"])
    where = "n1: ~/saved/run/step-00000020/rank00000.safetensors: burst: "
    with pytest.raises(ClusterError, match=f"^{where}"):
        newest.verify(lambda size: None)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\0"])
def test_a_manifest_that_is_none_is_named_with_its_node(nodes: Nodes, tmp_path: Path, text: str) -> None:
    for node in nodes.homes:
        nodes.part(node, 20, "MANIFEST.json").write_text(text)
    newest = nodes.newest()
    assert newest.problem == "n1: ~/saved/run/step-00000020/MANIFEST.json is damaged: it is no JSON object"
    assert newest.verify(lambda size: None) == newest.problem
    with pytest.raises(CheckpointError, match=f"of step 20 cannot be fetched: {newest.problem}"):
        newest.fetch(tmp_path / "here", lambda size: None)


def test_a_node_that_does_not_answer_is_named_by_what_it_alone_holds(nodes: Nodes) -> None:
    nodes.dead = {"n1"}
    answer = nodes.ask()
    assert set(answer.errors) == {"n1"}
    assert "no answer of n1" in str(answer.found[0].problem)
    assert answer.found[0].manifest is not None


def test_different_saves_of_one_step_are_no_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    save([nodes.homes["n1"], tmp_path / "another"], 20, "cd")
    assert nodes.newest().problem == "the nodes hold different saves of this step"


def test_what_is_fetched_is_a_checkpoint_as_if_it_had_been_written_here(nodes: Nodes, tmp_path: Path) -> None:
    here = tmp_path / "here"
    told: list[int] = []
    path = nodes.newest().fetch(here, told.append)
    found = newest_verified(here)
    assert found is not None
    assert found[0] == Checkpoint(20, path)
    assert sum(told) == found[1].bytes
    assert read_manifest(path).to_dict() == read_manifest(nodes.part("n1", 20, "")).to_dict()


def test_an_interrupted_fetch_goes_on_where_it_was(nodes: Nodes, tmp_path: Path) -> None:
    here, half = tmp_path / "here", len(PART) // 2
    folder, told, newest = new_folder(here, 20, "ab"), list[int](), nodes.newest()
    (folder / FILES[0]).write_bytes(PART[:half])
    shutil.copy(nodes.part("n2", 20, FILES[1]), folder)
    newest.fetch(here, told.append)
    words = [list(process.popen.args)[-2:] for one in nodes.connections for process in one.processes]  # type: ignore[arg-type]
    assert [each for each in words if "safetensors" in each[0]] == [[f"step-00000020/{FILES[0]}", str(half + 1)]]
    assert (told[0], sum(told)) == (half, 2 * (len(PART) + 2))
    assert all(process.is_cut for one in nodes.connections for process in one.processes)  # of which a node has few
    assert newest_verified(here) is not None
    (new_folder(here, 10, "ab") / FILES[1]).write_bytes(PART * 2)  # longer than it was written
    assert nodes.ask().found[1].fetch(here, lambda size: None) == here / "step-00000010"


def test_a_second_fetch_at_the_same_time_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    refused: list[str] = []

    def fetch_again(size: int) -> None:
        with pytest.raises(CheckpointError) as caught:
            nodes.newest().fetch(tmp_path / "here", lambda size: None)
        refused.append(str(caught.value))

    nodes.newest().fetch(tmp_path / "here", fetch_again)
    assert refused
    assert all("another command" in text for text in refused)
    assert newest_verified(tmp_path / "here") is not None


@pytest.mark.parametrize("damage", [b"", b"!" * (len(PART) + 2)])
def test_nothing_damaged_is_taken(nodes: Nodes, tmp_path: Path, damage: bytes) -> None:
    newest = nodes.newest()
    nodes.part("n2", 20, FILES[1]).write_bytes(damage)
    with pytest.raises(CheckpointError):
        newest.fetch(tmp_path / "here", lambda size: None)
    assert newest_verified(tmp_path / "here") is None
    nodes.part("n2", 20, FILES[1]).write_bytes(PART + bytes([1, 20]))
    assert newest.fetch(tmp_path / "here", lambda size: None).name == "step-00000020"


def test_fetch_ends_where_a_node_sends_more_of_a_file_than_it_announced(nodes: Nodes, tmp_path: Path) -> None:
    newest, written = nodes.newest(), list[int]()
    endless = nodes.part("n2", 20, FILES[1])
    endless.unlink()
    endless.symlink_to("/dev/zero")

    def advance(size: int) -> None:
        written.append(size)
        assert sum(written) < 10_000, "more is written than the two files of 1 kB that were announced"

    with pytest.raises(ClusterError, match=f"n2: .*{FILES[1]}: the node sends more than it announced"):
        newest.fetch(tmp_path / "here", advance)
    assert not list((tmp_path / "here").rglob(FILES[1])), "what was sent of that file is removed"


def test_list_that_never_ends_is_an_error_of_its_node(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/find").write_text("#!/bin/sh\nexec yes\n")
    (tmp_path / "bin/find").chmod(0o755)
    nodes.environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    answer = nodes.ask()
    assert "n1: ~/saved/run: the node sends more than" in answer.errors["n1"]


def ended_run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path / "runs/tiny/20260101-000000-aaaaaa", {})
    run.transition("failed")
    return run


def steps_on(nodes: Nodes) -> dict[str, list[str]]:
    return {
        name: sorted(path.name for path in (home / "saved/run").glob("step-*")) for name, home in nodes.homes.items()
    }


def pruned(nodes: Nodes, run: RunFolder, *, dry_run: bool = False) -> dict[str, Any]:
    console = Console(file=io.StringIO())
    return prune_run(run, nodes.ask(), keep_last=1, keep_every=None, dry_run=dry_run, console=console)


def test_old_ones_go_from_every_disk_and_a_rehearsal_changes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    before = steps_on(nodes)
    rehearsed = pruned(nodes, run, dry_run=True)
    assert steps_on(nodes) == before == {name: ["step-00000010", "step-00000020"] for name in ("n1", "n2")}
    sizes = [path.stat().st_size for name in nodes.homes for path in nodes.part(name, 10, "").iterdir()]
    found = pruned(nodes, run)
    assert found | {"dry_run": True} == rehearsed
    assert (found["removed"], found["kept"]) == ([10], [20])
    assert steps_on(nodes) == {name: ["step-00000020"] for name in ("n1", "n2")}
    assert found["freed_bytes"] == sum(sizes)
    assert pruned(nodes, run)["removed"] == []


def test_the_newest_undamaged_one_stays_on_nodes_too(nodes: Nodes, tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    save(list(nodes.homes.values()), 5)
    nodes.part("n2", 20, FILES[1]).write_bytes(PART + b"!!")
    assert pruned(nodes, run)["kept"] == [20, 10]
    assert steps_on(nodes)["n2"] == ["step-00000010", "step-00000020"]


def test_nothing_is_deleted_while_a_node_does_not_answer(nodes: Nodes, tmp_path: Path) -> None:
    run, before = ended_run(tmp_path), steps_on(nodes)
    nodes.dead = {"n2"}
    with pytest.raises(CheckpointError, match="no answer of n2, so nothing is deleted"):
        pruned(nodes, run)
    assert steps_on(nodes) == before


def test_a_node_without_the_folder_has_nothing(nodes: Nodes) -> None:
    nodes.homes = {"n1": nodes.homes["n1"].parent / "elsewhere"}
    nodes.homes["n1"].mkdir()
    assert nodes.ask().found == ()
