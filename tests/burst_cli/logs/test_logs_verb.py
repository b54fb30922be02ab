"""`burst logs`: what is shown of which ranks, safely, to the end of the run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from testkit.run_maker import forget_process, make_run, write_log
from testkit.terminal import on_terminal

from burst_cli.logs.files import LogRequest, find_logs
from burst_cli.logs.follow import LogPrinter, follow
from burst_cli.logs.read import TAIL_BYTES
from engine.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
END_S = 60.0
HERE = ("importing", "rank {} is here", "step 1")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A completed run of four ranks on two nodes, whose names are not in the order of their ranks."""
    run = make_run(tmp_path / "runs", state="completed", nodes={"tb3": 2, "tb2": 2})
    for rank in range(4):
        write_log(run, "tb3" if rank < 2 else "tb2", rank, "\n".join([*HERE, ""]).format(rank))
    return run


@pytest.fixture
def living(tmp_path: Path) -> RunFolder:
    """A run that says it runs, by the process of this test."""
    return make_run(tmp_path / "runs", state="running", nodes={"tb1": 2})


def start_logs(run: RunFolder, *argv: str, **streams: object) -> subprocess.Popen[str]:
    """`burst logs ARGV` as a process of its own."""
    environment = {**os.environ, "BURST_RUNS_DIR": str(run.path.parent.parent), "PYTHONUNBUFFERED": "1"}
    environment.pop("COLUMNS", None)
    options = streams or {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "burst_cli", "logs", *argv]
    return subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_selected_logs_are_in_the_order_of_ranks(burst, run: RunFolder) -> None:
    for options, ranks in [
        ([], "0123"),
        (["--tail", "all"], "0123"),
        (["--ranks", "0,2-3"], "023"),
        (["--nodes", "tb2"], "23"),
        (["--nodes", "tb[2-3]", "--ranks", "1"], "1"),
        (["--grep", "rank [13]"], "13"),
        (["--grep", r"^rank 2 is here$"], "2"),
    ]:
        result = burst("logs", run.run_id, *options)
        lines = HERE[1:2] if "--grep" in options else HERE
        shown = [f"tb{3 - int(rank) // 2}:{rank} | {line.format(rank)}" for rank in ranks for line in lines]
        assert (result.code, result.out.splitlines()) == (0, shown)


def test_tail_counts_matching_lines_of_each_log(burst, run: RunFolder) -> None:
    write_log(run, "tb3", 0, "".join(f"error {n}\nstep {n}\n" for n in range(1000)))
    assert burst("logs", "--tail", "0") == (0, "", "")
    first = ("logs", "--ranks", "0")
    errors = burst(*first, "--tail", "2", "--grep", "error").out
    assert errors == "tb3:0 | error 998\ntb3:0 | error 999\n"
    counts = [len(burst(*first, *words).out.splitlines()) for words in (["--tail", "1"], [], ["--tail", "all"])]
    assert counts == [1, 50, 2000]


def test_launcher_shows_what_started_the_ranks(burst, run: RunFolder) -> None:
    (run.log_dir("tb2") / "torchrun.log").write_text("rank 1 died\n")
    (run.path / "nodes/tb2").mkdir(parents=True)
    (run.path / "nodes/tb2/supervisor.log").write_text("it is here\n")
    (run.path / "controller.log").write_text("taking over\n")
    assert burst("logs", "--launcher", "--nodes", "tb2", "--ranks", "9").out.splitlines() == [
        "controller     | taking over",
        "tb2:supervisor | it is here",
        "tb2:torchrun   | rank 1 died",
    ]


def test_json_is_one_document_with_every_line_of_every_rank(burst, run: RunFolder) -> None:
    write_log(run, "tb2", 2, b"x" * (TAIL_BYTES + 5))
    first = [{"node": "tb3", "rank": 1, "log": "rank0001", "text": line.format(1)} for line in HERE]
    assert json.loads(burst("logs", "--json", "--ranks", "1-2").out) == {
        **{"run_id": run.run_id, "exp": "tiny", "path": str(run.path), "status": "completed", "left_out": 0},
        "lines": [*first, {"node": "tb2", "rank": 2, "log": "rank0002", "text": "x" * TAIL_BYTES, "cut_bytes": 5}],
    }
    write_log(run, "tb2", 3, "x\n" * 100_002)
    flood = json.loads(burst("logs", "--json", "--tail", "all", "--ranks", "3").out)
    assert (len(flood["lines"]), flood["left_out"]) == (100_000, 2)


def test_nothing_in_a_log_reaches_the_terminal_as_a_command(burst, run: RunFolder) -> None:
    hostile = b"\x1b[2Jclear \x1b]0;title\x07 \x9b31m \x00\x07\x08 \xff\xfe [bold]markup[/bold] \xe2\x80\xaertl\n"
    write_log(run, "tb3", 0, hostile + b" 10%|#   |\r 50%|##  |\r100%|####|\r\n")
    first, last = burst("logs", "--ranks", "0").out.splitlines()
    assert (first.isprintable(), "\ufffd" in first, "[bold]markup[/bold]" in first) == (True, True, True)
    assert last == "tb3:0 | 100%|####|"  # the last drawing of a progress bar


def test_reader_that_leaves_is_no_error(run: RunFolder) -> None:
    write_log(run, "tb3", 0, b"a line of many\n" * 200_000)
    process = start_logs(run, "--tail", "all")
    with process.stdout or io.StringIO() as out:
        assert out.readline() == "tb3:0 | a line of many\n"  # without colours
    assert process.wait(END_S) == 0


@pytest.mark.parametrize(("variable", "value"), [("TERM", "xterm"), ("TERM", "dumb"), ("NO_COLOR", "1")])
def test_colours_are_for_terminals_that_want_some(run: RunFolder, monkeypatch, variable: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    processes: list[subprocess.Popen[str]] = []
    text = on_terminal(lambda end: processes.append(start_logs(run, stdin=end, stdout=end, stderr=end)))
    assert processes[0].wait(END_S) == 0
    codes = (36, 32, 33, 35) if value == "xterm" else ()
    assert re.findall(r"\x1b\[(\d+)mtb\d:\d \|\x1b\[0m step 1\r\n", text) == list(map(str, codes))


def test_invalid_selections_are_reported(burst, run: RunFolder) -> None:
    for options, code, said in [
        (["--grep", "("], 2, "is no regular expression"),
        (["--ranks", "3-1"], 2, "'3-1' is no rank; expected numbers and ranges such as 0,3-5"),
        (["--ranks", "0,,1"], 2, "is no rank"),
        (["--nodes", "tb[1-"], 2, "not in the grammar of node lists"),
        (["--ranks", "1000001"], 2, "is no rank"),
        (["--tail", "-3"], 2, "--tail -3: expected a number of lines, or all"),
        (["--tail", "1234567890"], 2, "expected a number of lines, or all"),
        (["-f", "--json"], 2, "-f never ends"),
        (["--ranks", "1000000"], 0, "it has ranks 0-3 on tb[2-3]"),
    ]:
        result = burst("logs", run.run_id, *options)
        assert (result.code, "is here" in result.out, said in result.err) == (code, False, True)


def test_of_a_run_that_nobody_controls_it_is_said_that_there_may_be_more(burst, living: RunFolder) -> None:
    (living.path / "launch.json").unlink()
    forget_process(living)
    name, told = living.run_id, burst("logs", "--launcher").err.splitlines() + burst("logs").err.splitlines()
    lost = told[0]
    assert lost.startswith("warning: these logs may not be all: it was started without `burst launch`")
    nothing = f"{name}: no rank has said anything; `burst logs {name} --launcher` shows what started them"
    assert told == [lost, f"{name}: neither torchrun nor a supervisor has said anything", lost, nothing]
    followed = burst("logs", "-f")
    words = "running: its nodes cannot be asked; more: burst status"
    assert followed == (3, "", f"tiny/{name} {words} {name}\n")


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 1), ("cancelled", 130)])
def test_following_ends_with_the_run(burst, living: RunFolder, state: str, code: int) -> None:
    write_log(living, "tb1", 0, "zero\none\nlast words")
    living.transition(state)
    result = burst("logs", "-f", "--tail", "2")
    assert (result.code, result.out) == (code, "tb1:0 | one\ntb1:0 | last words\n")
    assert result.err == f"tiny/{living.run_id} {state}; more: burst status {living.run_id}\n"


def test_files_are_followed_from_when_they_appear_through_rotation_to_their_last_words(living: RunFolder) -> None:
    first = living.log_path("tb1", 0)
    story: list[tuple[Callable[[], object], str]] = [
        (lambda: write_log(living, "tb1", 0, "one\ntw"), "tb1:0 | one"),
        (lambda: append(first, "o\n"), "tb1:0 | two"),
        (lambda: write_log(living, "tb1", 1, "a new file\n"), "tb1:1 | a new file"),
        (lambda: first.rename(first.with_suffix(".log.1")), ""),
        (lambda: write_log(living, "tb1", 0, "after rotation\n"), "tb1:0 | after rotation"),
    ]
    told = [text for _, text in story if text] + ["tb1:0 | last words"]
    stream, awaited = io.TextIOWrapper(written := io.BytesIO()), [""]

    def ended() -> int | None:
        """What happens next, once what happened before is told; then the run has ended."""
        if awaited[0] not in written.getvalue().decode():
            return None
        if not story:
            append(first, "last words")
            return 7
        happens, awaited[0] = story.pop(0)
        happens()
        return None

    printer = LogPrinter(stream, [], has_colour=False)
    assert follow(living, LogRequest(), printer, ended, most=10_000) == 7
    assert written.getvalue().decode().splitlines() == told


def test_following_reports_skipped_bytes(living: RunFolder) -> None:
    path = write_log(living, "tb1", 0, "one\n")
    write_log(living, "tb1", 1, "")
    stream, calls = io.StringIO(), iter([lambda: append(path, "0123456\n" * 2000 + "the end\n")])

    def ended() -> int | None:
        return 0 if (flood := next(calls, None)) is None else flood()

    printer = LogPrinter(stream, find_logs(living, LogRequest()), has_colour=False)
    assert follow(living, LogRequest(), printer, ended, most=20_000) == 0
    lines = [line.removeprefix("tb1:0 | ") for line in stream.getvalue().splitlines()]
    # Of 16,008 bytes half of 20,000 are read, and the line at their beginning may be the end of a longer one.
    assert lines == ["one", f"... 5.88 KiB not shown, see {path}", *["0123456"] * 1248, "the end"]
