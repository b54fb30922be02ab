"""What nodes answer before a launch: by the real script in a real shell, and over real SSH."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testkit import PYTHON_PATH
from testkit.connections import LocalConnection
from testkit.fake_plan import run_config

from cluster.agent import survey
from cluster.agent.survey import find_data, find_disk, find_room, has_checkpoint, network_source, unfinished_bytes
from cluster.checks.launch import NodeResources, launch_group, read_resources
from cluster.survey.facts import NodeFacts, survey_node
from engine.data.sources import list_files
from engine.pretrained.folder import TOKENIZER_FILE, VOCABULARY_FILES
from engine.runs.checkpoints import CheckpointError, find_source, recover

Ask = Callable[..., NodeResources]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """What this machine offers as node n1, its home in `tmp_path`."""

    def run(data: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **cluster: Any) -> NodeResources:
        config = run_config(cluster=cluster, data=data or {}, train=train or {})
        with LocalConnection("n1", {"HOME": str(tmp_path)}) as connection:
            probe = survey_node(connection, launch_group(config).questions[-1:])
        return read_resources(NodeFacts(probe, config.cluster))

    return run


def test_a_machine_tells_who_and_what_it_is_and_nothing_on_it_changes(ask: Ask, tmp_path: Path) -> None:
    found = ask()
    assert (found.home, found.uid, found.gid) == (str(tmp_path), os.getuid(), os.getgid())
    assert (found.user, found.groups) == (pwd.getpwuid(os.getuid()).pw_name, tuple(sorted(os.getgroups())))
    assert found.has_infiniband_devices == Path("/dev/infiniband").is_dir()
    assert (found.memory_bytes or 0) > 1 << 28
    assert found.room == (pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2), "")
    assert list(tmp_path.iterdir()) == []
    assert 20000 <= (found.port[0] or 0) < 30000
    with socket.socket() as listener:
        listener.bind(("", found.port[0]))


@pytest.mark.needs("namespaces")
def test_what_is_in_the_way_is_told(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    for folder in (f"{tmp_path}/runs/mine", "~/runs/mine"):
        assert ask(node_folder=folder).room == (None, f"{tmp_path}/runs is not a folder")
    assert find_room(str(tmp_path / "not" / "there")) > 0
    script = (
        "mount -t tmpfs -o {1} none {0} && exec {2} -c \"from cluster.agent.survey import find_room; find_room('{0}')\""
    )
    for options, told in (("ro", "is not writable"), ("nr_inodes=1", "has no free inodes"), ("nr_inodes=0", "")):
        words = ["unshare", "--mount", "sh", "-c", script.format(tmp_path, options, sys.executable)]
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": PYTHON_PATH}, capture_output=True, text=True)
        assert (told in done.stderr, done.returncode) == (True, int(bool(told))), done.stderr
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()  # which the port waits for some time after
        port = listener.getsockname()[1]
        assert ask(master_port=port).port == (None, f"port {port}: Address already in use")
    assert ask(master_port=port).port == (port, "")


def test_the_holder_of_a_node_is_told_while_it_lives(ask: Ask) -> None:
    folder = Path(f"/tmp/burst-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "asked-n1.lock"
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write('{"run_id": "20260101-000000-abcdef", "pid": 7, "since": "now"}')
            file.flush()
            assert ask().locks["asked-n1"] == "20260101-000000-abcdef"
        assert "asked-n1" not in ask().locks
    finally:
        path.unlink()


def data_facts(folder: Path, *paths: str | Path) -> list[dict[str, Any]]:
    """What the program says of these entries of data.paths, `folder` being the home."""
    return find_data([{"path": str(path), "suffixes": []} for path in paths], str(folder))


def test_data_are_listed_as_the_trainer_will_list_them(ask: Ask, tmp_path: Path) -> None:
    (folder := tmp_path / "corpus").mkdir()
    for name in ("sub", ".hidden"):
        (folder / name).mkdir()
    for name in ("a.jsonl", "b.jsonl", ".hidden.jsonl", "readme.md", "sub/c.ndjson", ".hidden/d.jsonl"):
        (folder / name).write_text("12345678")
    (entry,) = ask({"format": "jsonl", "paths": [str(folder)]}).data
    assert (entry[1], (entry[2] or "").rpartition(",")[0]) == ("", "3 files, 24 bytes")
    assert len(list_files([str(folder)], (".jsonl", ".ndjson"))) == 3
    (folder / "a[1].txt").touch()
    patterns = [("*.jsonl", 2), ("*/c.ndjson", 1), ("a[1].txt", 1)]
    found = data_facts(tmp_path, *(f"~/corpus/{pattern}" for pattern, _ in patterns), "~/**/c.ndjson")
    assert [(one["path"], one["files"]) for one in found[:3]] == [(f"{folder}/{one}", count) for one, count in patterns]
    assert found[3]["files"] == 1
    (folder / os.fsdecode(b"\xff")).touch()
    assert (
        data_facts(folder, "~")[0]["digest"]
        == data_facts(tmp_path, shutil.copytree(folder, tmp_path / "x"))[0]["digest"]
    )
    copy = tmp_path / "x"
    (copy / "a.jsonl").rename(copy / "other.jsonl")
    assert data_facts(tmp_path, folder)[0]["digest"] != data_facts(tmp_path, copy)[0]["digest"]
    (folder / "empty").mkdir()
    absent = "no such file or folder"
    missing = data_facts(tmp_path, "/none/a.txt", folder / "empty", "/none/*.txt")
    assert [one["problem"] for one in missing] == [absent, "holds no such files", absent]


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"data": {"tokenizer": "bpe"}}, []),
        ({"data": {"tokenizer": "/m/tokenizer.json"}}, ["/m/tokenizer.json"]),
        ({"data": {"tokenizer": "/m/tokenizer.json", "messages_field": "messages"}}, ["/m"]),
        ({"data": {"messages_field": "messages", "chat_template": "/t/mine.jinja"}}, ["/t/mine.jinja"]),
        ({"model": {"init_from": "/init"}}, ["/init"]),
    ],
)
def test_nodes_are_asked_for_what_ranks_read(settings: dict[str, Any], files: list[str]) -> None:
    data = {"format": "jsonl", "paths": ["/chats.jsonl"], **settings.get("data", {})}
    script = launch_group(run_config(**{**settings, "data": data})).questions[-1].script
    assert [path for path in ("/chats.jsonl", *files) if f'"path": "{path}"' in script] == ["/chats.jsonl", *files]
    assert script.count('"path": ') == 1 + len(files)


def test_a_run_that_has_begun_needs_the_source_that_it_began_with_no_more() -> None:
    config = run_config(train={"checkpoint": {"resume_from": "/old/run"}})
    for resumed, asked in ((None, '"source": "/old/run"'), ("20260101-000000-abcdef", '"source": null')):
        assert asked in launch_group(config, resumed).questions[-1].script


def test_a_file_that_differs_at_its_start_or_end_has_another_digest(tmp_path: Path) -> None:
    path, body = tmp_path / "a.txt", b"x" * (3 << 20)

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        return str(data_facts(tmp_path, path)[0]["digest"])

    same = digest(body)
    assert digest(body) == same
    first, last = (body[:at] + b"y" + body[at + 1 :] for at in (1 << 19, (5 << 19) - 1))
    assert same not in [digest(other) for other in (first, last, body + b"x")]
    assert digest(body[: 3 << 19] + b"y" + body[(3 << 19) + 1 :]) == same  # the middle is not read
    for number in range(66):
        (tmp_path / f"b{number:02}.txt").write_text("12")
    whole = data_facts(tmp_path, tmp_path)[0]["digest"]
    for number, is_read in ((62, True), (63, False)):  # of many the first 64, of which one is a.txt
        (tmp_path / f"b{number}.txt").write_text("13")
        assert (data_facts(tmp_path, tmp_path)[0]["digest"] != whole) == is_read
        (tmp_path / f"b{number}.txt").write_text("12")


def test_room_is_that_of_the_folder_of_checkpoints(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "occupied").touch()
    for folder, expected in (("~/saved", ""), ("~/occupied/saved", f"{tmp_path}/occupied is not a folder")):
        found = ask(train={"checkpoint": {"at_end": True, "folder": folder}}).checkpoint_room
        assert found == (None if expected else pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2), expected)


MOUNTS = """
29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
60 29 0:48 / /home rw,relatime shared:31 master:2 - nfs4 filer:/export/home rw,vers=4.2,addr=10.0.0.9
61 29 0:49 / /scratch rw - lustre 10.0.0.8@o2ib:/scratch rw,flock
62 29 0:50 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("device", "source"),
    [("0:48", "nfs4 filer:/export/home"), ("0:49", "lustre 10.0.0.8@o2ib:/scratch"), ("8:1", ""), ("0:50", "")],
)
def test_network_file_systems_have_one_name_on_all_nodes(device: str, source: str) -> None:
    assert network_source(MOUNTS, device) == source


def test_folders_of_one_disk_have_one_name_and_other_disks_another(tmp_path: Path) -> None:
    assert find_disk(str(tmp_path)) == find_disk(str(tmp_path / "not" / "there")) != ""
    assert find_disk(str(tmp_path)) != find_disk("/proc")


def test_what_a_run_deletes_when_it_goes_on_is_what_counts_as_free(tmp_path: Path) -> None:
    for name in ("step-00000004", "step-00000005.tmp-ab", "fetched-ab", "step-00000003.bad-ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank00000.safetensors").write_bytes(b"x" * 8192)
    assert unfinished_bytes(str(tmp_path)) == 2 * 8192
    recover(tmp_path)
    assert unfinished_bytes(str(tmp_path)) == 0


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step-00000004", "none", "run/logs", "."])
def test_nodes_find_the_checkpoints_that_ranks_find(tmp_path: Path, path: str) -> None:
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "run/logs").mkdir()
    try:
        is_found = bool(find_source(tmp_path / path))
    except CheckpointError:
        is_found = False
    assert has_checkpoint(str(tmp_path / path)) is is_found


def test_a_run_that_keeps_its_checkpoints_elsewhere_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {checkpoint: {folder: /saved}}")
    assert has_checkpoint(str(tmp_path)) is None


def test_nodes_tell_what_the_folder_of_first_weights_holds(tmp_path: Path) -> None:
    assert survey.find_model(str(tmp_path / "none")) is None
    assert survey.find_model(str(tmp_path))["problem"] == "No such file or directory"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert survey.find_model(str(tmp_path)) == {
        "problem": "",
        "config": {"model_type": "llama"},
        "has_tokenizer": False,
    }
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "vocab.json").touch()
    damaged = survey.find_model(str(tmp_path))
    assert (damaged["config"], damaged["has_tokenizer"]) == (None, True)
    assert (TOKENIZER_FILE, *VOCABULARY_FILES) == survey.TOKENIZER_FILES, "the files that make a tokenizer"
