"""What nodes answer before a launch: by the real script in a real shell, and over real SSH."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testkit.connections import LocalConnection
from testkit.fake_plan import run_config

from cluster.agent.survey import find_data, find_room
from cluster.checks.launch import Offer, launch_group, read_offer
from cluster.survey.ask import survey_node
from cluster.survey.facts import NodeFacts
from engine.data.sources import list_files

Ask = Callable[..., Offer]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """What this machine offers as node n1, its home in `tmp_path`."""

    def run(data: dict[str, Any] | None = None, **cluster: Any) -> Offer:
        config = run_config(cluster=cluster, **({} if data is None else {"data": data}))
        with LocalConnection("n1", {"HOME": str(tmp_path)}) as connection:
            probe = survey_node(connection, launch_group(config).questions[-1:])
        return read_offer(NodeFacts(probe, config.cluster))

    return run


def test_a_machine_tells_who_and_what_it_is_and_nothing_on_it_changes(ask: Ask, tmp_path: Path) -> None:
    found = ask()
    assert (found.home, found.uid, found.gid) == (str(tmp_path), os.getuid(), os.getgid())
    assert found.groups == tuple(sorted(os.getgroups()))
    assert (found.memory_bytes or 0) > 1 << 28
    assert found.room == (pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2), "")
    assert list(tmp_path.iterdir()) == []
    assert 20000 <= (found.port[0] or 0) < 30000
    with socket.socket() as listener:
        listener.bind(("", found.port[0]))


def test_what_is_in_the_way_is_told(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    for folder in (f"{tmp_path}/runs/mine", "~/runs/mine"):
        assert ask(node_folder=folder).room == (None, f"{tmp_path}/runs is not a folder")
    assert find_room(str(tmp_path / "not" / "there")) > 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert ask(master_port=port).port == (None, f"port {port}: Address already in use")


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
    (pattern,) = data_facts(tmp_path, "~/corpus/*.jsonl")
    assert (pattern["path"], pattern["files"]) == (f"{folder}/*.jsonl", 2)
    assert (
        data_facts(folder, "~")[0]["digest"]
        == data_facts(tmp_path, shutil.copytree(folder, tmp_path / "x"))[0]["digest"]
    )
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
