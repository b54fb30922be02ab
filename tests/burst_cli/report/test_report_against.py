"""What runs are held against: a baseline, conditions that fail a report in CI, cells of a sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, variant

from burst_cli.report.against import judge, parse_gates
from burst_cli.report.build import Request, build_report
from burst_cli.report.panels import group_panels, style_numbers
from burst_cli.report.write import report_page
from engine.config.errors import ConfigError
from engine.runs.summary import config_facts

SPEED = "tokens_per_s_per_device"


# --- baselines --------------------------------------------------------------------------------------------------------


def test_ratios_are_against_the_baseline_of_the_same_length_with_the_quartiles_of_both(methods_dir: Path) -> None:
    found = build_report(Request(methods_dir, baseline="ring"))
    ratios = {(one["attention_preset"], one["seq_len"]): one.get(f"ratio_{SPEED}") for one in found.records}
    assert ratios == {
        ("ring", 512): 1.0,
        ("burst", 512): pytest.approx(2005 / 1005),
        ("ulysses", 512): pytest.approx(1505 / 1005),
        ("ring", 1024): 1.0,
        ("burst", 1024): pytest.approx(1005 / 505),
        ("ulysses", 1024): None,
    }
    burst = next(record for record in found.records if record["attention_preset"] == "burst")
    interval = (burst[f"ratio_{SPEED}_low"], burst[f"ratio_{SPEED}_high"])
    assert interval == pytest.approx((2003.5 / 1006.5, 2006.5 / 1003.5))


def test_a_run_may_be_the_baseline_even_one_that_is_not_shown(methods_dir: Path) -> None:
    found = build_report(Request(methods_dir, names=("20260101-000002",), baseline="20260101-000001"))
    assert found.records[0][f"ratio_{SPEED}"] == pytest.approx(2005 / 1005)
    assert found.baseline is not None
    assert found.baseline.name == "tiny/20260101-000001-000001"


def test_baselines_that_give_nothing_say_so(methods) -> None:
    other_length = methods("20260101-000002", "--baseline", "20260101-000004")
    assert (other_length.code, "no run has its model, seq_len, ranks and hardware" in other_length.err) == (0, True)
    unknown = methods("--baseline", "rings")
    assert unknown.code == 2
    assert "did you mean ring?" in unknown.err
    assert "burst/full, ring/full, ulysses/full" in unknown.err


def test_baseline_columns_are_in_the_table_only_then(methods) -> None:
    shown = methods("--format", "md", "--columns", "attention,ratio_tokens_per_s_per_device,ratio_peak_memory_bytes")
    assert "| ring | – | – |" in shown.out
    shown = methods("20260101-000002", "--format", "md", "--baseline", "20260101-000001")
    assert "| speed | memory |" in shown.out
    assert "\nspeed, memory: against tiny/20260101-000001-000001 at the same length, with" in shown.out
    assert "| 2× (1.99×…2×) | 1× |" in shown.out
    assert "| speed |" not in methods("--format", "md").out


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "limit", "of"),
    [
        ("mfu=40%", 0.4, None),
        ("tokens_per_s=1.5K", 1500, None),
        ("peak_memory_bytes=70GiB", 70 * 2**30, None),
        ("peak_memory_bytes=70GB", 70e9, None),
        ("step_time_s=-1e-3", -0.001, None),
        ("mfu=90%ofring", 0.9, "ring"),
        ("mfu = 0.9 of burst/attn_out", 0.9, "burst/attn_out"),
    ],
)
def test_limits_are_read_with_their_units(words: str, limit: float, of: str | None) -> None:
    (gate,) = parse_gates([words], [])
    assert (gate.limit, gate.of) == (pytest.approx(limit), of)


@pytest.mark.parametrize("words", ["mfu", "mfu=", "mfu=fast", "mfu=90%of", "mfu=1 parsec", "=3of"])
def test_limits_that_mean_nothing_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="expected METRIC=VALUE"):
        parse_gates([words], [])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--fail-below", "mfu=6%"), 1),
        (("--fail-above", "mfu=6%"), 1),
        (("--fail-above", "mfu=30%", "--fail-below", "mfu=4%"), 0),
        (("--fail-below", "mfu=4%", "--fail-below", "hfu=99%"), 1),
        (("--fail-below", f"{SPEED}=140%ofring"), 0),
        (("--fail-below", f"{SPEED}=160%ofring"), 1),
        (("--fail-below", f"{SPEED}=140%ofbaseline", "--baseline", "ring"), 0),
    ],
)
def test_gates_decide_the_exit_code(methods, arguments: tuple[str, ...], code: int) -> None:
    result = methods("--status", "completed", *arguments)
    assert (result.code, "failed: " in result.err) == (code, bool(code))


@pytest.mark.parametrize("words", [(["mfu=25%"], []), ([], ["mfu=25%"])], ids=["below", "above"])
@pytest.mark.parametrize(("value", "passes"), [(0.25, (True, True)), (0.26, (True, False)), (0.24, (False, True))])
def test_a_figure_exactly_at_its_limit_passes(
    words: tuple[list[str], list[str]], value: float, passes: tuple[bool, bool]
) -> None:
    record = {"run_id": "20260101-000000-aaaaaa", "exp": "tiny", "status": "completed", "mfu": value}
    (verdict,) = judge(parse_gates(*words)[0], [record], None)
    assert verdict.passed is passes[bool(words[1])]


def test_what_was_not_shown_to_pass_fails(burst, methods) -> None:
    result = methods("--fail-below", "mfu=1%", "--json")
    gates = json.loads(result.out)["gates"]
    assert result.code == 1
    assert [(gate["status"], gate["passed"]) for gate in gates].count(("oom", False)) == 1
    assert sum(gate["passed"] for gate in gates) == 5
    nothing = burst("report", "--fail-below", "mfu=1%")
    assert (nothing.code, "no run" in nothing.err) == (1, True)


@pytest.mark.parametrize(
    ("gate", "words"),
    [(f"{SPEED[:-2]}se=3", f"did you mean {SPEED}?"), ("mfu=90%ofbaseline", "--baseline METHOD or RUN")],
)
def test_gates_that_cannot_be_judged_are_refused(methods, gate: str, words: str) -> None:
    refused = methods("--fail-below", gate)
    assert (refused.code, words in refused.err) == (2, True)


def test_page_is_written_before_a_gate_fails(methods, tmp_path: Path) -> None:
    assert methods("--output", str(tmp_path / "r.html"), "--fail-below", "mfu=99%").code == 1
    assert "gate checks failed" in (tmp_path / "r.html").read_text(encoding="utf-8")


# --- sweeps: every cell is a row, also the ones that never ran --------------------------------------------------------


def cell(name: str, preset: str, seq_len: int, run: Path | None = None, **facts: Any) -> dict[str, Any]:
    known = config_facts(replace(variant(preset, seq_len), exp="tiny"))
    path = str(run) if run else None
    return {"id": name, "exp": "tiny", "facts": known, "run_path": path, **facts}


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    first = make_run(folder, "tiny/20260101-000001-aaaaaa", config=variant("ring", 512))
    make_run(folder, "tiny/20260101-000002-bbbbbb", config=variant("burst", 512))
    lost = make_run(folder, "tiny/20260101-000003-cccccc", config=variant("burst", 1024), final="oom", steps=0)
    make_run(folder, "tiny/20260101-000004-dddddd", config=variant("ulysses", 512))
    cells = [
        cell("c1", "ring", 512, first.path),
        cell("c2", "burst", 512, Path("tiny/20260101-000002-bbbbbb")),
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


def test_every_cell_is_a_row_of_one_group_in_table_page_and_plots(
    burst, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = build_report(Request(runs_dir, sweep="lengths-12ab", is_page=True))
    states = ["completed", "completed", "oom", "not run", "oom", "missing"]
    assert [(one["cell"], one["status"]) for one in found.records] == [
        (f"c{number}", state) for number, state in enumerate(states, start=1)
    ]
    (group,) = found.groups
    assert found.sweep_line == "sweep lengths-12ab, 6 cells: 2 completed, 2 oom, 1 not run, 1 missing"
    page = report_page(found)[0]
    assert [text for text in (">not run<", ">missing<", "needs 90 GiB") if text not in page] == []
    panels = group_panels(group.records, style_numbers(found.records))
    assert {(name, length) for name, _, length in panels[0].missing} == {("burst/full", 1024), ("ring/full", 2048)}
    output = burst("report", "--sweep", "12ab").out
    assert ("cell c4" in output, "not run" in output) == (True, True)
    monkeypatch.setenv("COLUMNS", "90")
    assert "cell c4" in burst("report", "--sweep", "12ab").out  # no id of a run that might be shortened


def test_json_keeps_runs_and_cells_apart(burst, runs_dir: Path) -> None:
    document = json.loads(burst("report", "--sweep", "lengths-12ab", "--json").out)
    assert [bool(run["run_id"]) for run in document["runs"]] == [True] * 3
    assert [one["run_id"] for one in document["sweep"]["cells"]][3:] == [None, None, None]
    assert document["sweep"]["states"] == {"completed": 2, "oom": 2, "not run": 1, "missing": 1}
    assert len(json.loads(burst("report", "--sweep", "lengths", "--status", "oom", "--json").out)["runs"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lengthz",), "did you mean lengths-12ab?"),
        (("l",), "2 sweeps are meant"),
        (("broken",), "damaged"),
        (("none",), "does not describe a sweep"),
        (("lengths", "--latest"), "all cells of a sweep"),
    ],
)
def test_sweeps_that_cannot_be_shown_are_named(burst, runs_dir: Path, words: tuple[str, ...], said: str) -> None:
    write(runs_dir, "lx", {"cells": []})
    write(runs_dir, "none", {"cells": "many"})
    (runs_dir / "sweeps/broken").mkdir()
    (runs_dir / "sweeps/broken/sweep.json").write_text("{")
    result = burst("report", "--sweep", *words)
    assert (result.code, said in result.err) == (2, True)


def test_damaged_cells_are_counted_and_the_rest_is_shown(burst, runs_dir: Path) -> None:
    good = {"id": None, "facts": [], "state": 3, "run_path": ["x"], "result": "y"}
    write(runs_dir, "odd", {"cells": [good, 7, None]})
    result = burst("report", "--sweep", "odd")
    assert (result.code, "2 cells are damaged" in result.err, "cell None" in result.out) == (0, True, True)
