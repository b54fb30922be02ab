"""The agent of a node: what a launcher sees of the node, and what it may ask for."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.connections import LocalConnection
from testkit.process_table import open_below
from testkit.supervise_rig import Rig, is_gone
from testkit.waiting import wait_for

from cluster.agent.folder import NodeFiles, read_json, write_json
from cluster.agent.serve import CHUNK_BYTES, Agent, NodeTail
from cluster.code import NoAnswerError, NodeProgram
from cluster.control.ssh_link import NodeCopy

NODE = "alpha"
LOG = f"logs/{NODE}/rank0000.log"
MIB = 1 << 20


class Client:
    """A process of this machine that is an agent. told: the newest of all that it said; `copy` gets files."""

    def __init__(self, folder: Path | str, node: str, copy: NodeCopy | None = None) -> None:
        self.told: dict[str, Any] = {}
        self._copy, self._connection = copy, LocalConnection(NODE)
        self._program = NodeProgram(self._connection)
        self._asked = {"folder": str(folder), "node": node, "budget": MIB, "wait_s": 0.2}

    def ask(self, **wish: Any) -> dict[str, Any]:
        answer, data = self._program.ask({**self._asked, **wish}, silence_s=60.0)
        self.told.update(answer)
        assert self._copy is None or self._copy.take(answer.get("files", []), data)
        return answer

    def wait(self, name: str, **wish: Any) -> Any:
        """What an answer holds under `name`, once one does."""
        return wait_for(lambda: self.ask(**wish).get(name), name)

    def kill(self) -> None:
        self._connection.processes[0].end()


OpenAgent = Callable[..., Client]


@pytest.fixture
def open_agent() -> Iterator[OpenAgent]:
    opened: list[Client] = []

    def make(*args: Any) -> Client:
        opened.append(Client(*args))
        return opened[-1]

    yield make
    for one in opened:
        one.kill()


# --- one run ----------------------------------------------------------------------------------------------------------


def test_a_run_is_started_once_followed_stopped_and_outlives_its_agent(
    rig: Rig, open_agent: OpenAgent, here: Path
) -> None:
    folder, spec = rig.folder / NODE, {**rig.spec("polite"), "start_id": "one"}
    first = open_agent(folder, rig.name())
    pid = first.wait("started", start=spec)
    first.kill()
    second = open_agent(folder, rig.name(), NodeCopy(here, rig.name(), lead=True))
    assert second.wait("refused", start={**spec, "start_id": "another"})["kind"] == "exists"
    assert second.wait("started", start=spec, again=True) == pid  # its answer might have been lost
    (folder / "run.json").write_text("{}")
    second.ask(follow={"lead": True, "offsets": {}})
    wait_for(lambda: second.ask() and len(second.told["status"]["supervisor"].get("ranks", {})) == 2, "the ranks")
    wait_for(lambda: len(list(folder.glob("logs/*/rank*.log"))) == 2, "their logs")
    write_json(rig.files().stacks_done, {"nonce": "of nobody"})
    second.ask(stop={"cause": "Ctrl-C", "grace_s": 5.0})
    assert second.wait("all")
    assert second.told["status"]["outcome"]["stop_cause"] == "Ctrl-C"
    assert json.loads((here / f"nodes/{rig.name()}/outcome.json").read_text()) == rig.outcome()
    copied = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file() and ".before-" not in path.name}
    state = {"supervisor.json", "health.json", "stacks_done.json", "outcome.json", "supervisor.log"}
    logs = {"torchrun.log", "rank0000.log", "rank0001.log"}
    own = {f"nodes/{rig.name()}/{name}" for name in state} | {f"logs/{rig.name()}/{name}" for name in logs}
    assert copied == own | {f"nodes/{rig.name()}/run.json"}  # the launcher has one of its own
    assert all((folder / path).read_bytes() == (here / path).read_bytes() for path in own)
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
    wait_for(lambda: agent.ask() and agent.told["status"]["phase"] == "ended", "the outcome")
    assert agent.told["status"]["outcome"]["stop_cause"] == "sweep"
    assert " stopping (stop: sweep), grace 0 s\n" in Path(rig.files().own_log).read_text()


def test_requests_that_make_no_sense_are_answered_and_places_that_make_none_end_the_agent(
    tmp_path: Path, open_agent: OpenAgent
) -> None:
    agent = open_agent(tmp_path / "nowhere", NODE)
    agent.ask()
    assert agent.told["status"]["phase"] == "none"
    errors = agent.ask(stop={"cause": "x", "grace_s": 1}, beat=True)["errors"]  # there is no such folder
    assert (errors.keys(), str(tmp_path / "nowhere") in errors["stop"]) == ({"stop", "beat"}, True)
    for name, wish in (("start", {}), ("start", None), ("follow", None), ("stop", {}), ("sweep", {})):
        agent.told.clear()
        wait_for(
            lambda name=name, wish=wish: (
                agent.ask(**{name: wish}) and (name in agent.told.get("errors", {}) or "refused" in agent.told)
            ),
            "the error",
        )
    for place in ({"folder": "../x"}, {"node": "a/b"}, {"folder": None}):
        with pytest.raises(NoAnswerError, match="SpecError"):
            open_agent(tmp_path, NODE).ask(**place)


# --- files, of a node on which nothing runs ---------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where a launcher copies to."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    made = NodeFiles(str(tmp_path / "run"), NODE)
    Path(made.log_dir).mkdir(parents=True)
    Path(made.state_dir).mkdir(parents=True)
    return made


def log(files: NodeFiles, name: str = "rank0000.log") -> Path:
    return Path(files.log_dir, name)


@pytest.mark.parametrize("lead", [True, False])
def test_files_of_a_node_are_sent_those_first_that_all_need_and_logs_where_they_grow(
    files: NodeFiles, lead: bool
) -> None:
    states = [f"nodes/{NODE}/{name}.json" for name in ("supervisor", "health", "stacks_done", "outcome")]
    leads = [f"{name}.json" for name in ("run", "summary", "tokenizer")] + ["metrics.jsonl", "events.jsonl"]
    logs = [f"nodes/{NODE}/supervisor.log", *(f"logs/{NODE}/r.{suffix}" for suffix in ("json", "log", "stacks"))]
    others = [f"nodes/{NODE}/spec.json", f"logs/{NODE}/notes.txt", "config.yaml"]
    for path in (*states, *leads, *logs, *others, "tensorboard/events", "profile/trace.json"):
        Path(files.folder, path).parent.mkdir(exist_ok=True)
        Path(files.folder, path).write_text("x\n")
    paths = [*states, *leads * lead, *logs, *["tensorboard/events"] * lead, "profile/trace.json"]
    grows = {*leads[3:], *logs, "tensorboard/events"} - {logs[1]}
    heads = [{"path": path, "offset": 0, "bytes": 2} | ({} if path in grows else {"size": 2}) for path in paths]
    tail = NodeTail(files.folder, NODE, lead, {})
    assert tail.take(0) == ([], b"")
    assert tail.take(1) == ([{**heads[0], "bytes": 1}], b"x")
    told, data = tail.take(MIB)
    first = {**heads[0], "offset": 1, "bytes": 1}
    assert (sorted(map(str, told)), data) == (sorted(map(str, [*heads[1:], first])), b"x\n" * len(heads[1:]) + b"\n")
    assert (tail.take(MIB), open_below(Path(files.folder))) == (([], b""), [])


def test_what_is_asked_for_becomes_files_and_is_done_once(files: NodeFiles) -> None:
    agent, asked = Agent(), {"folder": files.folder, "node": NODE, "wait_s": 0.0}
    log(files).write_text("text\n")
    before = time.time_ns()
    wishes = {"stop": {"cause": "why", "grace_s": 1.5}, "stacks": "nonce", "beat": 1}
    answer, data = agent.answer({**asked, **wishes, "follow": {"lead": False, "offsets": {}}})
    assert before <= answer.pop("got_ns") <= answer.pop("now_ns") <= time.time_ns()
    nothing = {"phase": "none", "supervisor": {}, "outcome": None, "health": None}
    assert (answer, data) == ({"status": nothing}, b"")  # without a budget no files
    assert [read_json(path) for path in (files.stop, files.stacks)] == [wishes["stop"], {"nonce": "nonce"}]
    assert Path(files.lease).exists()
    with_files = {**asked, "budget": MIB}
    told, data = agent.answer(with_files)
    assert (told.keys() - {"got_ns", "now_ns"}, data) == ({"files"}, b"text\n")
    assert "all" not in agent.answer(with_files)[0]  # it may yet begin
    write_json(files.supervisor, {"host": socket.gethostname(), "pid": 2**30})
    assert "all" not in agent.answer(with_files)[0]  # the file itself comes first
    assert agent.answer(with_files)[0]["all"] is True  # nothing will follow from who is lost
    for nonce, run_id, name in (("a", "no run", "swept"), ("b", 5, "errors")):
        write_json(files.spec, {"run_id": run_id})
        told = [agent.answer({**asked, "sweep": nonce, "wait_s": wait_s})[0] for wait_s in (60.0, 0.5)]
        assert [answer.keys() - {"got_ns", "now_ns"} for answer in told] == [{name}, set()]


def test_a_long_log_holds_up_no_other(files: NodeFiles) -> None:
    with log(files).open("wb") as file:
        file.truncate(60 * MIB)
    for rank in range(1, 64):
        log(files, f"rank{rank:04d}.log").write_text(f"rank {rank}\n" if rank > 1 else "")  # an empty one is told, too
    for budgets in ([CHUNK_BYTES] * 2, [2 * CHUNK_BYTES]):
        tail = NodeTail(files.folder, NODE, False, {})
        heads = [head for budget in budgets for head in tail.take(budget)[0]]
        assert len({head["path"] for head in heads}) == 64
        assert sum(head["bytes"] for head in heads if head["path"] == LOG) < 2 * CHUNK_BYTES
        assert sum(head["bytes"] for head in heads) == 2 * CHUNK_BYTES
    assert len(tail.take(MIB)[0]) == 16


def test_a_log_that_was_begun_anew_replaces_the_old_one(files: NodeFiles, here: Path) -> None:
    copy = NodeCopy(here, NODE, lead=False)
    copy.take([{"path": LOG, "offset": 0, "bytes": 31}], b"from another world, and longer\n")
    tail = NodeTail(files.folder, NODE, False, copy.offsets())
    for text in ("old, and long\n", "new, and longer than the old one\n", ""):
        log(files, "new").write_text(text)  # which is no name of a log
        log(files, "new").rename(log(files))
        copy.take(*tail.take(MIB))
        assert (here / LOG).read_text() == text
    assert open_below(Path(files.folder)) == []


def test_what_comes_after_the_end_is_sent_and_the_end_told_again(files: NodeFiles) -> None:
    agent, asked = Agent(), {"folder": files.folder, "node": NODE, "budget": MIB, "wait_s": 0.0}
    agent.answer({**asked, "follow": {"lead": False, "offsets": {}}})
    threading.Timer(0.3, write_json, (files.outcome, {"exit_code": 0, "cause": "exit"})).start()
    assert agent.answer({**asked, "wait_s": 100.0})[0]["status"]["phase"] == "ended"  # it waits for news, not longer
    for text in ("", "late\n"):
        if text:
            log(files).write_text(text)
            assert agent.answer(asked)[1] == text.encode()
        assert [agent.answer(asked)[0].get("all") for _ in range(2)] == [True, None]


def test_replaced_files_arrive_whole_whatever_their_size(files: NodeFiles, here: Path) -> None:
    path, contents = log(files, "rank0000.flight.json"), list[bytes]()
    copy, tail = NodeCopy(here, NODE, lead=False), NodeTail(files.folder, NODE, False, {})
    for entries in ("x" * 3 * MIB, [], ["y" * 2 * MIB]):
        write_json(str(path), {"entries": entries})
        contents.append(path.read_bytes())
        copy.take(*tail.take(MIB))  # of what was begun the rest is sent as it was
        with path.open("ab") as file:
            file.write(b"more than there was" * (len(contents) == 1))
    copied, seen = here / "logs" / NODE / path.name, list[bytes]()
    while contents[-1] not in seen:
        copy.take(*tail.take(MIB))
        seen += [copied.read_bytes()] if copied.exists() else []
    assert seen[0] == contents[0]
    assert set(seen) <= set(contents)
    copy.take(*tail.take(MIB))  # nothing is new
    assert open_below(Path(files.folder)) == []


def test_what_is_no_plain_file_is_not_read(files: NodeFiles, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    log(files, "link.log").symlink_to(tmp_path / "secret")
    log(files, "link.json").symlink_to(tmp_path / "secret")
    os.mkfifo(log(files, "pipe.log"))
    log(files, "folder.log").mkdir()
    log(files, "bad\x1bname.log").write_text("x")
    log(files, "torchrun").mkdir()
    log(files, "torchrun/stdout.log").write_text("x")
    assert NodeTail(files.folder, NODE, False, {}).take(MIB) == ([], b"")
    assert open_below(tmp_path) == []
