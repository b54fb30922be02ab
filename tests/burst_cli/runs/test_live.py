"""A run that is watched: its progress, which nodes fold and which stand out, what fits, what plain lines say."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from testkit.clock import Clock
from testkit.run_maker import health, make_run, plan_document
from testkit.terminal import lines_of, styled, text_of

from burst_cli.runs.read import RunFacts, RunProgress
from burst_cli.runs.view import (
    NodeRow,
    PlainView,
    draw,
    fold_rows,
    hang_text,
    node_rows,
    nodes_table,
    open_view,
    plain_line,
)
from cluster.control.link import NodeStatus
from engine.runs.folder import RunFolder, create_run
from engine.training.rank.recorder import progress_line

NODES = {f"tb{number}": 2 for number in range(1, 65)}


@pytest.fixture
def bare(tmp_path: Path) -> RunFolder:
    """A run without a plan."""
    return create_run(tmp_path / "bare" / "20260101-000000-aaaaaa", {})


def console(*, terminal: bool = False, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=30, highlight=False)


def written(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def status(name: str, **changes: Any) -> NodeStatus:
    return NodeStatus(name, **{"phase": "running", "health": health(ranks={}), "heard_s": 0.5, **changes})


def fleet(**odd: NodeStatus) -> list[NodeStatus]:
    return [odd.get(name, status(name)) for name in NODES]


def rows_of(statuses: list[NodeStatus]) -> list[NodeRow]:
    return fold_rows(node_rows(statuses, RunFacts()))


def drawn(progress: RunProgress, width: int, rows: Sequence[NodeRow] = (), stop_line: str = "") -> list[str]:
    target = console(width=width)
    target.print(draw(progress, rows, stop_line, width))
    return [line.rstrip() for line in written(target).splitlines()]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_nodes_that_are_alike_share_a_row_with_the_span_of_their_figures() -> None:
    edge = {"memory_used_bytes": 95, "memory_limit_bytes": 100, "disk_free_bytes": 2**30}
    gpus = [{}, {"utilization": 5, "temperature_c": 89}]
    healthy = health(load1=3.5, ranks={}, gpus=gpus, **edge)  # no less than it needs to be
    (row,) = rows_of(fleet(tb3=status("tb3", health=healthy, heard_s=10.0)))
    assert (row.mark, row.gpu.count(5), row.gpu.count(97), row.memory.count(0.95)) == ("ok", 1, 63, 1)
    assert (row.name, min(row.load), max(row.load)) == ("tb[1-64]", 1.5, 3.5)
    silent = {name: status(name, heard_s=20.0 + number) for number, name in enumerate(list(NODES)[:30])}
    assert [(row.mark, len(row.nodes)) for row in rows_of(fleet(**silent))] == [("warn", 30), ("ok", 34)]


ALIVE = ("starting", "running", "stopping")
RANKS = {
    **{name: {"state": state} for name, state in (("5", "t"), ("6", "T"), ("7", "Z"), ("8", "X"), ("1234567", "gone"))},
    **{"9": {"state": "R"}, "x": {"state": "T"}, "12345678": {"state": "T"}},
}


def test_node_that_is_not_well_stands_out_above_the_others() -> None:
    for changes, note, mark in [
        ({"problem": "tb9: no route to host"}, "no route to host", "bad"),
        ({"phase": "lost"}, "its supervisor is gone without a word", "bad"),
        *(({"heard_s": 12.0, "phase": phase}, "not heard for 12 s", "warn") for phase in ALIVE),
        ({"health": {"ranks": RANKS}}, "ranks 5-6 stopped; ranks 7-8 dead; rank 1234567 gone", "bad"),
        ({"health": {"memory_used_bytes": 4 * 2**30}}, "memory 100% full", "warn"),
        ({"health": {"disk_free_bytes": 2**20}}, "disk nearly full: 1 MiB free", "warn"),
        ({"health": {"gpus": [{"index": 3, "throttle": "hw"}]}}, "GPU 3 is throttled: hw", "warn"),
        ({"health": {"gpus": [{"index": 3, "temperature_c": 90}]}}, "GPU 3 has 90 °C", "warn"),
        ({"phase": "ended", "outcome": {"cause": "exit", "exit_code": -9}}, "ended by signal 9", "bad"),
        ({"phase": "ended", "outcome": {"cause": "lease", "exit_code": 0}}, "it heard nothing of its launcher", "bad"),
        ({"phase": "ended", "outcome": {"cause": "start_failed", "error": "no python"}}, "no python", "bad"),
    ]:
        changes = {**changes, "health": health(**{"ranks": {}, **changes.get("health", {})})}
        first, *others = rows_of(fleet(tb9=status("tb9", **changes)))
        assert (first.nodes, first.mark) == (("tb9",), mark)
        assert note in "; ".join(first.notes)
        assert [len(row.nodes) for row in others] == [63]


def test_an_ended_run_has_no_notes() -> None:
    ended = status("tb1", phase="ended", outcome={"cause": "exit", "exit_code": 0}, heard_s=5000.0)
    stopped = status("tb2", health=health(ranks={"0": {"state": "T"}}), heard_s=5000.0)
    rows = node_rows([ended, stopped], RunFacts(), straggler=0, is_over=True)
    assert [(row.mark, row.notes, row.ranks) for row in rows] == [("ok", (), ()), ("ok", (), ("T",))]
    assert [row.load for row in rows] == [(), (1.5,)]
    left = status("tb1", phase="ended", outcome={"cause": "stop", "exit_code": -15})
    odd = status("tb3", health={"ranks": {"0": {}, "1": {"state": "too long a word"}}, "memory_used_bytes": 5})
    rows = node_rows([replace(stopped, phase="stopping", heard_s=1.0), left, odd], RunFacts())
    found = [(row.notes, row.ranks, row.memory) for row in rows]
    assert found == [((), ("T",), (0.25,)), ((), (), ()), ((), ("?", "too long…"), ())]
    for death, notes in (({"exit_code": 0}, ()), ({"exit_code": 1}, ("rank 7 dead",)), ({}, ("rank 7 dead",))):
        supervisor = {"deaths": [{"rank": 7, **death}]}
        over = status("tb9", health=health(ranks={"7": {"state": "Z"}}), supervisor=supervisor)
        assert node_rows([over], RunFacts())[0].notes == notes


def test_table_of_nodes_shows_their_state() -> None:
    names = [f"rack-{number}-left" for number in (1, 5, 9)]
    statuses = [
        *(status(name, health=health(load1=load)) for name, load in zip(names, (1.0, 2.0, 3.0), strict=True)),
        *(NodeStatus("tb1"), NodeStatus("tb2", problem="tb2: no route"), status("tb3", phase="lost")),
        *(status("tb4", phase="stopping", heard_s=12.0), status("tb5", phase="ended", outcome={"cause": "stop"})),
    ]
    table = nodes_table(node_rows(statuses, RunFacts()), 120)
    assert [line.rstrip() for line in text_of(table, width=120).splitlines()] == [
        "node              state       ranks   GPU    load memory",
        "tb2               unknown     –         –       –      – no route",
        "tb3               lost        –       97%     1.5    25% its supervisor is gone without a word",
        "tb4               stopping    –       97%     1.5    25% not heard for 12 s",
        "rack-[1,5,9]-left running     3 R 3 S 97% 1.0-3.0    25%",
        "tb1               not started –         –       –      –",
        "tb5               ended       –         –       –      –",
    ]
    mute = [("tb2", "bold red"), ("unknown", "dim"), ("no route", "bold red")]
    lost = [(text, "bold red") for text in ("tb3", "lost", "its supervisor is gone without a word")]
    quiet = [(text, "yellow") for text in ("tb4", "stopping", "not heard for 12 s")]
    assert styled(table)[6:] == [*mute, *lost, *quiet, ("running", "green"), ("not started", "dim")]
    narrow = nodes_table(node_rows(statuses[:3], RunFacts()), 60)
    assert lines_of(narrow)[1] == "3 nodes running 3 R 3 S 97% 1.0-3.0 25%"


# --- progress ---------------------------------------------------------------------------------------------------------


def step(run: RunFolder, number: int, **more: Any) -> None:
    run.append_metrics({"step": number, "loss": 2.5, "step_time_s": 2.0, "tokens_per_s": 12_345.0, "mfu": 0.25, **more})


def test_progress_estimates_the_remaining_time(bare: RunFolder) -> None:
    progress = RunProgress(bare, 10)
    assert progress.phase == "starting the ranks"
    bare.append_event("phase", phase="build model")
    bare.append_event("other", phase="not a phase")
    progress.poll()
    assert (progress.phase, progress.step, progress.remaining_s()) == ("build model", 0, None)
    bare.append_metrics({"loss": 1.0})  # damaged
    for number, seconds in enumerate((60.0, 2.0, 3.0), start=1):
        bare.append_metrics({"step": number, "step_time_s": seconds, "loss": None, "mfu": "high"})
    progress.poll()
    assert (progress.step, progress.figure("mfu"), progress.losses) == (3, None, [])
    assert progress.remaining_s() == 3.0 * 7


def test_a_step_without_labels_shows_no_loss_of_another_step(bare: RunFolder) -> None:
    progress = RunProgress(bare, 10)
    step(bare, 1)
    bare.append_metrics({"step": 2, "loss": None, "tokens_per_s": None, "dropped": "no_labels"})
    progress.poll()
    assert progress.figure("loss") is None, "the loss of step 1 is shown at step 2"


def test_the_log_of_a_rank_writes_figures_as_the_screen_does(bare: RunFolder) -> None:
    row = {"step": 4, "loss": 2.5, "tokens_per_s": 12_345.0, "mfu": 0.0535, "peak_memory_bytes": 518 * 2**20}
    row |= {"validation_loss": 2.25, "validation_bits_per_byte": 1.5}
    progress = RunProgress(bare, 10)
    bare.append_metrics(row)
    progress.poll()
    screen = [part for part in plain_line(progress).split("  ") if not part.startswith("left")]
    assert progress_line(row, 10).split("  ") == screen


def test_one_who_joins_late_knows_how_long_it_has_been_silent(bare: RunFolder) -> None:
    bare.append_metrics({"step": 1, "step_time_s": 1.0})
    (bare.path / "events.jsonl").unlink(missing_ok=True)
    os.utime(bare.path / "metrics.jsonl", (time.time() - 50, time.time() - 50))
    progress = RunProgress(bare, 200, ran_s=60.0)
    progress.poll()
    assert 49 <= progress.silence_s <= 70
    assert progress.elapsed_s() >= 60.0


@pytest.mark.parametrize(
    ("late_steps", "lost_s", "is_named"),
    [
        (8, 1.25, True),
        (10, 1.0, True),
        (10, 0.9, False),  # all steps, and less than ten seconds of them: cores that ranks share
        (7, 60.0, False),  # minutes, and not always the same rank
    ],
)
def test_a_straggler_is_late_repeatedly(bare: RunFolder, late_steps: int, lost_s: float, *, is_named: bool) -> None:
    progress = RunProgress(bare, 200)
    for number in range(1, 11):
        least = 0.5 * (number % 2)
        late = {"straggler_rank": 0 if number <= late_steps else 1, "rank_wait_s_max": least + lost_s}
        bare.append_metrics({"step": number, "rank_wait_s_min": least, **late})
        progress.poll()
    assert progress.straggler == (0 if is_named else None)
    for number in range(11, 20):
        bare.append_metrics({"step": number, "straggler_rank": None, "rank_wait_s_min": None})
    progress.poll()
    assert progress.straggler is None


def test_hang_is_counted_down_by_the_rule_of_the_controller(tmp_path: Path) -> None:
    document = plan_document({"tb1": 2})
    document["config"]["cluster"] = {"hang_timeout_s": 30.0}
    run = create_run(tmp_path / "tiny" / "20260101-000000-aaaaaa", {"launch.json": json.dumps(document)})
    clock = Clock()
    progress = RunProgress(run, 200, clock)
    progress.poll()

    def said_after(seconds: float) -> str | None:
        progress.poll()
        clock.now += seconds
        return hang_text(progress)

    assert said_after(31) is None  # on the way to the first step the controller waits longer
    run.append_event("phase", phase="train")
    run.append_metrics({"step": 1, "step_time_s": 1.0})
    assert said_after(14) is None
    assert said_after(1) == "no step for 15 s; stacks will be taken at 30 s"
    assert said_after(15) == "no step for 30 s: it may hang, stacks are taken"
    said = run.log_path("tb1", 1).with_suffix(".status.json")
    said.parent.mkdir(parents=True)
    said.write_text("{}")
    assert said_after(0) is None  # a rank has advanced within its step
    run.append_event("phase", phase="evaluate")
    assert said_after(31) is None


# --- lines ------------------------------------------------------------------------------------------------------------


def test_plain_view_prints_figures_every_few_seconds(bare: RunFolder) -> None:
    clock, target = Clock(0.0), console()
    view = PlainView(target, RunProgress(bare, 4, clock))
    for number in (1, 2, 3):
        step(bare, number)
        view.tick()
        if number == 2:
            clock.now += 2.0
    step(bare, 4, validation_loss=2.0, validation_bits_per_byte=1.5)
    view.tick()
    view.tick()
    lines = written(target).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["starting the ranks", "step 1/4", "step 3/4", "step 4/4"]
    assert "loss 2.5000  12.3K tokens/s  MFU 25%  memory –  left 0:06" in lines[1]
    assert lines[-1].endswith("left 0:00  validation loss 2.0000  bits/byte 1.5000")


def test_plain_view_prints_events_without_escapes(bare: RunFolder) -> None:
    target = console(width=40)
    view = PlainView(target, RunProgress(bare, 40))
    bare.append_event("phase", phase="build\x1b[31m model")
    bare.append_event("warning", message="mfu [b]above[/b] 1")
    facts = {"reason": "the loss is nan", "reaction": "skip", "first_sample": 8, "last_sample": 11}
    bare.append_event("dropped", step=3, **facts)
    view.tick()
    view.stopping("Ctrl-C", 12.0)
    bare.append_metrics({"step": 40, "validation_loss": 3.125, "needle_accuracy": 0.5, "needle_gain": 1.5})
    view.tick()
    assert written(target).splitlines() == [
        "warning: mfu [b]above[/b] 1",
        "warning: step 3 is dropped (skip): the loss is nan; samples 8 to 11",
        "build model",
        "Ctrl-C: stopping the ranks, killing what is left after 12 s; press Ctrl-C again to kill them now",
        "weights of step 40  validation loss 3.1250  needles right 0.5000  needle gain 1.5000",
    ]


def test_lines_of_a_log_have_times(bare: RunFolder) -> None:
    clock, target = Clock(), console()
    view = PlainView(target, RunProgress(bare, 9, clock), is_log=True)
    for number in (1, 2, 3):
        step(bare, number)
        view.tick()
        clock.now += 59.0 if number == 1 else 1.0
    view.note("a \x1b[31mword")
    moments, texts = zip(*(line.split(" ", 1) for line in written(target).splitlines()), strict=True)
    assert all(datetime.fromisoformat(moment) for moment in moments)
    assert [text.split("  ")[0] for text in texts] == ["starting the ranks", "step 1/9", "step 3/9", "note: a word"]


def test_plain_lines_tell_changes_of_nodes_once(bare: RunFolder) -> None:
    target, clock = console(), Clock(0.0)
    view = PlainView(target, RunProgress(bare, 200, clock))
    for seconds, problem in ((12.0, None), (13.0, "tb5: odd"), (14.0, None)):
        view.nodes([*fleet(tb5=status("tb5", heard_s=seconds, problem=problem)), NodeStatus("tb65")])
        clock.now += 1.0
    view.nodes(fleet())
    clock.now += 1.0
    view.nodes(fleet(tb6=status("tb6", phase="ended", outcome={"cause": "exit", "exit_code": 1})))
    view.nodes(fleet())  # nobody looks so soon
    assert written(target).splitlines() == [
        "node tb[1-64]: running",
        "node tb5: not heard for 12 s",
        "node tb5: odd",
        "node tb5: well again",
        "node tb6: ended",
        "node tb6: ended with exit code 1",
    ]


# --- the screen -------------------------------------------------------------------------------------------------------


def test_live_view_prints_warnings_above_its_block(bare: RunFolder) -> None:
    target = console(terminal=True)
    step(bare, 3, loss=2.0)
    bare.append_event("warning", message="clocks are odd")
    threads = threading.active_count()
    with open_view(target, RunProgress(bare, 4)) as view:
        view.nodes(fleet(tb2=status("tb2", problem="tb2: connection lost")))
        view.tick()
        assert "connection lost" in written(target)
        view.note("tb2 was slow \x1b[31mto answer")
        view.stopping("SIGTERM", 0.0)
        shown = written(target)
        assert threading.active_count() == threads
    text = written(target)
    assert text[len(shown) :].count("\x1b[2K") > 5  # the block is gone at the end
    assert "\x1b[?25l" in text
    lines = ("warning: clocks are odd", "step 3/4", "connection lost", "tb[1,3-64]", "note: tb2 was slow to answer")
    assert [part for part in (*lines, "SIGTERM: killing the ranks now") if part not in text] == []


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            100,
            [
                "tiny/20260101-000000-aaaaaa  ring, 3 x 2 ranks, seq 4,096",
                "━                         step 10/200 6:20 left, 1:05 elapsed  evaluate",
                "loss 0.5000 █▄▃▂▂▂▁▁▁▁   tokens/s/device 7.72K   MFU 25%   peak memory 1 GiB   validation 2.0000",
                "bits/byte 1.5000",
                "Ctrl-C: stopping the ranks, killing what is left",
                "node state   ranks GPU load memory",
                "tb2  running –     97%  1.5    25% not heard for 12 s",
                "tb3  running 1 R   97%  3.0    25% straggler: rank 4",
                "tb1  running –     97%  1.5    25%",
            ],
        ),
        (
            40,
            [
                "tiny/20260101-000000-aaaaaa  ring, 3 x …",
                "╸          step 10/200 6:20 left, 1:05 e",
                "loss 0.5000 █▄▃▂▂▂▁▁▁▁   tokens/s/device",
                "7.72K   MFU 25%   peak memory 1 GiB",
                "validation 2.0000   bits/byte 1.5000",
                "Ctrl-C: stopping the ranks, killing what",
                "is left",
                "node state   GPU",
                "tb2  running 97% not heard for 12 s",
                "tb3  running 97% straggler: rank 4",
                "tb1  running 97%",
            ],
        ),
    ],
)
def test_the_live_block_fits_the_width(tmp_path: Path, width: int, lines: list[str]) -> None:
    run, clock = make_run(tmp_path, nodes={"tb1": 2, "tb2": 2, "tb3": 2}), Clock()
    figures = {"tokens_per_s": 9000.0, "tokens_per_s_per_device": 7716.0, "peak_memory_bytes": 2**30}
    for number in range(1, 11):
        evaluated = {"validation_loss": 2.0, "validation_bits_per_byte": 1.5} if number == 8 else {}
        step(run, number, **{"loss": 5.0 / number, **figures, **evaluated})
    run.append_event("phase", phase="evaluate")
    progress = RunProgress(run, 200, clock, ran_s=65.0)
    progress.poll()
    odd = status("tb3", health=health(load1=3.0, ranks={"4": {"state": "R"}}))
    rows = node_rows([status("tb1"), status("tb2", heard_s=12.0), odd], progress.facts, straggler=4)
    assert drawn(progress, width, rows, "Ctrl-C: stopping the ranks, killing what is left") == lines
    pieces = styled(draw(progress, rows, "stop", 100), width=100)
    assert {("step 10/200", "bold"), ("6:20 left, 1:05 elapsed  evaluate", "dim"), ("stop", "yellow")} <= set(pieces)


def test_before_the_first_step_a_block_shows_that_something_goes_on(bare: RunFolder) -> None:
    clock = Clock()
    progress = RunProgress(bare, 10, clock)
    progress.poll()
    clock.now += 500.0
    assert drawn(progress, 100) == [
        "bare/20260101-000000-aaaaaa",
        f"{'━' * 25} starting the ranks 8:20",
        "no first step for 500 s; stacks will be taken at 900 s",
    ]
    assert drawn(progress, 30)[1] == f"{'━' * 7} starting the ranks 8:…"
