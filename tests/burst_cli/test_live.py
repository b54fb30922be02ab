from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from testkit.clock import Clock

from burst_cli.runs.live import PLAIN_INTERVAL_S, PlainView, open_view
from burst_cli.runs.progress import RunProgress
from engine.runs.folder import RunFolder, create_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "tiny" / "20260101-000000-aaaaaa", {})


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, highlight=False)


def written(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def step(run: RunFolder, number: int, **more: float) -> None:
    run.append_metrics({"step": number, "loss": 2.5, "step_time_s": 2.0, "tokens_per_s": 12_345.0, "mfu": 0.25, **more})


def test_phase_is_shown_until_the_first_step(run: RunFolder) -> None:
    progress = RunProgress(run, 10)
    assert progress.phase == "starting the ranks"
    run.append_event("phase", phase="build model")
    run.append_event("other", phase="not a phase")
    assert progress.poll() is True
    assert (progress.phase, progress.step, progress.remaining_s()) == ("build model", 0, None)
    assert progress.poll() is False


def test_unknown_figures_are_none_and_damaged_rows_are_ignored(run: RunFolder) -> None:
    progress = RunProgress(run, 10)
    run.append_metrics({"loss": 1.0})
    run.append_metrics({"step": 1, "loss": None, "mfu": "high"})
    progress.poll()
    assert (progress.step, progress.figure("mfu"), progress.losses) == (1, None, [])


def test_plain_view_prints_figures_every_few_seconds_and_at_the_end(run: RunFolder) -> None:
    clock, target = Clock(), console(terminal=False)
    view = PlainView(target, RunProgress(run, 4, clock), clock)
    for number in (1, 2, 3):
        step(run, number)
        view.tick()
        if number == 2:
            clock.now += PLAIN_INTERVAL_S
    step(run, 4, validation_loss=2.0, validation_bits_per_byte=1.5)
    view.tick()
    view.tick()
    lines = written(target).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["starting the ranks", "step 1/4", "step 3/4", "step 4/4"]
    assert "loss 2.5000  12.3K tokens/s  MFU 25%  memory –  left 0:06" in lines[1]
    assert lines[-1].endswith("validation loss 2.0000  bits/byte 1.5000")


def test_plain_view_shows_phases_warnings_and_stops_without_escapes(run: RunFolder) -> None:
    target = console(terminal=False)
    view = PlainView(target, RunProgress(run, 4))
    run.append_event("phase", phase="build\x1b[31m model")
    run.append_event("warning", message="mfu [b]above[/b] 1")
    facts = {"reason": "the loss is nan", "reaction": "skip", "first_sample": 8, "last_sample": 11}
    run.append_event("dropped", step=3, **facts)
    view.tick()
    view.stopping("Ctrl-C", 12.0)
    text = written(target)
    assert "build model\n" in text
    assert "warning: mfu [b]above[/b] 1\n" in text
    assert "warning: step 3 is dropped (skip): the loss is nan; samples 8 to 11\n" in text
    assert "killing what is left after 12 s; press Ctrl-C again" in text


def test_live_block_shows_bar_figures_and_sparkline(run: RunFolder) -> None:
    target = console(terminal=True)
    for number in range(1, 4):
        step(run, number, peak_memory_bytes=2**30, loss=5.0 - number, validation_bits_per_byte=1.5, validation_loss=1.0)
    run.append_event("warning", message="clocks are odd")
    run.append_event("phase", phase="evaluate")
    with open_view(target, RunProgress(run, 4)) as view:
        view.tick()
        view.stopping("SIGTERM", 12.0)
    text = written(target)
    for part in (
        "step 3/4",
        "2.0000",
        "█▅▁",
        "12.3K",
        "25%",
        "1 GiB",
        "1.5000",
        "evaluate",
        "clocks are odd",
        "SIGTERM: stopping",
    ):
        assert part in text
