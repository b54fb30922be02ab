"""`burst report --sweep`: every cell is a row, also the ones that never ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, variant

from engine.runs.record import config_facts


def cell(name: str, preset: str, seq_len: int, run: Path | None = None, **facts: Any) -> dict[str, Any]:
    known = config_facts(replace(variant(preset, seq_len), exp="tiny"))
    path = str(run) if run else None
    values = {"attention": preset, "train.seq_len": str(seq_len)}
    return {"id": name, "exp": "tiny", "values": values, "facts": known, "run_path": path, **facts}


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    first = make_run(folder, "tiny/20260101-000001-aaaaaa", config=variant("ring", 512))
    make_run(folder, "tiny/20260101-000002-bbbbbb", config=variant("burst", 512))
    lost = make_run(folder, "tiny/20260101-000003-cccccc", config=variant("burst", 1024), final="oom", steps=0)
    make_run(folder, "tiny/20260101-000004-dddddd", config=variant("ulysses", 512))
    cells = [
        cell("c1", "ring", 512, first.path),
        cell("c2", "burst", 512, Path("/as/it/was/runs/tiny/20260101-000002-bbbbbb")),
        cell("c3", "burst", 1024, lost.path),
        cell("c4", "ring", 1024),
        cell("c5", "ring", 2048, None, short_of_memory="needs 90 GiB"),
        cell("c6", "burst", 2048, folder / "tiny/20260101-999999-ffffff"),
    ]
    write(folder, "lengths-12ab", {"cells": cells})
    return folder


def write(runs_dir: Path, name: str, document: dict[str, Any]) -> None:
    folder = runs_dir / "sweeps" / name
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"format": 1, **document}))


def test_every_cell_of_a_sweep_is_in_the_report(burst, runs_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    document = json.loads(burst("report", "--sweep", "12ab", "--json", "--output", str(page)).out)
    states = ["completed", "completed", "oom", "pending", "oom", "pending"]
    assert [(one["cell"], one["status"]) for one in document["sweep"]["cells"]] == [
        (f"c{number}", state) for number, state in enumerate(states, start=1)
    ]
    assert [bool(run["run_id"]) for run in document["runs"]] == [True] * 3
    assert document["sweep"]["states"] == {"completed": 2, "oom": 2, "pending": 2}
    output = burst("report", "--sweep", "lengths-12ab").out
    assert "sweep lengths-12ab, 6 cells: 2 completed, 2 oom, 2 pending" in output
    assert output.count("×") == 1
    assert "cell c4 attention=ring train.seq_len=1024" in " ".join(output.split())
    html = page.read_text(encoding="utf-8")
    lost = ("burst/full ran out of memory at 1024 tokens", "ring/full ran out of memory at 2048 tokens", "needs 90 GiB")
    assert [words for words in lost if words not in html] == []


def test_damaged_sweeps_are_errors(burst, runs_dir: Path) -> None:
    write(runs_dir, "lx", {"cells": []})
    write(runs_dir, "none", {"cells": "many"})
    write(runs_dir, "odd", {"cells": [{}, 7]})
    (runs_dir / "sweeps/broken").mkdir()
    (runs_dir / "sweeps/broken/sweep.json").write_text("{")
    for words, said in [
        (("lengthz",), "did you mean lengths-12ab?"),
        (("l",), "2 sweeps are meant"),
        (("broken",), "damaged"),
        (("none",), "does not describe a sweep"),
        (("odd",), "does not describe a sweep"),
        (("lengths", "--latest"), "all cells of a sweep"),
    ]:
        result = burst("report", "--sweep", *words)
        assert (result.code, said in result.err) == (2, True)


def test_damaged_cells_are_shown(burst, runs_dir: Path) -> None:
    write(runs_dir, "cells", {"cells": [{"id": None, "facts": [], "state": 3, "run_path": ["x"], "result": "y"}]})
    assert "cell None" in burst("report", "--sweep", "cells").out
