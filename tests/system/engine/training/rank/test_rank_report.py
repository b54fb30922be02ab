"""What a rank tells while it runs: its place, its stacks on a signal, its flight record on request."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from testkit import ROOT
from testkit.waiting import wait_for

from cluster.control.hang_blame import parse_stacks
from engine.config.errors import ConfigError
from engine.distributed.waits import WaitClock, find_straggler
from engine.runs.folder import RunFolder, create_run
from engine.runs.process import prefer_expandable_segments
from engine.training.rank.process import RankStatus, run_rank

# A rank of no torch: works, then waits in a named function until it is killed.
RANK = """
import sys, time
from pathlib import Path
from engine.training.rank.process import run_rank
from engine.runs.folder import RunFolder
def body(status):
    status.step, status.phase = 1, "forward"
    status.step, status.phase = 2, "backward"
    status.waits.begin("recv", 3)
    wait_here()
def wait_here():
    print("ready", flush=True)
    time.sleep(60)
sys.exit(run_rank(RunFolder(Path(sys.argv[1])), body))
"""
# The target of torchrun around a rank that works so; of one that fails a thread would never end.
TARGET = """
import threading, time
from engine.config.errors import ConfigError
from engine.train import main
def fail(error):
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("without an end", end="")
    raise error
main(lambda run, status: {})
"""


def read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "node1" / "rank0003.log"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "test" / "20260101-000000-abcdef", {"config.yaml": ""})


def test_the_status_file_follows_a_rank_to_its_end(log: Path) -> None:
    status, file = RankStatus(), log.with_suffix(".status.json")
    status.report_to(3, "node1", log)
    who = {"rank": 3, "pid": os.getpid(), "node": "node1"}
    nowhere = {"step": None, "phase": None, "micro_step": 0, "advances": 0, "ended": None}
    assert read(file) == who | nowhere
    for step in range(1, 3001):
        status.step, status.micro_step, status.phase = step, 1, "backward"
        assert read(file)["rank"] == 3  # whole at any moment
    here = who | nowhere | {"step": 3000, "phase": "backward", "micro_step": 1}
    assert wait_for(lambda: (found := read(file))["step"] == 3000 and found) == here
    status.end_report("DataError")
    status.step = 3001  # nobody is told any more
    assert read(file) == here | {"ended": "DataError"}
    assert {path.name for path in log.parent.iterdir()} == {"rank0003.status.json", "rank0003.stacks"}


def test_a_folder_that_cannot_be_made_costs_the_report_only(tmp_path: Path, log: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    status = RankStatus()
    status.report_to(0, "node1", log)
    status.step = 1
    status.end_report("ok")
    assert (tmp_path / "logs").read_text() == "a file in the way"


def test_request_for_a_flight_record_is_answered_once_per_nonce(log: Path) -> None:
    request, flight, status = log.with_name("flight.request"), log.with_suffix(".flight.json"), RankStatus()
    status.report_to(3, "node1", log)
    for nonce in ("first", "second"):
        request.write_text(f"{nonce}\n")
        assert wait_for(lambda: flight.exists() and read(flight))["nonce"] == nonce
        flight.unlink()
        time.sleep(1.0)
        assert not flight.exists()
    status.end_report("ok")


def test_flight_record_names_rank_wait_entries(log: Path) -> None:
    request, flight, status = log.with_name("flight.request"), log.with_suffix(".flight.json"), RankStatus()
    status.report_to(3, "node1", log)
    status.waits.begin("recv", 2)
    request.write_text("now\n")
    document = wait_for(lambda: flight.exists() and read(flight))
    status.end_report("ok")
    assert document["rank"] == 3
    assert document["entries"] == []
    assert document["waiting"] == {"what": "recv", "peer": 2}


def test_request_to_an_earlier_attempt_is_not_answered(log: Path) -> None:
    flight, status = log.with_suffix(".flight.json"), RankStatus()
    log.parent.mkdir(parents=True)
    log.with_name("flight.request").write_text("old")
    flight.write_text("{}")
    status.report_to(3, "node1", log)
    time.sleep(1.0)
    status.end_report("ok")
    assert not flight.exists()


def test_request_writes_stacks_without_a_signal(log: Path) -> None:
    request, stacks, status = log.with_name("flight.request"), log.with_suffix(".stacks"), RankStatus()
    status.report_to(3, "node1", log)
    request.write_text("first\n")
    wait_for(log.with_suffix(".flight.json").exists, "the answer")
    dump = stacks.read_text()  # there as soon as the flight record is
    status.end_report("ok")
    assert "in test_request_writes_stacks_without_a_signal" in dump, f"the main thread is missing in {dump}"
    assert parse_stacks(dump)[0][-1].function != "_bootstrap", "a helper thread is taken for the program's"


def test_a_rank_survives_writing_its_stacks(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "2", "BURST_NODE": "n[1]", "BURST_RANK_LOGS": "1"}
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], cwd=ROOT, env=environment)
    folder = tmp_path / "logs" / "n_1_"
    try:
        wait_for(lambda: (folder / "rank0002.log").exists() and "ready" in (folder / "rank0002.log").read_text())
        stacks = folder / "rank0002.stacks"
        assert stacks.read_text() == f"# rank 2, pid {process.pid}\n"
        for count in (1, 2):
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda count=count: stacks.read_text().count("in wait_here") == count)
        assert process.poll() is None
        document = wait_for(lambda: (found := read(folder / "rank0002.status.json"))["step"] == 2 and found)
        assert document["phase"] == "backward"
        modes = [stat.S_IMODE((folder / f"rank0002.{name}").stat().st_mode) for name in ("log", "stacks")]
        assert modes == [0o600, 0o600]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("work", "code", "ended"),
    [
        ("fail(ConfigError('no'))", 2, "ConfigError"),
        ("fail(KeyboardInterrupt())", 130, "KeyboardInterrupt"),
        ("None", 0, "ok"),
    ],
)
def test_a_rank_leaves_with_its_exit_code_although_its_log_is_on_a_full_disk(
    run: RunFolder, work: str, code: int, ended: str
) -> None:
    log = run.log_path("n", 0)
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    surroundings = {"RANK": "0", "BURST_NODE": "n", "BURST_RANK_LOGS": "1", "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", TARGET.replace("{}", work), str(run.path / "config.yaml")]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | surroundings, timeout=200).returncode == code
    assert read(log.with_suffix(".status.json"))["ended"] == ended
    assert [error["message"] for error in run.rank_errors()] == ["no"] * (code == 2)


@pytest.mark.parametrize(
    ("error", "code", "said"), [(ConfigError("no"), 2, "error: no\n"), (ValueError("odd"), 1, "Traceback")]
)
def test_only_unexpected_errors_print_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    def fail(status: RankStatus) -> None:
        raise error

    assert run_rank(RunFolder(tmp_path), fail) == code
    assert capsys.readouterr().err.startswith(said)


REDIRECTED = """
import os, sys
from pathlib import Path
from engine.runs.process import redirect_output
for stream in (sys.stdout, sys.stderr):
    print("before", end="", file=stream)
redirect_output(Path(sys.argv[1]))
for stream in (sys.stdout, sys.stderr):
    print("after", *os.listdir("/proc/self/fd")[3:], file=stream, flush=True)  # the one of this list
"""


def test_output_before_the_redirection_is_not_in_the_log(log: Path) -> None:
    command = [sys.executable, "-c", REDIRECTED, str(log)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": ""}, capture_output=True)
    assert done.stdout == b"before"
    assert done.stderr == b"before"
    assert log.read_bytes() == b"after 3\nafter 3\n"


def test_wait_in_progress_is_described() -> None:
    clock = WaitClock()
    clock.begin("recv", 1)
    assert clock.current is not None
    assert clock.current.what == "recv"
    assert clock.current.peer == 1
    clock.end()
    assert clock.current is None


def test_seconds_of_waits_add_up() -> None:
    clock, started = WaitClock(), time.monotonic()
    for _ in range(3):
        clock.begin("recv", 1)
        time.sleep(0.01)
        clock.end()
    with clock.waiting("all_reduce"):
        time.sleep(0.01)
    assert 0.04 <= clock.take() <= time.monotonic() - started


def test_seconds_of_waits_are_taken_once() -> None:
    clock = WaitClock()
    with clock.waiting("all_reduce"):
        time.sleep(0.01)
    assert clock.take() > 0
    assert clock.take() == 0.0


def test_failed_wait_stays_visible() -> None:
    clock = WaitClock()
    with pytest.raises(RuntimeError), clock.waiting("all_gather"):
        raise RuntimeError("connection closed")
    assert clock.current is not None
    assert clock.current.what == "all_gather"


@pytest.mark.parametrize(
    ("waits", "straggler"),
    [
        ([0.5, 0.5, 0.1, 0.5], 2),  # the slow one waits least
        ([0.5, 0.45, 0.41], None),  # about even
        ([0.1, 0.0], 1),
        ([0.0, 0.0], None),
        ([0.3], None),
        ([], None),
    ],
)
def test_the_straggler_is_the_rank_that_waits_least(waits: list[float], straggler: int | None) -> None:
    assert find_straggler(waits, step_time_s=1.0) == straggler


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_the_default(name: str | None) -> None:
    environment = {"PATH": "/bin"} if name is None else {name: "max_split_size_mb:512"}
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name is None else {}
    expected = environment | ours
    prefer_expandable_segments(environment)
    assert environment == expected
