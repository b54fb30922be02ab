"""The bridge over pipes: what a launcher sees of a node, and what it may ask for."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from supervise_bridge import BridgeClient
from testkit.supervise_rig import Rig, is_gone
from testkit.waiting import wait_for

from cluster.supervise.node.folder import NodeFiles, write_json
from cluster.supervise.node.frames import pack_data

NODE = "alpha"
MIB = 1 << 20


@pytest.fixture
def open_bridge() -> Iterator[Callable[..., BridgeClient]]:
    opened: list[BridgeClient] = []

    def make(*args: object, **options: bool) -> BridgeClient:
        opened.append(BridgeClient(*args, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for bridge in opened:
        bridge.kill()


OpenBridge = Callable[..., BridgeClient]


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    """The folders of a node on which nothing runs."""
    made = NodeFiles(str(tmp_path / "run"), NODE)
    Path(made.log_dir).mkdir(parents=True)
    Path(made.state_dir).mkdir(parents=True)
    return made


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def log(files: NodeFiles, name: str) -> Path:
    return Path(files.log_dir, name)


def end(files: NodeFiles) -> None:
    """The node has ended."""
    write_json(files.outcome, {"exit_code": 0, "cause": "exit"})


# --- one run ----------------------------------------------------------------------------------------------------------


def test_run_over_a_bridge_from_hello_to_synced(rig: Rig, open_bridge: OpenBridge) -> None:
    bridge = open_bridge()
    bridge.say("start", spec=rig.spec("polite"))
    folder = rig.folder / NODE
    bridge.follow(folder, rig.name(), lead=True)
    pid = bridge.wait("started")["pid"]
    bridge.wait("status", accept=lambda m: len(m["supervisor"].get("ranks", {})) == 2)
    wait_for(lambda: len(list(folder.glob("logs/*/rank*.log"))) == 2, "the ranks")
    bridge.say("stop", cause="Ctrl-C", grace_s=5.0)
    status = bridge.wait("status", accept=lambda m: m["phase"] == "ended")
    synced = bridge.wait("synced")
    assert status["outcome"]["stop_cause"] == "Ctrl-C"
    assert synced["sizes"] == {path: (folder / path).stat().st_size for path in synced["sizes"]}
    assert bytes(bridge.mirror[f"logs/{rig.name()}/rank0001.log"]) == b"finished\n"
    assert json.loads(bridge.files[f"nodes/{rig.name()}/outcome.json"]) == status["outcome"]
    bridge.say("bye")
    assert bridge.close() == 0
    wait_for(lambda: is_gone(pid), "the end of the supervisor")
    assert bridge.messages[0]["op"] == "hello"


def test_supervisor_outlives_the_bridge_and_the_next_one_goes_on(rig: Rig, open_bridge: OpenBridge) -> None:
    first = open_bridge()
    first.say("start", spec=rig.spec())
    first.wait("started")
    first.kill()
    second = open_bridge()
    second.say("start", spec=rig.spec())
    assert second.wait("refused")["kind"] == "exists"
    second.follow(rig.folder / NODE, rig.name())
    second.wait("status", accept=lambda m: m["phase"] == "running" and len(m["supervisor"]["ranks"]) == 2)
    second.say("sweep")
    assert second.wait("swept")["left"] == []
    assert second.wait("status", accept=lambda m: m["phase"] == "ended")["outcome"]["stop_cause"] == "sweep"
    assert second.close() == 0


@pytest.mark.thorough
def test_beats_renew_the_lease_and_are_answered(rig: Rig, open_bridge: OpenBridge) -> None:
    bridge = open_bridge()
    bridge.say("beat", id=1)
    bridge.say("start", spec=rig.spec("polite", lease_s=4.0))
    bridge.follow(rig.folder / NODE, rig.name())
    bridge.wait("started")
    for number in range(2, 28):
        bridge.say("beat", id=number)
        time.sleep(0.2)
    bridge.wait("beat", accept=lambda m: m["id"] == 27)
    answers = bridge.all("beat")
    assert [answer["id"] for answer in answers] == list(range(1, 28))
    assert all(abs(answer["now_ns"] - time.time_ns()) < 60e9 for answer in answers)
    assert rig.status()["phase"] == "running"
    assert bridge.wait("status", accept=lambda m: m["phase"] == "ended")["outcome"]["cause"] == "lease"


# --- logs by offset ---------------------------------------------------------------------------------------------------


def test_bridges_killed_at_random_moments_lose_and_double_nothing(files: NodeFiles, open_bridge: OpenBridge) -> None:
    mirror: dict[str, bytearray] = {}
    over = threading.Event()

    def grow() -> None:
        count = 0
        while not over.is_set():
            for name in ("rank0000.log", "rank0001.log", "torchrun.log"):
                with log(files, name).open("ab") as file:
                    file.write(b"".join(b"%s %d \xff\x00\x1b[31m\n" % (name.encode(), count + k) for k in range(2000)))
            count += 2000
            time.sleep(0.005)

    writer = threading.Thread(target=grow)
    writer.start()
    rng = random.Random(5)
    for _ in range(6):
        bridge = open_bridge(mirror)
        bridge.follow(files.folder, NODE)
        time.sleep(rng.uniform(0.1, 0.5))
        bridge.kill()
    over.set()
    writer.join()
    end(files)
    last = open_bridge(mirror)
    last.follow(files.folder, NODE)
    sizes = last.wait("synced")["sizes"]
    assert len(sizes) == 3
    for path, size in sizes.items():
        assert bytes(mirror[path]) == Path(files.folder, path).read_bytes()
        assert size == len(mirror[path]) > 0


class Noting(dict[str, bytearray]):
    """A mirror that notes how long the copy of `path` is at the moment when its last file comes, of `count`."""

    def __init__(self, path: str, count: int) -> None:
        super().__init__()
        self.noted, self._path, self._count = 0, path, count

    def setdefault(self, path: str, data: bytearray) -> bytearray:  # type: ignore[override]
        is_last = path not in self and len(self) == self._count - 1
        copy = super().setdefault(path, data)
        self.noted = len(self[self._path]) if is_last else self.noted
        return copy


def test_long_line_neither_fills_memory_nor_holds_up_the_others(files: NodeFiles, open_bridge: OpenBridge) -> None:
    with log(files, "rank0000.log").open("wb") as file:
        file.truncate(100 * MIB)
    for rank in range(1, 64):
        log(files, f"rank{rank:04d}.log").write_text(f"rank {rank}\n")
    big = f"logs/{NODE}/rank0000.log"
    bridge = open_bridge(mirror := Noting(big, 64))
    bridge.follow(files.folder, NODE)
    wait_for(lambda: len(bridge.mirror) == 64, "all files")
    assert mirror.noted < 20 * MIB
    peak = 0
    while len(bridge.mirror[big]) < 100 * MIB:
        peak = max(peak, psutil.Process(bridge.process.pid).memory_info().rss)
        time.sleep(0.02)
    assert peak < 64 * MIB


def test_requests_are_heard_while_nobody_reads_a_flood(files: NodeFiles, open_bridge: OpenBridge) -> None:
    log(files, "rank0000.log").write_bytes(b"x" * (8 * MIB))
    bridge = open_bridge(read=False)
    bridge.follow(files.folder, NODE)
    bridge.say("beat", id=1)
    wait_for(Path(files.lease).exists, "the lease")
    bridge.say("stop", cause="Ctrl-C", grace_s=1)
    wait_for(Path(files.stop).exists, "the request")
    time.sleep(0.3)
    assert psutil.Process(bridge.process.pid).memory_info().rss < 64 * MIB
    bridge.kill()


def test_log_that_was_begun_anew_replaces_the_old_one(files: NodeFiles, open_bridge: OpenBridge) -> None:
    path = f"logs/{NODE}/rank0000.log"
    log(files, "rank0000.log").write_text("old, and long\n")
    bridge = open_bridge()
    bridge.follow(files.folder, NODE)
    wait_for(lambda: bridge.mirror.get(path) == b"old, and long\n", "the old one")
    log(files, "new").write_text("new\n")
    log(files, "new").rename(log(files, "rank0000.log"))
    wait_for(lambda: bridge.mirror[path] == b"new\n", "the new one")
    log(files, "rank0000.log").write_text("")
    wait_for(lambda: bridge.mirror[path] == b"", "nothing")


def test_mirror_that_is_longer_than_the_log_is_replaced(files: NodeFiles, open_bridge: OpenBridge) -> None:
    path = f"logs/{NODE}/rank0000.log"
    log(files, "rank0000.log").write_text("short\n")
    bridge = open_bridge({path: bytearray(b"from another world\n")})
    bridge.follow(files.folder, NODE)
    wait_for(lambda: bridge.mirror[path] == b"short\n", "the log")


def test_grown_log_after_the_end_is_synced_again(files: NodeFiles, open_bridge: OpenBridge) -> None:
    end(files)
    bridge = open_bridge()
    bridge.follow(files.folder, NODE)
    assert bridge.wait("synced")["sizes"] == {}
    log(files, "rank0000.log").write_text("late\n")
    assert bridge.wait("synced", accept=lambda m: m["sizes"])["sizes"] == {f"logs/{NODE}/rank0000.log": 5}


# --- files ------------------------------------------------------------------------------------------------------------


def test_only_the_leading_node_sends_the_records_of_the_run(files: NodeFiles, open_bridge: OpenBridge) -> None:
    folder = Path(files.folder)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "run.json").write_text('{"state": "running"}')
    end(files)
    plain, lead = open_bridge(), open_bridge()
    plain.follow(folder, NODE)
    lead.follow(folder, NODE, lead=True)
    assert plain.wait("synced")["sizes"] == {}
    assert lead.wait("synced")["sizes"] == {"metrics.jsonl": 3}
    assert "run.json" in lead.files
    assert "run.json" not in plain.files


def test_replaced_files_arrive_whole_whatever_their_size(files: NodeFiles, open_bridge: OpenBridge) -> None:
    bridge = open_bridge()
    bridge.follow(files.folder, NODE)
    small, big = f"logs/{NODE}/rank0000.status.json", f"logs/{NODE}/rank0000.flight.json"
    for count in (1, 2):
        write_json(str(log(files, "rank0000.status.json")), {"step": count})
        write_json(str(log(files, "rank0000.flight.json")), {"entries": "x" * (3 * MIB + count)})
        expected = log(files, "rank0000.flight.json").read_bytes()
        wait_for(lambda expected=expected: bridge.mirror.get(big) == expected, "the big one")
        wait_for(lambda count=count: json.loads(bridge.files.get(small, "{}")) == {"step": count}, "the small one")
    heads = [message for message in bridge.all("log") if message["path"] == big]
    assert [head["replace"] for head in heads] == [True, True]
    assert [head["size"] for head in heads] == [3 * MIB + count + len('{\n "entries": ""\n}\n') for count in (1, 2)]


def test_what_is_no_plain_file_is_not_read(files: NodeFiles, open_bridge: OpenBridge, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    log(files, "link.log").symlink_to(tmp_path / "secret")
    log(files, "link.json").symlink_to(tmp_path / "secret")
    os.mkfifo(log(files, "pipe.log"))
    log(files, "folder.log").mkdir()
    log(files, "bad\x1bname.log").write_text("x")
    log(files, "torchrun").mkdir()
    log(files, "torchrun/stdout.log").write_text("x")
    end(files)
    bridge = open_bridge()
    bridge.follow(files.folder, NODE)
    assert bridge.wait("synced")["sizes"] == {}
    assert set(bridge.files) == {f"nodes/{NODE}/outcome.json"}


# --- what makes no sense ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        {"op": "dance"},
        {"op": "start"},
        {"op": "follow", "folder": "../x", "node": "a"},
        {"op": "follow", "folder": "/x", "node": "a/b"},
        {"op": "follow", "folder": "/x", "node": "a", "offsets": {"x": -1}},
        {"op": "follow", "folder": "/x", "node": "a", "offsets": ["x"]},
        {"op": "stop", "cause": "x", "grace_s": 1},
        {"op": "sweep"},
    ],
    ids=str,
)
def test_request_that_makes_no_sense_is_answered(message: dict[str, object], open_bridge: OpenBridge) -> None:
    bridge = open_bridge()
    bridge.say(**message)  # type: ignore[arg-type]
    assert bridge.wait("error")["text"]
    bridge.say("beat", id=7)
    bridge.wait("beat")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"J\xff\xff\xff\xff", pack_data(1, 0, b"x")])
def test_what_is_no_request_ends_the_bridge(data: bytes, open_bridge: OpenBridge) -> None:
    bridge = open_bridge()
    bridge.write(data)
    assert bridge.wait("error")["text"]
    assert bridge.process.wait(200) == 0


def test_requests_for_a_folder_that_is_not_there_are_answered(tmp_path: Path, open_bridge: OpenBridge) -> None:
    bridge = open_bridge()
    bridge.follow(tmp_path / "nowhere", NODE)
    assert bridge.wait("status")["phase"] == "none"
    bridge.say("stop", cause="x", grace_s=1)
    assert str(tmp_path / "nowhere") in bridge.wait("error")["text"]
    bridge.say("beat", id=1)
    bridge.wait("beat")
