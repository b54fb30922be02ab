"""The moves of run.json that ranks make, with a launcher and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import ConfigError
from engine.runs.folder import RunFolder, create_run
from engine.training.rank.lifecycle import run_states
from engine.training.rank.process import RankStatus

LAUNCHED = {"BURST_RUN_ID": "x"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "exp" / "20260101-000000-abcdef", {"config.yaml": "{}\n"})


def states(run: RunFolder) -> list[str]:
    return [entry["state"] for entry in run.read_state()["history"]]


def fail(run: RunFolder, error: BaseException, *, rank: int = 0, environment: dict[str, str] | None = None) -> Any:
    """What run.json says then."""
    status = RankStatus()
    status.step, status.phase = 3, "train"

    def work() -> None:
        with run_states(run, status, rank=rank, environment=environment or {}):
            assert len(status.reserve or "") == 4 << 20
            raise error

    with pytest.raises(type(error)):
        work()
    assert environment or status.reserve is None  # given back, to say what went wrong
    return run.read_state()


@pytest.mark.parametrize(
    ("rank", "environment", "before", "moves"),
    [
        (0, {}, [], ["starting", "running", "completed"]),
        (0, LAUNCHED, ["starting"], ["starting", "running", "completed"]),
        (0, LAUNCHED, [], ["starting", "running", "completed"]),  # the commands of plan.sh
        (1, {}, [], []),
    ],
)
def test_rank_0_alone_makes_the_moves_that_a_launcher_has_not_made(
    run: RunFolder, rank: int, environment: dict[str, str], before: list[str], moves: list[str]
) -> None:
    for state in before:
        run.transition(state)
    with run_states(run, RankStatus(), rank=rank, environment=environment):
        assert rank == 1 or run.read_state()["state"] == "running"
    assert states(run) == ["planned", *moves]
    assert run.read_state()["exit_code"] == (None if rank else 0)


class OvertakenRun(RunFolder):
    """A run that another rank ends just before rank 0 says running."""

    def transition(self, state: str, **facts: Any) -> dict[str, Any]:
        if state == "running":
            super().transition("failed", failure={"message": "first"})
        return super().transition(state, **facts)


def test_failed_run_records_its_error_with_rank_step_phase(run: RunFolder) -> None:
    state = fail(run, ConfigError("no"), rank=1)
    assert state["state"] == "failed"
    assert state["exit_code"] == 2
    assert state["failure"] == {
        **{"kind": "config", "type": "engine.config.errors.ConfigError", "message": "no", "exit_code": 2},
        **{"memory": None, "rank": 1, "step": 3, "phase": "train", "advice": None},
    }


def test_later_errors_do_not_replace_the_first(run: RunFolder) -> None:
    fail(run, ConfigError("first"), rank=1)
    assert fail(run, RuntimeError("echo"), rank=1)["failure"]["message"] == "first"


def test_error_of_a_rank_that_was_overtaken_does_not_replace_the_first(run: RunFolder) -> None:
    assert fail(OvertakenRun(run.path), ConfigError("mine"))["failure"]["message"] == "first"


def test_failure_of_a_launched_run_is_left_to_its_launcher(run: RunFolder) -> None:
    run.transition("starting")
    assert fail(run, RuntimeError("broken"), environment=LAUNCHED)["state"] == "running"


def test_failure_for_lack_of_memory_has_measured_peaks(run: RunFolder) -> None:
    failure = fail(run, MemoryError("full"))["failure"]
    assert states(run)[-1] == "oom"
    assert failure["rank"] == 0
    assert failure["step"] == 3
    assert failure["memory"]["where"] == "host"
    assert failure["memory"]["peak_bytes"] > 2**20


def test_failure_for_lack_of_memory_has_advice(run: RunFolder) -> None:
    failure = fail(run, MemoryError("full"))["failure"]
    assert "cluster.ranks_per_node" in failure["advice"]
