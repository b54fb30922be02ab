"""`burst checkpoint`: what was saved is listed, compared and deleted, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.run_maker import make_run
from testkit.saved_checkpoints import FILE, save_checkpoint

from engine.runs.commit import list_checkpoints
from engine.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made: RunFolder = make_run(tmp_path / "runs", state="completed")
    for step in (10, 20, 30, 40):
        save_checkpoint(made.path / "checkpoints", step, tokens=1000 * step)
    return made


def steps(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.path / "checkpoints")]


def test_checkpoints_are_listed_newest_first(burst, run: RunFolder) -> None:
    result = burst("checkpoint", "list", run.run_id)
    rows = [line.split() for line in result.out.splitlines()[1:]]
    assert result.code == 0
    assert [row[:2] for row in rows] == [["40", "40K"], ["30", "30K"], ["20", "20K"], ["10", "10K"]]
    document = json.loads(burst("checkpoint", "list", "--json").out)
    newest = document["checkpoints"][0]
    assert (newest["step"], newest["bytes"], newest["ranks"]) == (40, 1000, 1)


def test_a_run_without_any_says_so(burst, tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs", state="completed")
    result = burst("checkpoint", "verify")
    assert (result.code, result.out.strip()) == (0, f"{made.exp}/{made.run_id} has no checkpoints.")


def test_damage_is_found_and_named(burst, run: RunFolder) -> None:
    (run.path / "checkpoints/step-00000030" / FILE).write_bytes(b"y" * 1000)
    assert burst("checkpoint", "list").code == 0
    result = burst("checkpoint", "verify", "--json")
    found = {one["step"]: (one["verified"], one["problem"]) for one in json.loads(result.out)["checkpoints"]}
    assert result.code == 1
    assert found[40] == (True, None)
    assert found[30][0] is False
    assert "SHA-256" in found[30][1]
    assert steps(run) == [40, 30, 20, 10]


def test_old_ones_go_and_a_rehearsal_changes_nothing(burst, run: RunFolder) -> None:
    rehearsed = burst("checkpoint", "prune", "--keep-every", "20", "--dry-run", "--json")
    assert json.loads(rehearsed.out)["removed"] == [10]
    assert steps(run) == [40, 30, 20, 10]
    result = burst("checkpoint", "prune", "--keep-every", "20")
    assert result.code == 0
    assert "deleted step 10" in result.out
    assert steps(run) == [40, 30, 20]
    assert "nothing to delete" in burst("checkpoint", "prune", "--keep-last", "3").out


def test_the_newest_undamaged_one_stays(burst, run: RunFolder) -> None:
    for step in (30, 40):
        (run.path / f"checkpoints/step-000000{step}" / FILE).write_bytes(b"")
    burst("checkpoint", "prune", "--keep-last", "1")
    assert steps(run) == [40, 20]


def test_a_living_run_is_left_alone(burst, tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs", state="running")
    save_checkpoint(made.path / "checkpoints", 1)
    result = burst("checkpoint", "prune", made.run_id)
    assert result.code == 1
    assert "has not ended" in result.err
