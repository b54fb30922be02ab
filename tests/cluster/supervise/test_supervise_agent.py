"""The agent of a node as a process: what a launcher sees of the node, and what it may ask for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit.connections import LocalConnection
from testkit.supervise_rig import Rig, is_gone
from testkit.waiting import wait_for

from cluster.agent.folder import NodeFiles, write_json
from cluster.agent.serve import PIECE_BYTES
from cluster.code import NoAnswerError, NodeProgram

NODE = "alpha"
MIB = 1 << 20


class Client:
    """An agent of this machine. `copy`: bytes of every file so far, of logs kept over agents by its user."""

    def __init__(self, folder: Path | str, node: str, copy: dict[str, bytearray] | None = None, **follow: Any) -> None:
        self.copy = {} if copy is None else copy
        self.heads: list[dict[str, Any]] = []
        self.whole: list[tuple[str, bytes]] = []  # every replaced file that came, in their order
        self.told: dict[str, Any] = {}
        self._connection = LocalConnection(NODE)
        self._program = NodeProgram(self._connection)
        self._place = {"folder": str(folder), "node": node}
        offsets = {path: len(data) for path, data in self.copy.items()}
        self._follow = {"lead": False, "offsets": offsets, **follow}

    @property
    def popen(self) -> Any:
        return self._connection.processes[0].popen

    def ask(self, budget: int = MIB, wait_s: float = 0.2, **wish: Any) -> dict[str, Any]:
        """The next answer, with what it holds noted."""
        if self._follow is not None and "start" not in wish:
            wish, self._follow = {"follow": self._follow, **wish}, None
        answer, data = self._program.ask({**self._place, "budget": budget, "wait_s": wait_s, **wish}, silence_s=60.0)
        self.told.update(answer)
        at = 0
        for head in answer.get("files", ()):
            self.heads.append(head)
            file = self.copy.setdefault(head["path"], bytearray())
            if head.get("anew") or (not head["offset"] and "size" in head):
                file.clear()
            assert head["offset"] == len(file), head
            file += data[at : at + head["bytes"]]
            at += head["bytes"]
            if len(file) == head.get("size"):
                self.whole.append((head["path"], bytes(file)))
        assert at == len(data)
        return answer

    def wait(self, name: str, **wish: Any) -> Any:
        """What an answer holds under `name`, once one does."""
        return wait_for(lambda: self.ask(**wish).get(name), name)

    def phase(self) -> str:
        self.ask()
        return str(self.told["status"]["phase"])

    def kill(self) -> None:
        self._connection.processes[0].end()


@pytest.fixture
def open_agent() -> Iterator[Callable[..., Client]]:
    opened: list[Client] = []

    def make(*args: Any, **options: Any) -> Client:
        opened.append(Client(*args, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.kill()


OpenAgent = Callable[..., Client]


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    """The folders of a node on which nothing runs."""
    made = NodeFiles(str(tmp_path / "run"), NODE)
    Path(made.log_dir).mkdir(parents=True)
    Path(made.state_dir).mkdir(parents=True)
    return made


def log(files: NodeFiles, name: str) -> Path:
    return Path(files.log_dir, name)


def end(files: NodeFiles) -> None:
    """The node has ended."""
    write_json(files.outcome, {"exit_code": 0, "cause": "exit"})


# --- one run ----------------------------------------------------------------------------------------------------------


def test_a_run_is_started_once_followed_stopped_and_outlives_its_agent(rig: Rig, open_agent: OpenAgent) -> None:
    folder, spec = rig.folder / NODE, {**rig.spec("polite"), "start_id": "one"}
    first = open_agent(folder, rig.name())
    pid = first.wait("started", start=spec)
    first.kill()
    second = open_agent(folder, rig.name(), lead=True)
    assert second.wait("refused", start={**spec, "start_id": "another"})["kind"] == "exists"
    assert second.wait("started", start=spec, again=True) == pid  # its answer might have been lost
    wait_for(lambda: second.ask() and len(second.told["status"]["supervisor"].get("ranks", {})) == 2, "the ranks")
    wait_for(lambda: len(list(folder.glob("logs/*/rank*.log"))) == 2, "their logs")
    second.ask(stop={"cause": "Ctrl-C", "grace_s": 5.0})
    assert second.wait("all")
    outcome = second.told["status"]["outcome"]
    assert outcome["stop_cause"] == "Ctrl-C"
    assert bytes(second.copy[f"logs/{rig.name()}/rank0001.log"]) == b"finished\n"
    assert json.loads(second.copy[f"nodes/{rig.name()}/outcome.json"]) == outcome
    for path, data in second.copy.items():
        assert (folder / path).read_bytes() == data
    wait_for(lambda: is_gone(pid), "the end of the supervisor")
    third = open_agent(folder, rig.name())
    assert third.wait("started", start=spec, again=True) == pid  # nor is it begun anew once it has ended


def test_a_lost_start_that_is_being_carried_out_is_waited_for(rig: Rig, open_agent: OpenAgent) -> None:
    spec = {**rig.spec("polite", exclusive=False), "start_id": "one"}  # the lock of the run does not wait
    agents = [open_agent(rig.folder / NODE, rig.name()) for _ in range(4)]
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda a=a: answers.append(a.wait("started", start=spec, again=True))) for a in agents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 4
    assert len(set(answers)) == 1


def test_a_sweep_leaves_nothing(rig: Rig, open_agent: OpenAgent) -> None:
    agent = open_agent(rig.folder / NODE, rig.name())
    agent.wait("started", start=rig.spec())
    wait_for(lambda: agent.ask(sweep="nonce") and "swept" in agent.told, "the end of the sweep")

    assert agent.told["swept"] == []
    wait_for(lambda: agent.phase() == "ended", "the outcome")
    assert agent.told["status"]["outcome"]["stop_cause"] == "sweep"


# --- logs by offset ---------------------------------------------------------------------------------------------------


def test_long_line_neither_fills_memory_nor_holds_up_the_others(files: NodeFiles, open_agent: OpenAgent) -> None:
    with log(files, "rank0000.log").open("wb") as file:
        file.truncate(60 * MIB)
    for rank in range(1, 64):
        log(files, f"rank{rank:04d}.log").write_text(f"rank {rank}\n")
    big = f"logs/{NODE}/rank0000.log"
    agent = open_agent(files.folder, NODE)
    for _ in range(2):
        agent.ask(budget=PIECE_BYTES)
    assert len(agent.copy) == 64
    assert len(agent.copy[big]) < 2 * PIECE_BYTES
    peak = 0
    while len(agent.copy[big]) < 60 * MIB:
        agent.ask()
        peak = max(peak, psutil.Process(agent.popen.pid).memory_info().rss)
    assert peak < 64 * MIB


def test_log_that_was_begun_anew_replaces_the_old_one(files: NodeFiles, open_agent: OpenAgent) -> None:
    path = f"logs/{NODE}/rank0000.log"
    log(files, "rank0000.log").write_text("old, and long\n")
    agent = open_agent(files.folder, NODE, {path: bytearray(b"from another world, and longer\n")})
    wait_for(lambda: agent.ask() and agent.copy.get(path) == b"old, and long\n", "the old one")
    log(files, "new").write_text("new, and longer than the old one\n")
    log(files, "new").rename(log(files, "rank0000.log"))
    wait_for(lambda: agent.ask() and agent.copy[path] == b"new, and longer than the old one\n", "the new one")
    log(files, "rank0000.log").write_text("")
    wait_for(lambda: agent.ask() and agent.copy[path] == b"", "nothing")


def test_what_comes_after_the_end_is_sent_and_the_end_told_again(files: NodeFiles, open_agent: OpenAgent) -> None:
    end(files)
    agent = open_agent(files.folder, NODE)
    assert agent.wait("all")
    assert not agent.ask().get("all")
    log(files, "rank0000.log").write_text("late\n")
    assert agent.wait("all")
    assert agent.copy[f"logs/{NODE}/rank0000.log"] == b"late\n"


# --- files ------------------------------------------------------------------------------------------------------------


def test_replaced_files_arrive_whole_whatever_their_size(files: NodeFiles, open_agent: OpenAgent) -> None:
    agent, path = open_agent(files.folder, NODE), f"logs/{NODE}/rank0000.flight.json"
    contents = []
    for entries in ("x" * 3 * MIB, [], ["y" * 2 * MIB]):
        write_json(str(log(files, "rank0000.flight.json")), {"entries": entries})
        contents.append(log(files, "rank0000.flight.json").read_bytes())
        agent.ask(budget=MIB)  # of what was begun the rest is sent as it was
    wait_for(lambda: agent.ask() and (path, contents[-1]) in agent.whole, "the last one")
    assert agent.whole[0] == (path, contents[0])
    assert {data for _, data in agent.whole} <= set(contents)


def test_what_is_no_plain_file_is_not_read(files: NodeFiles, open_agent: OpenAgent, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    log(files, "link.log").symlink_to(tmp_path / "secret")
    log(files, "link.json").symlink_to(tmp_path / "secret")
    os.mkfifo(log(files, "pipe.log"))
    log(files, "folder.log").mkdir()
    log(files, "bad\x1bname.log").write_text("x")
    log(files, "torchrun").mkdir()
    log(files, "torchrun/stdout.log").write_text("x")
    end(files)
    agent = open_agent(files.folder, NODE)
    assert agent.wait("all")
    assert set(agent.copy) == {f"nodes/{NODE}/outcome.json"}


# --- what makes no sense ----------------------------------------------------------------------------------------------


def test_requests_that_make_no_sense_are_answered_and_places_that_make_none_end_the_agent(
    files: NodeFiles, open_agent: OpenAgent
) -> None:
    agent = open_agent(files.folder, NODE)
    for name, wish in (("start", {}), ("start", None), ("follow", None), ("stop", {}), ("sweep", {})):
        agent.told.clear()
        wait_for(
            lambda name=name, wish=wish: (
                agent.ask(**{name: wish}) and (name in agent.told.get("errors", {}) or "refused" in agent.told)
            ),
            "the error",
        )
    for _ in range(2):  # made, then renewed
        agent.ask(beat=True)
        assert Path(files.lease).stat().st_mtime > 0
        os.utime(files.lease, (0, 0))
    for place in ({"folder": "../x"}, {"node": "a/b"}, {"folder": None}):
        with pytest.raises(NoAnswerError, match="SpecError"):
            open_agent(files.folder, NODE).ask(**place)


def test_requests_for_a_folder_that_is_not_there_are_answered(tmp_path: Path, open_agent: OpenAgent) -> None:
    agent = open_agent(tmp_path / "nowhere", NODE)
    assert agent.phase() == "none"
    errors = agent.ask(stop={"cause": "x", "grace_s": 1}, beat=True)["errors"]
    assert errors.keys() == {"stop", "beat"}
    assert str(tmp_path / "nowhere") in errors["stop"]
