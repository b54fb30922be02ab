"""A sweep as people see it: before it starts, while its cells run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from testkit.run_maker import make_run
from testkit.terminal import StrictConsole, lines_of, styled

from burst_cli.plan.memory_check import Estimate
from burst_cli.sweep.plan import Cell, SweepPlan
from burst_cli.sweep.view import SweepView, expectation, plan_view
from engine.config.settings import RunConfig
from engine.runs.record import config_facts

CONFIG = RunConfig(exp="tiny")
CELLS = (
    Cell("c1", ("train.seq_len=512",), {"train.seq_len": "512"}, CONFIG, estimate=Estimate(512.0, 4, "a guess")),
    Cell("c2", ("train.seq_len=513",), {"train.seq_len": "513"}, problems=("it is odd", "it is [b]bad[/b]")),
    Cell("c3", ("train.seq_len=8K",), {"train.seq_len": "8K"}, CONFIG, (), "too long", Estimate(9.0, 4, "another")),
    Cell("c4", ("train.seq_len=64",), {"train.seq_len": "64"}, CONFIG, estimate=Estimate(64.0, 4, "hearsay", 2.0)),
)
PLAN = SweepPlan("lab-1", ("exp=tiny", "train.seq_len=512,513,8K,64"), CELLS)


def test_a_plan_is_its_cells_what_each_takes_and_all_of_them_together() -> None:
    assert lines_of(plan_view(PLAN, 2)) == [
        "cell train.seq_len expected device hours",
        "c1 512 8:32 0.569",
        "c2 513 – – it is odd",
        "c3 8K – – too long",
        "c4 64 1:04 0.0711",
        "2 of 4 cells will run, 2 at a time; about 8:32, 0.64 device hours",
        "by a guess and 1 more",
    ]
    colours = {("it is odd", "red"), ("too long", "magenta"), ("by a guess and 1 more", "dim")}
    assert colours <= {*styled(plan_view(PLAN, 2))}
    unknown = SweepPlan("lab-1", (), (CELLS[0], Cell("c5", (), {}, CONFIG)))
    assert lines_of(expectation(unknown, 1), expectation(SweepPlan("", (), CELLS[1:3]), 1)) == [
        "2 of 2 cells will run; no estimate of time: a step of 1 of them cannot be predicted from here",
        "0 of 2 cells will run",
    ]


def test_the_document_of_a_plan_has_every_cell() -> None:
    document, facts = PLAN.to_dict(), config_facts(CONFIG)
    cells = document.pop("cells")
    assert document == {"sweep_id": "lab-1", "overrides": ["exp=tiny", "train.seq_len=512,513,8K,64"]}
    guess = {"seconds": 512.0, "devices": 4, "source": "a guess", "step_s": 0.0, "start_s": None}
    guess["device_hours"] = 512 * 4 / 3600
    words = [{"id": cell.cell_id, "overrides": [*cell.overrides], "values": cell.values} for cell in CELLS]
    legal = {"exp": "tiny", "facts": facts, "problems": [], "short_of_memory": None}
    bad = {"exp": None, "facts": {}, "problems": ["it is odd", "it is [b]bad[/b]"], "short_of_memory": None}
    assert cells[0] == {**words[0], **legal, "estimate": guess}
    assert cells[1] == {**words[1], **bad, "estimate": None}
    assert (cells[2]["short_of_memory"], cells[3]["estimate"]["step_s"]) == ("too long", 2.0)


def cells(*states: str, **last: Any) -> list[dict[str, Any]]:
    """Recorded cells in these states."""
    results = {
        "completed": {"message": None},
        "failed": {"message": "no \x1b[31mhead"},
        "oom": {"predicted": True, "message": "big"},
    }
    found = [
        {"id": f"c{at}", "values": {"n": str(at)}, "state": state, "result": results.get(state)}
        for at, state in enumerate(states)
    ]
    return [*found[:-1], {**found[-1], **last}]


def test_lines_tell_every_change_of_a_cell_once_and_a_terminal_how_far_running_cells_are(tmp_path: Path) -> None:
    run, stream, shown = make_run(tmp_path, steps=2), io.StringIO(), list[str]()
    view = SweepView(StrictConsole(file=stream, width=100), lambda text: shown.append(str(text)))
    view.tick(cells("pending", "pending", "pending", "oom"))
    for _ in range(2):
        view.tick(cells("running", "failed", "pending", "oom"))
    view.tick(cells("completed", "failed", "illegal", "oom"))
    view.note("c9 still runs")
    view.tick(cells("completed", "running", "running", "running", run_path=str(run.path)))
    assert stream.getvalue().splitlines() == [
        "[4/4] n=3: oom (predicted)  big",
        "[1/4] n=0: running",
        "[2/4] n=1: failed  no head",
        "[1/4] n=0: completed",
        "[3/4] n=2: illegal",
        "c9 still runs",
        *(f"[{number}/4] n={number - 1}: running" for number in (2, 3, 4)),
    ]
    assert shown[0] == "1 of 4 cells done: 1 oom"
    assert shown[-1] == (
        "1 of 4 cells done: 1 completed; n=1: starting; n=2: starting; n=3: step 2, loss 2.0000, 512 tokens/s"
    )
