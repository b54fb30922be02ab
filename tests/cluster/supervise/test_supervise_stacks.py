"""Stacks and flight records of ranks that listen, that do not yet, and that cannot answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from testkit.machine_clock import machine_time
from testkit.supervise_rig import Rig, kill
from testkit.waiting import wait_for

from cluster.agent.folder import NodeFiles, make_folder, read_json, request_stacks, stamp_of
from cluster.agent.health import ANSWER_S, Stacks
from cluster.agent.processes import Rank, process_start


def ask(rig: Rig, nonce: str) -> dict[str, Any]:
    """What stacks_done.json says of the ranks."""
    request_stacks(str(rig.folder / "alpha"), rig.name(), nonce)
    done = rig.files().stacks_done
    answer = wait_for(lambda: (read_json(done) or {}).get("nonce") == nonce and read_json(done), "the answer")
    return dict(answer["ranks"])


def stacks(rig: Rig, rank: int) -> str:
    return Path(rig.files().log_dir, f"rank{rank:04d}.stacks").read_text()


def answered(ranks: dict[str, Any]) -> list[bool]:
    return [ranks[rank]["answered"] for rank in ("0", "1")]


def test_ranks_that_listen_leave_stacks_and_flight_records_of_this_request(rig: Rig) -> None:
    rig.start("listens")
    wait_for(lambda: all("# rank" in stacks(rig, rank) for rank in (0, 1)), "the ranks to listen")
    for nonce in ("first", "second"):
        length, begin = len(stacks(rig, 1)), time.monotonic()
        ranks = ask(rig, nonce)
        assert time.monotonic() - begin > ANSWER_S - 0.2  # which a flight record that is an earlier one's does not end
        assert answered(ranks) == [True, True]
        assert {rank: ranks[rank]["pid"] for rank in ranks} == rig.ranks()
        assert "in main" in stacks(rig, 1)[length:]
        assert Path(rig.files().flight_request).read_text() == f"{nonce}\n"
        for rank in (0, 1):
            Path(rig.files().log_dir, f"rank{rank:04d}.flight.json").write_text('{"nonce": "third"}')
    begin = machine_time()
    kill(rig.ranks()["0"], signal.SIGSTOP)  # it holds up nobody
    ranks = ask(rig, "third")
    assert machine_time() - begin < ANSWER_S - 0.5
    assert (ranks["0"]["state"], answered(ranks)) == ("T", [False, True])
    told = wait_for(lambda: (told := (rig.status()["health"] or {})["ranks"]) and told, "the ranks in health")
    assert {rank: told[rank]["pid"] for rank in told} == rig.ranks()


def test_rank_that_does_not_listen_yet_is_left_alone(rig: Rig) -> None:
    rig.start("wait")  # its file of stacks is there, but SIGUSR1 would kill it
    Path(rig.files().stacks).write_text("{")
    time.sleep(0.5)  # a damaged request was seen, and is none
    assert answered(ask(rig, "nonce")) == [False, False]
    assert rig.status()["supervisor"]["deaths"] == []


def test_an_error_of_the_supervisor_itself_ends_the_run_and_is_told(rig: Rig) -> None:
    rig.start("stubborn")
    Path(rig.files().stacks).write_text('{"nonce": "\\ud800"}')  # which no file can hold
    outcome = rig.outcome()
    assert outcome["error"].startswith("the supervisor failed: UnicodeEncodeError: ")
    assert (outcome["exit_code"], outcome["cause"], outcome["leftover_pids"]) == (None, "exit", [])
    assert "Traceback" in Path(rig.files().own_log).read_text()


def test_rank_that_answers_is_sent_no_signal(tmp_path: Path) -> None:
    files = NodeFiles(str(tmp_path), "alpha")
    for folder in (files.state_dir, files.log_dir):
        make_folder(folder)
    with subprocess.Popen(["sleep", "60"]) as process:  # which a signal would end
        listens = f"# rank 0, pid {process.pid}\n"
        path, stacks = Path(files.log_dir, "rank0000.stacks"), Stacks(files)
        path.write_text(listens)
        request_stacks(str(tmp_path), "alpha", "nonce")
        ranks = [Rank(0, process.pid, process_start(process.pid) or "")]
        stacks.turn(stamp_of(files.stacks), ranks)
        path.write_text(f"{listens}stacks\n")
        wait_for(lambda: stacks.turn(stamp_of(files.stacks), ranks) or Path(files.stacks_done).exists(), "the answer")
        assert process.poll() is None, "a healthy rank was signalled, which may crash it"
        kill(process.pid)


TRACED = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_request_is_answered_at_once_where_no_rank_can_answer_and_only_once(tmp_path: Path) -> None:
    files = NodeFiles(str(tmp_path), "alpha")
    for folder in (files.state_dir, files.log_dir):
        make_folder(folder)
    stacks, done = Stacks(files), Path(files.stacks_done)

    def turn(ranks: list[Rank]) -> dict[str, Any] | None:
        for _ in range(2):
            stacks.turn(stamp_of(files.stacks), ranks)
        return read_json(str(done))

    assert turn([]) is None
    with subprocess.Popen([sys.executable, "-c", TRACED]) as traced:
        ranks = [Rank(0, os.getpid(), "1"), Rank(1, traced.pid, process_start(traced.pid) or "")]
        wait_for(lambda: ranks[1].state == "t", "the traced one")
        for nonce, asked in (("a", []), ("b", ranks)):
            request_stacks(str(tmp_path), "alpha", nonce)
            found = {str(one.rank): {"pid": one.pid, "state": one.state, "answered": False} for one in asked}
            assert turn(asked) == {"nonce": nonce, "ranks": found}
            done.unlink()
            os.utime(files.stacks, (1, 1))
            assert turn(asked) is None
        assert [one.state for one in ranks] == ["gone", "t"]
        kill(traced.pid)  # Popen would take its stop for its end
