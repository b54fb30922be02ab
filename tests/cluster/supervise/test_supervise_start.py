"""How a supervisor begins, is refused, and begins again on what an earlier one left, with fake ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit import KIT
from testkit.machine_clock import at_most
from testkit.supervise_rig import Rig, is_gone
from testkit.waiting import wait_for

from cluster.agent.folder import NodeFiles, make_folder, stamp_of, take_lock, write_json
from cluster.agent.messages import parse_spec
from cluster.agent.start import RefusedError, node_lock_path, start, sweep
from cluster.agent.supervisor import Supervisor
from cluster.agent.survey import find_locks


def test_run_that_completes_leaves_a_truthful_outcome_and_a_lock_left_behind_is_no_obstacle(rig: Rig) -> None:
    Path(node_lock_path(rig.name())).write_text('{"run_id": "another", "pid": 1, "since": "long ago"}')
    pid = rig.start("ok", ranks=0)
    outcome = rig.outcome()
    deaths = outcome.pop("deaths")
    assert {death["exit_code"] for death in deaths} <= {0, None}  # None: torchrun reaped it first
    assert outcome.pop("memory")["evidence"] is None
    nothing = {"error": None, "leftover_pids": [], "stop_at_ns": None, "stop_cause": None}
    assert outcome == {"cause": "exit", "exit_code": 0, **nothing}
    status = rig.status()
    own = {name: status["supervisor"][name] for name in ("pid_start", "updated_at")}
    own |= {"run_id": rig.run_id, "host": socket.gethostname(), "pid": pid}
    assert status["supervisor"] == {**own, "phase": "ended", "ranks": {}, "deaths": deaths, "stop_cause": None}
    assert status["phase"] == "ended"
    assert rig.said() == ["rank 0 is there\n", "rank 1 is there\n"]
    wait_for(lambda: is_gone(pid), "the end of the supervisor")


def test_supervisor_is_nobodys_child_and_holds_no_terminal(rig: Rig) -> None:
    pid = rig.start()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert int(fields[3]) != os.getsid(0)
    streams = sorted((int(fd.name), str(fd.readlink())) for fd in Path(f"/proc/{pid}/fd").iterdir())
    outer = (os.devnull, rig.files().own_log)  # and no more of them
    assert [one for one in streams if one[1] in outer] == [(0, outer[0]), (1, outer[1]), (2, outer[1])]
    assert {path.stat().st_mode & 0o077 for path in Path(rig.files().log_dir).iterdir()} == {0}
    own = (rig.files().own_log, rig.files().lease, rig.files().lock, rig.files().spec)
    assert {Path(path).stat().st_mode & 0o777 for path in own} == {0o600}


def test_command_gets_environment_folder_marks_and_files_that_are_for_this_user_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rank = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    for name in of_rank:
        monkeypatch.setenv(name, "1")  # of whoever launches from within a rank
    code = "import os, json; print(json.dumps([os.getcwd(), dict(os.environ), os.getsid(0) == os.getpid()]))"
    files = [["config.yaml", "a: é\n"], ["env/alpha.env", "A=1\n"], ["plan.sh", "true\n"]]
    start(rig.spec(argv=[sys.executable, "-c", code], environment={"ASKED": "yes", "RANK": "5"}, files=files))
    rig.outcome()
    laid = rig.folder / "alpha" / "env" / "alpha.env"
    assert (rig.folder / "alpha" / "config.yaml").read_text() == "a: é\n"
    modes = [path.stat().st_mode & 0o777 for path in (laid, laid.parent, rig.folder / "alpha" / "plan.sh")]
    assert modes == [0o600, 0o700, 0o700]
    assert "A=1" not in Path(rig.files().spec).read_text()
    cwd, seen, has_session = json.loads(Path(rig.files().torchrun_log).read_text())
    assert (cwd, has_session) == (str(KIT), True)
    assert (seen["ASKED"], seen["RANK"], seen["PATH"]) == ("yes", "5", os.environ["PATH"])
    assert seen.keys() & set(of_rank) == {"RANK"}
    ours = {"ASKED", "RANK", "BURST_RUN_ID", "BURST_NODE", "BURST_RANK_LOGS"}
    assert seen.keys() - os.environ.keys() - {"LC_CTYPE"} <= ours  # which Python sets where nobody does
    assert (seen["BURST_RUN_ID"], seen["BURST_NODE"]) == (rig.run_id, rig.name())
    assert seen["BURST_RANK_LOGS"] == rig.files().log_dir


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("files", [[[path, ""]] for path in ("../outside", "/etc/outside", "a/./b", "x" * 1000)], "not a path below"),
        ("folder", ["relative", "/a/../b", "/a\0b"], "folder is no "),
        ("cwd", ["relative"], "cwd is no "),
        ("argv", [[], ["a\0b"]], "argv or environment cannot"),
        ("environment", [{"A=B": "c"}], "argv or environment cannot"),
        ("node", ["../x", 5], "node is no "),
        ("run_id", ["-rf"], "run_id is no "),
        ("lease_s", ["soon", True], "lease_s is no "),
        ("stop_grace_s", [float("nan"), -1], "stop_grace_s is no "),
        ("local_ranks", [-1], "a rank is below 0"),
        ("container", ["--privileged"], "container is no name"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    rig: Rig, name: str, values: list[object], told: str
) -> None:
    for value in values:
        refused = start({**rig.spec(), name: value})["refused"]
        assert (refused["kind"], told in refused["text"]) == ("command", True), refused
    assert not rig.folder.exists()


def test_what_a_spec_leaves_out_and_longer_than_a_day(rig: Rig) -> None:
    needed = {name: value for name, value in rig.spec().items() if name not in ("lease_s", "stop_grace_s")}
    assert parse_spec(needed)[10:] == ((), None, ("docker",), 60.0, 12.0, True, "")
    assert parse_spec({**needed, "lease_s": 1e6, "stop_grace_s": 0.5})[13:15] == (86400.0, 0.5)


def test_news_of_a_supervisor_are_written_at_once_and_only_they(rig: Rig, tmp_path: Path) -> None:
    made = Supervisor(parse_spec({**rig.spec(), "folder": str(tmp_path / "here")}))  # this process: none to be swept
    make_folder(made.files.state_dir)

    def is_written() -> bool:
        before = stamp_of(made.files.supervisor)
        made.tell()
        return stamp_of(made.files.supervisor) != before

    assert is_written()
    wait_for(lambda: not is_written(), "what is no news", pause_s=0.0)
    made.stop.ask("stop", "somebody", 0.0)
    assert is_written()


@pytest.mark.parametrize("argv", [["/nowhere/torchrun"], ["/etc/passwd"], [sys.executable]])
def test_command_that_cannot_start_gives_an_outcome_in_words(rig: Rig, argv: list[str]) -> None:
    spec = rig.spec(argv=argv, cwd="/nowhere" if argv == [sys.executable] else "/")
    pid = start(spec)["started"]
    assert rig.status()["supervisor"]["pid"] == pid  # from the moment on at which it is told
    outcome = rig.outcome()
    assert (outcome["cause"], outcome["exit_code"]) == ("start_failed", None)
    why = {"/nowhere/torchrun": "No such file or directory", "/etc/passwd": "Permission denied"}.get(argv[0])
    assert outcome["error"] == (
        f"cannot start {argv[0]}: {why}" if why else "the folder /nowhere to start in is not there"
    )


@pytest.mark.needs("root")
def test_folder_that_cannot_be_written_is_refused(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = start(rig.spec(folder=str(tmp_path / "file" / "run")))
    assert answer["refused"]["kind"] == "folder"
    assert str(tmp_path / "file") in answer["refused"]["text"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 1, 1)
    refused = {"kind": "folder", "text": f"cannot use {theirs}: it belongs to another user"}
    assert start(rig.spec(folder=str(theirs))) == {"refused": refused}


# --- who holds the node -----------------------------------------------------------------------------------------------


def test_busy_node_is_refused_with_its_holder_and_the_same_run_is_not_started_twice(rig: Rig, tmp_path: Path) -> None:
    pid = rig.start()
    other = Rig(tmp_path)
    refused = start(other.spec() | {"node": rig.name()})["refused"]
    assert refused["kind"] == "busy"
    assert f"run {rig.run_id} holds this node (pid {pid}, since 20" in refused["text"]
    assert not other.folder.exists()
    assert start(other.spec() | {"node": rig.name(), "exclusive": False})["started"]
    assert sweep(str(other.folder / "alpha"), rig.name(), other.run_id) == []
    for exclusive in (True, False):
        assert start(rig.spec(exclusive=exclusive))["refused"]["kind"] == "exists"


def test_a_node_whose_holder_says_nothing_is_busy_unless_this_request_has_begun_before(rig: Rig) -> None:
    name = rig.name("silent")
    silent = take_lock(node_lock_path(name))
    assert silent is not None
    text = "run unknown holds this node (pid unknown, since unknown); wait for its end or cancel it"
    asked = {**rig.spec(), "node": name}
    assert start(asked) == {"refused": {"kind": "busy", "text": text}}
    files = NodeFiles(str(rig.folder / "alpha"), name)
    make_folder(files.state_dir)
    for found in ({"pid": 5}, {}):
        for path, document in ((files.spec, {"start_id": ""}), (files.supervisor, found)):
            write_json(path, document)
        with at_most(4.0):
            answer = start(asked, again=True)
        assert answer == {"started": 5} if found else "pid" in answer["refused"]["text"]
    said = answer["refused"]["text"].removeprefix("the supervisor did not start: ")
    assert (len(said), said.endswith("KeyError: 'pid'")) == (500, True)  # the end of its words
    silent.release()


def test_supervisor_that_has_written_its_outcome_is_about_to_go_and_waited_for(rig: Rig) -> None:
    make_folder(rig.files().state_dir)
    write_json(rig.files().outcome, {})
    lock = take_lock(rig.files().lock)
    assert lock is not None
    threading.Timer(1.0, lock.release).start()
    rig.start("ok", ranks=0, exclusive=False)
    assert rig.outcome()["exit_code"] == 0
    assert (rig.folder / "alpha/attempts/1/nodes" / rig.name() / "outcome.json").read_text() == "{}\n"


@pytest.mark.parametrize("node_rank", [0, 1])
def test_next_attempt_starts_in_a_clean_place_and_the_earlier_one_is_kept(rig: Rig, node_rank: int) -> None:
    folder, own = rig.folder / "alpha", ["metrics.jsonl", "events.jsonl", "summary.json"]
    records = [place + name for place in ("", "attempts/1/", "attempts/2/") for name in own]
    for attempt in (1, 2, 3):
        spec = rig.spec("exits", node_rank=node_rank, num_nodes=2, start_id=str(attempt))
        pid = start(spec, again=True)["started"]
        for name in own:
            (folder / name).write_text(f"{attempt}\n")
        Path(rig.files().log_dir, "rank0001.error.json").write_text("{}")
        assert rig.outcome()["exit_code"] == 1
        wait_for(lambda pid=pid: is_gone(pid), "the end of the supervisor")
    kept = {name: (folder / name).read_text() for name in records if (folder / name).exists()}
    assert kept == dict(zip(records, (["3\n"] * 3 + ["1\n"] * 3 + ["2\n"] * 3)[: 3 if node_rank else 9], strict=False))
    aside = {path.name for path in (folder / "attempts/1").iterdir()}
    assert aside == {"nodes", "rank0001.error.json", *(() if node_rank else own)}
    assert not (folder / "attempts/1/nodes" / rig.name() / "supervisor.lock").exists()
    assert json.loads((folder / f"attempts/2/nodes/{rig.name()}/outcome.json").read_text())["exit_code"] == 1
    assert rig.said()[1] == "rank 1 is there\n"


def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    rigs = [Rig(tmp_path) for _ in range(4)]
    node = rigs[0].name()
    answers: list[dict[str, Any]] = []
    specs = [rig.spec() | {"node": node} for rig in rigs for _ in range(2)]
    threads = [threading.Thread(target=lambda spec=spec: answers.append(start(spec))) for spec in specs]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(name for answer in answers for name in answer) == ["refused"] * 7 + ["started"]
        assert {answer["refused"]["kind"] for answer in answers if "refused" in answer} <= {"busy", "exists"}
    finally:
        for rig in rigs:
            assert sweep(str(rig.folder / "alpha"), node, rig.run_id) == []


@contextlib.contextmanager
def run_of_another_user(node: str, *, owner: int = 1) -> Iterator[None]:
    """A lock on `node` in the folder of user 1 (daemon), held by a process; owner: of the file."""
    folder = Path("/tmp/burst-1")
    folder.mkdir(mode=0o755, exist_ok=True)
    os.chown(folder, 1, 1)
    path = folder / f"{node}.lock"
    path.write_text('{"run_id": "20260101-000000-abcdef", "pid": 7, "since": "now"}')
    os.chown(path, owner, owner)
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    finally:
        path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


@pytest.mark.needs("root")
def test_node_that_a_run_of_another_user_holds_is_refused(rig: Rig) -> None:
    with run_of_another_user(rig.name()):
        refused = start(rig.spec())["refused"]
    assert refused["kind"] == "busy"
    assert "run 20260101-000000-abcdef of daemon holds this node" in refused["text"]


@pytest.mark.needs("root")
def test_run_of_another_user_is_seen_before_a_launch(rig: Rig) -> None:
    with run_of_another_user(rig.name()):
        assert find_locks()[rig.name()] == "20260101-000000-abcdef of daemon"
    assert rig.name() not in find_locks()


@pytest.mark.needs("root")
def test_lock_that_somebody_put_into_the_folder_of_another_user_is_not_believed(rig: Rig) -> None:
    with run_of_another_user(rig.name(), owner=2):
        assert rig.name() not in find_locks()


def test_other_users_can_read_who_holds_a_node(rig: Rig) -> None:
    rig.start()
    path = Path(node_lock_path(rig.name()))
    assert [path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777] == [0o644, 0o755]


@pytest.mark.needs("root")
def test_lock_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"burst-{os.geteuid()}"
    for _ in range(2):  # as it is made, and as it is found
        assert node_lock_path("a/b", str(tmp_path)) == f"{folder}/a_b.lock"
        assert folder.stat().st_mode & 0o777 == 0o755
        folder.chmod(0o777)
    os.chown(folder, 1, 1)
    with pytest.raises(RefusedError, match="not a folder of this user"):
        node_lock_path("alpha", str(tmp_path))
    folder.rmdir()
    folder.symlink_to("/etc")
    with pytest.raises(RefusedError, match="not a folder of this user"):
        node_lock_path("alpha", str(tmp_path))
