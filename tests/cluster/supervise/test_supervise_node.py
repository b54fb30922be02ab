"""The parts of a supervisor one by one: processes, locks, health, the foreground, and what old Pythons accept."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit import write_program
from testkit.machine_clock import at_most
from testkit.process_table import open_below
from testkit.supervise_rig import PYTHON_PATH, UNHURRIED, Rig, is_gone, kill, new_run_id
from testkit.waiting import wait_for

from cluster.agent import processes
from cluster.agent.folder import (
    NodeFiles,
    holder,
    make_folder,
    read_json,
    read_status,
    rotate_logs,
    stamp_of,
    take_lock,
    write_json,
    write_text,
)
from cluster.agent.health import THROTTLES, Health, parse_gpus, read_gpus, read_health
from cluster.agent.messages import safe_name
from cluster.agent.processes import Family, Helpers, ProcessLabels, Rank
from cluster.code import node_code
from engine.runs.folder import RunFolder
from engine.runs.process import usable_bytes

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


# --- what travels -----------------------------------------------------------------------------------------------------


def is_newer(node: ast.AST) -> bool:
    """Whether this is `... | None`, which parses as 3.9 and fails there."""
    is_union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
    return is_union and isinstance(node.right, ast.Constant) and node.right.value is None


def test_what_runs_on_nodes_is_python_3_9_with_nothing_but_the_standard_library() -> None:
    with zipfile.ZipFile(io.BytesIO(node_code()[10:])) as code:
        modules = {name.removesuffix(".py").replace("/", "."): code.read(name).decode() for name in code.namelist()}
    imported = set()
    for name, source in modules.items():
        tree = ast.parse(source, name, feature_version=(3, 9))
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {row.name for node in ast.walk(tree) if isinstance(node, ast.Import) for row in node.names}
        is_lazy = "from __future__ import annotations" in source
        newer = [node for node in ast.walk(tree) if isinstance(node, ast.Match) or (is_newer(node) and not is_lazy)]
        assert not [ast.unparse(node) for node in newer]
    ours = {str(name) for name in imported if str(name).partition(".")[0] not in sys.stdlib_module_names}
    assert ours
    assert ours <= set(modules)


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def marked(
    marks: ProcessLabels, ranks: Iterable[Any], command: list[str] = SLEEP, **options: Any
) -> Iterator[list[Any]]:
    """Processes that look like these ranks of a run."""
    environment = {**os.environ, "BURST_RUN_ID": marks.run_id, "BURST_NODE": marks.node}
    made = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **options) for rank in ranks]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()


def seen(family: Family, members: int) -> bool:
    family.refresh(full=True)
    return len(family.members()) == members


@pytest.mark.needs("root")
def test_both_marks_must_match_and_another_user_cannot_pass_as_a_rank() -> None:
    marks = ProcessLabels(new_run_id(), "alpha")
    with marked(marks, (0, 1, "x")) as (_, rank, _), marked(marks, "1", ["sleep", "100"], user=65534) as (stranger,):
        family = Family(marks, range(1, 2), any_owner=False)
        wait_for(lambda: seen(family, 3), "the processes")
        assert [(one.rank, one.pid) for one in family.living_ranks()] == [(1, rank.pid)]
        open_family = Family(marks, range(2))
        wait_for(lambda: seen(open_family, 4), "the one of another user")
        assert stranger.pid in open_family.members()
        assert seen(Family(marks, range(2), lambda: {rank.pid, stranger.pid}), 2)  # these are its own
        for other in (ProcessLabels(new_run_id(), "alpha"), ProcessLabels(marks.run_id, "beta")):
            assert seen(Family(other, range(2)), 0)
        processes.send_signal(rank.pid, "1", signal.SIGKILL)  # a process that got the number later
        time.sleep(0.1)
        assert rank.poll() is None
        processes.send_signal(rank.pid, processes.process_start(rank.pid) or "", signal.SIGKILL)
        assert rank.wait(200) == -signal.SIGKILL


def test_workers_of_a_rank_are_no_ranks_even_when_they_outlive_it() -> None:
    code = f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(100)"
    family = Family(ProcessLabels(new_run_id(), "alpha"), range(1))
    with marked(family.marks, "0", [sys.executable, "-c", code]) as (rank,):
        wait_for(lambda: seen(family, 2), "the worker")
        assert family.ranks[0].pid == rank.pid
        threading.Timer(0.1, rank.kill).start()
        family.wait(100.0)  # until it ends, and not longer
        assert is_gone(rank.pid)
        wait_for(lambda: seen(family, 1), "the end of the rank")
        begin = time.monotonic()
        family.wait(0.2)  # it is watched no more
        assert time.monotonic() - begin > 0.15
        assert (family.living_ranks(), [death.pid for death in family.deaths]) == ([], [rank.pid])
        assert family.kill_all(signal.SIGKILL, 5.0) == []


def test_a_rank_is_known_soon_after_it_has_its_environment() -> None:
    family = Family(ProcessLabels(new_run_id(), "alpha"), range(1))
    words = [f"BURST_RUN_ID={family.marks.run_id}", "BURST_NODE=alpha", "RANK=0", "sleep", "100"]
    before = ["sh", "-c", 'read line; exec env "$@"', "sh", *words]
    with marked(ProcessLabels("another", "beta"), "0", before, stdin=subprocess.PIPE) as (child,):
        family.refresh()
        assert family.members() == []
        child.stdin.close()
        with at_most(8):
            wait_for(lambda: family.refresh() or family.living_ranks(), "the rank")


def test_the_command_is_watched_until_it_is_forgotten_and_nothing_is_left_open() -> None:
    family, other = (Family(ProcessLabels(new_run_id(), "alpha")) for _ in range(2))

    def watched() -> int:
        return sum("pidfd" in os.path.realpath(opened) for opened in Path("/proc/self/fd").iterdir())

    before = watched()
    with marked(ProcessLabels("another", "beta"), "0") as (command,):
        family.watch_child(command.pid)
        family.refresh()
        assert command.pid in family.members()
        threading.Timer(0.1, command.kill).start()
        family.wait(100.0)
        assert is_gone(command.pid)
        other.watch_child(command.pid)
        other.refresh()
        assert command.pid not in other.members()  # it waits for its parent alone
        family.remove_child()
        begin = time.monotonic()
        with at_most(0.9):
            family.wait(0.2)
        assert (family.child, time.monotonic() - begin > 0.15) == (0, True)
    assert watched() == before


def test_of_ranks_that_ended_between_two_looks_the_one_that_was_not_told_to_comes_first() -> None:
    code = "import os, sys; sys.stdin.read(); sys.exit((0, 0, 130, 143, 0, 7)[int(os.environ['RANK'])])"
    family = Family(ProcessLabels(new_run_id(), "alpha"), range(6))
    with marked(family.marks, range(6), [sys.executable, "-c", code], stdin=subprocess.PIPE) as ranks:
        wait_for(lambda: seen(family, 6) and len(family.ranks) == 6, "the ranks")
        kill(ranks[4].pid, signal.SIGTERM)
        for rank in ranks:
            rank.stdin.close()
        wait_for(lambda: all(is_gone(rank.pid) for rank in ranks), "their end")
        ranks[0].wait()  # so that nobody knows how it ended
        family.refresh()
        assert not Path(f"/proc/{ranks[1].pid}").exists()  # what is this process' own is buried
    deaths = [(death.rank, death.exit_code) for death in family.deaths]
    assert deaths[:2] == [(5, 7), (0, None)]
    assert sorted(deaths[2:]) == [(1, 0), (2, 130), (3, 143), (4, -signal.SIGTERM)]


def test_a_helper_has_a_session_of_its_own_and_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    helpers, code = Helpers(), "import os; print(os.getsid(0) == os.getpid(), os.environ['LC_ALL'])"
    assert helpers.run([sys.executable, "-c", code], 60.0).stdout == b"True C\n"
    one = threading.Thread(
        target=helpers.run, args=(["sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"], 60)
    )
    one.start()
    wait_for(lambda: len(helpers.pids()) == 1, "the helper")
    (tmp_path / "go").touch()
    one.join()
    with pytest.raises(subprocess.TimeoutExpired):
        helpers.run(["sleep", "100"], 0.1)
    assert helpers.pids() == set()


# --- files and locks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["node-1", "a/b", "..", ".hidden", "ü", "", "a b:c", "_a"])
def test_node_has_the_folder_that_ranks_use(name: str, tmp_path: Path) -> None:
    own = RunFolder(tmp_path).log_dir(name).name
    assert safe_name(name) == own
    state = ("spec.json", "supervisor.json", "lease", "stop.json", "stacks.json", "stacks_done.json", "health.json")
    state += ("outcome.json", "supervisor.log", "supervisor.lock")
    paths = [*(f"nodes/{own}/{file}" for file in state), f"logs/{own}/torchrun.log", f"logs/{own}/flight.request"]
    assert list(vars(NodeFiles("/run", name)).values())[5:] == [f"/run/{path}" for path in paths]


def test_lock_dies_with_its_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    Path(path).write_text("x" * 500)  # somebody had more to say
    code = (
        "import sys, time; from cluster.agent.folder import take_lock\n"
        "lock = take_lock(sys.argv[1]); lock.say('run', 5); print('held', flush=True); time.sleep(100)"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        begin = time.thread_time()
        assert take_lock(path, 0.5, is_vital=True) is None
        assert time.thread_time() - begin < 0.1  # it waits at rest
        said = holder(path)
        assert said == {"run_id": "run", "pid": "5", "host": socket.gethostname(), "since": said["since"]}
        child.kill()
    for _ in range(2):
        lock = take_lock(path, 0.0)
        assert lock is not None
        mode = Path(path).stat().st_mode & 0o777
        lock.release()
        assert not Path(path).exists()
    assert (mode, open_below(tmp_path)) == (0o600, [])
    Path(path).symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        take_lock(path, 0.0)


def test_what_shall_outlive_a_crash_is_brought_to_the_disk_and_nothing_else(tmp_path: Path) -> None:
    """Of a pipe the kernel says that it cannot be."""
    part = tmp_path / f".pipe.{os.getpid()}-{threading.get_ident()}"
    for write, content in ((write_text, "{}"), (write_json, {})):
        for options in ({}, {"sync": True}):
            os.mkfifo(part)
            reader = os.open(part, os.O_RDWR)
            with pytest.raises(OSError, match="Invalid argument") if options else contextlib.nullcontext():
                write(str(tmp_path / "pipe"), content, **options)  # type: ignore[operator]
            os.close(reader)


def test_writes_leave_the_old_file_and_nothing_else_when_they_fail(tmp_path: Path) -> None:
    path, folder = tmp_path / "state.json", tmp_path / "folder"
    write_text(str(path), "\udcff")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"\xff", 0o600)
    (tmp_path / f".{path.name}.{os.getpid()}-{threading.get_ident()}").write_text("x" * 100)  # of one that was killed
    write_json(str(path), {"a": 1})
    (folder / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        write_text(str(folder), "x")
    assert read_json(str(path)) == {"a": 1}
    assert sorted(tmp_path.iterdir()) == [folder, path]
    stamp = stamp_of(str(path))
    os.utime(path, (1, 1))
    assert stamp not in (None, stamp_of(str(path)))
    assert (stamp_of(str(folder)), open_below(tmp_path)) == (None, [])
    longest = "{}".ljust(4 << 20)
    for text in ("", "[]", "{", "\xff", "[" * 100000, '{"a": 1} x', longest + " "):  # what is damaged counts as none
        path.write_text(text)
        assert read_json(str(path)) is None
    path.write_text(longest)
    assert read_json(str(path)) == {}


ME = {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": processes.process_start(os.getpid())}


@pytest.mark.parametrize(
    ("supervisor", "phase"),
    [
        (None, "none"),
        ({}, "lost"),
        ({**ME, "phase": "starting"}, "starting"),
        ({**ME, "phase": "ended"}, "stopping"),  # its outcome is to come
        ({**ME, "phase": "odd"}, "running"),
        ({**ME, "pid_start": "1", "phase": "running"}, "lost"),
        ({**ME, "pid": str(os.getpid()), "phase": "running"}, "lost"),
        ({"host": ME["host"], "pid": 2**30, "phase": "running"}, "lost"),  # nobody's, and of no known start
        ({**ME, "host": "elsewhere", "pid": 2**30, "phase": "stopping"}, "stopping"),  # which cannot be seen from here
    ],
)
def test_phase_of_a_node_is_that_of_its_process_if_it_can_be_seen(
    tmp_path: Path, supervisor: dict[str, Any] | None, phase: str
) -> None:
    files = NodeFiles(str(tmp_path), "alpha")
    make_folder(files.state_dir)
    if supervisor is not None:
        write_json(files.supervisor, supervisor)
    told = {"supervisor": supervisor or {}, "outcome": None, "health": None}
    assert read_status(str(tmp_path), "alpha") == {"phase": phase, **told}
    write_json(files.outcome, {"cause": "exit"})
    assert read_status(str(tmp_path), "alpha") == {"phase": "ended", **told, "outcome": {"cause": "exit"}}


# --- health -----------------------------------------------------------------------------------------------------------


def test_every_few_seconds_gpus_are_looked_at_and_a_log_with_too_many_bytes_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    write_program(tmp_path / "bin" / "nvidia-smi", f"echo >>{asked}; echo 0, 1, 2, 3, 4, 0x0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    files = NodeFiles(str(tmp_path), "n1")
    logs = Path(files.log_dir)
    for folder in (files.state_dir, files.log_dir):
        make_folder(folder)
    log, aside = logs / "rank0000.log", logs / "rank0000.log.before-1"
    (logs / "rank0000.stacks").write_bytes(b"longer than six")
    (logs / "rank0001.log").symlink_to(logs / "rank0000.stacks")
    with log.open("ab", buffering=0) as rank:
        rank.write(b"first\n")
        rotate_logs(files.log_dir, 6)
        assert not aside.exists()
        rank.write(b"second\n")
        health, begin = Health(files, Helpers(), log_bytes=6), time.monotonic()
        health.start()
        wait_for(lambda: aside.exists() and not log.stat().st_size, lambda: str(list(logs.iterdir())))
        wait_for(lambda: (read_json(files.health) or {}).get("gpus"), "the second look, which has what was asked first")
        elapsed_s = time.monotonic() - begin
        health.close()
        rank.write(b"third\n")
    assert elapsed_s > 4.5
    assert len(asked.read_text()) <= 2 + elapsed_s / 5

    assert (aside.read_bytes(), log.read_bytes()) == (b"first\nsecond\n", b"third\n")
    assert aside.stat().st_mode & 0o777 == 0o600
    assert (logs / "rank0000.stacks").read_bytes() == b"longer than six"
    assert len(list(logs.iterdir())) == 4


def test_without_room_for_a_copy_a_log_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"text")
    (tmp_path / "a.log.before-1").mkdir()
    with pytest.raises(OSError, match="before-1"):
        rotate_logs(str(tmp_path), 1)

    assert (tmp_path / "a.log").read_bytes() == b"text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.before-1"]
    (tmp_path / "a.log.before-1").rmdir()
    (tmp_path / "a.log.part").write_text("of one that was killed, and longer")
    rotate_logs(str(tmp_path), 1)
    assert (tmp_path / "a.log.before-1").read_bytes() == b"text"


def test_health_says_gone_for_a_rank_whose_number_is_anothers_now(tmp_path: Path) -> None:
    me, comm = os.getpid(), Path("/proc/self/comm")
    name = comm.read_bytes().rstrip()
    comm.write_bytes(b"a) \xff (b")
    entry = processes.read_entry(me)
    comm.write_bytes(name)
    assert entry is not None
    assert (entry.parent, entry.lives, processes.inner_pids(2**30)) == (os.getppid(), True, [2**30])
    assert abs(entry.age_s - (time.time() - psutil.Process().create_time())) < 5
    ranks = [Rank(0, me, processes.process_start(me) or ""), Rank(1, me, "earlier")]
    used_s, load = sum(os.times()[:2]), os.getloadavg()[0]
    assert read_health(str(tmp_path), [], None)["disk_free_bytes"] > 0
    health = read_health(str(tmp_path / "nowhere"), ranks, None)
    first, second = (health["ranks"][rank] for rank in ("0", "1"))
    assert used_s - 0.05 < first["cpu_s"] < sum(os.times()[:2]) + 0.05
    assert (first["pid"], first["state"], first.keys()) == (me, "R", second.keys())
    assert second == {"pid": me, "state": "gone", "rss_bytes": None, "cpu_s": None}
    assert 0 < health["memory_used_bytes"] < health["memory_limit_bytes"]
    assert first["rss_bytes"] > 2**20
    assert health.pop("load1") in {round(load, 2), round(os.getloadavg()[0], 2)}
    assert health == {
        **{name: health[name] for name in ("at", "memory_used_bytes", "ranks")},
        **{"cores": len(os.sched_getaffinity(0)), "memory_limit_bytes": usable_bytes()},
        **{"disk_free_bytes": None, "gpus": None},
    }


def test_gpus_are_read_what_is_no_number_is_null_and_what_is_normal_does_not_slow_down() -> None:
    text = "0, 97, 61234, 64, 1980, 0x00000000000000C8\n1, [N/A], ERR!, 30, 345, [N/A]\nUnable to determine\n2, 3\n"
    first = {"index": 0, "utilization": 97, "memory_used_mib": 61234, "temperature_c": 64, "sm_clock_mhz": 1980}
    assert parse_gpus(text) == [
        {**first, "throttle": "hw slowdown, hw thermal slowdown, hw power brake slowdown"},
        {**first, "index": 1, "utilization": None, "memory_used_mib": None, "temperature_c": 30, "sm_clock_mhz": 345}
        | {"throttle": None},
    ]
    normal = ("0x0", "0x0000000000000001", "0x2", "0x4", "0x10", "0x100", "0x117", "0x")  # idling, settings, power
    rows = "".join(f"0, 97, 61234, 64, 1980, {mask}\n" for mask in (*normal, "0x24"))
    assert [gpu["throttle"] for gpu in parse_gpus(rows)] == [None] * len(normal) + ["sw thermal slowdown"]


FIELDS = "index,utilization.gpu,memory.used,temperature.gpu,clocks.sm"


@pytest.mark.parametrize(
    ("field", "count", "known"),
    [*((THROTTLES[at], 1, THROTTLES[at : at + 1]) for at in (0, 1)), ("of nobody", None, THROTTLES)],
    ids=["new driver", "old driver", "broken driver"],
)
def test_gpus_of_drivers_new_old_and_broken(
    field: str, count: int | None, known: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f'[ "$1" = "--query-gpu={FIELDS},{field}" ] && printf "0, 1, 2, 3, 4, 0x0\\n\\377"'
    monkeypatch.setenv("PATH", f"{write_program(tmp_path / 'nvidia-smi', said).parent}:{os.environ['PATH']}")
    throttles = list(THROTTLES)
    gpus = read_gpus(Helpers(), throttles)
    assert (None if gpus is None else len(gpus), tuple(throttles)) == (count, known)


# --- in the foreground ------------------------------------------------------------------------------------------------


def foreground(spec: dict[str, Any]) -> subprocess.Popen[str]:
    code = (
        "import sys, json; from cluster.agent.start import run_foreground\n"
        "sys.exit(run_foreground(json.loads(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", code, json.dumps(spec)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_foreground_gives_the_exit_code_of_the_command(rig: Rig) -> None:
    process = foreground(rig.spec("exits", environment=UNHURRIED))
    _, said = process.communicate(timeout=200)
    assert (process.returncode, rig.outcome()["deaths"][0]["exit_code"]) == (1, 7), said


def test_foreground_that_is_refused_leaves_word_in_the_run_folder(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    other = Rig(tmp_path)
    process, again = foreground(other.spec() | {"node": rig.name()}), foreground(rig.spec())
    assert "this run has a supervisor here already" in again.communicate(timeout=200)[1]
    assert (again.returncode, rig.status()["outcome"]) == (1, None)  # it goes on
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1
    assert rig.run_id in said
    outcome = read_json(str(other.folder / "alpha" / "nodes" / rig.name() / "outcome.json")) or {}
    assert rig.run_id in outcome["error"]
    assert outcome == {
        **{"exit_code": None, "cause": "start_failed", "stop_cause": None, "stop_at_ns": None, "deaths": []},
        **{"memory": {"evidence": None, "hint": None, "memory": None}, "leftover_pids": [], "error": outcome["error"]},
    }
