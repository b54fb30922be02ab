"""The block that a failed run gets: place, memory, stacks, checkpoint, and nothing of the ranks that is markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from testkit.fake_plan import TWO_RANKS, fake_plan

from burst_cli.runs.failure import failure_block, memory_line
from cluster.control.judge import last_checkpoint
from cluster.failure import Failure
from cluster.plan import LaunchPlan
from engine.config.settings import CheckpointConfig, RunConfig, TrainConfig
from engine.runs.folder import RunFolder, create_run

GIB = 2**30
RUN = RunFolder(Path("/runs/tiny/20260101-000000-abcdef"))
MEMORY = {
    "where": "device",
    "device": "cuda:1",
    "peak_bytes": 75 * GIB,
    "peak_source": "CUDA caching allocator, peak of this step",
    "asked_bytes": 6 * GIB,
    "capacity_bytes": 80 * GIB,
    "predicted_peak_bytes": 78 * GIB,
}


def test_what_is_not_known_is_left_out() -> None:
    unknown = dict.fromkeys(("asked_bytes", "capacity_bytes", "predicted_peak_bytes"))
    line = memory_line({**MEMORY, **unknown, "peak_bytes": None})
    assert line.startswith("cuda:1: peak ")
    assert not any(words in line for words in ("of 80", "asked", "predicted", "None"))


def test_block_has_place_memory_and_the_recorded_advice() -> None:
    failure = Failure("oom", "OutOfMemoryError", "full", 3, "node1", 7, "backward", memory=MEMORY, advice="Use less.")
    text = failure_block(RUN, failure).plain
    assert text.startswith("OOM tiny/20260101-000000-abcdef: rank 3 on node1, step 7, phase backward\n")
    assert (
        "  memory: cuda:1: peak 75 GiB of 80 GiB (CUDA caching allocator, peak of this step), 6 GiB more asked for, "
        "predicted peak 78 GiB\n"
    ) in text
    assert text.endswith("what to do: Use less.")


def test_rank_that_was_killed_is_placed_after_the_last_step_that_is_known() -> None:
    failure = Failure("oom", "OutOfMemory", "full", 3, "node1", 7, "train", signal="SIGKILL")
    assert "after step 7" in failure_block(RUN, failure).plain


def test_hang_shows_where_the_rank_is_its_stacks_and_no_log() -> None:
    details = ("File train.py, line 3 in step\x1b[31m", "File [bold]x[/bold]")
    message, log = "no step for 31 s: rank 3 on node1 is stopped", "/l/rank0003.log"
    place = ("node1", 7, "forward")
    failure = Failure(
        "hang", "Hang", message, 3, *place, log=log, stacks="/l/rank0003.stacks", details=details, advice="Read it."
    )
    text = failure_block(RUN, failure).plain
    assert "rank 3 on node1, step 7, phase forward" in text
    assert "  no step for 31 s" in text
    assert "  │ File train.py, line 3 in step\n" in text
    assert "[bold]x[/bold]" in text
    assert "stacks of the rank /l/rank0003.stacks" in text
    assert "rank0003.log" not in text


def test_lost_node_is_the_place() -> None:
    text = failure_block(RUN, Failure("node_lost", "NodeLost", "nothing was heard of it", host="node2")).plain
    assert text.startswith("FAILED tiny/20260101-000000-abcdef: on node2\n  nothing was heard of it\n")


def plan_of(run: RunFolder, settings: CheckpointConfig) -> LaunchPlan:
    return fake_plan(run.path, RunConfig(train=TrainConfig(checkpoint=settings), cluster=TWO_RANKS.cluster))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_last_checkpoint_is_named(tmp_path: Path, elsewhere: bool) -> None:
    run = RunFolder(tmp_path / "runs/tiny/20260101-000000-abcdef")
    root = tmp_path / "shared" / run.path.name if elsewhere else run.path / "checkpoints"
    for name, is_whole in (("step-00000900", True), ("step-00001200", True), ("step-00001500", False)):
        (root / name).mkdir(parents=True)
        if is_whole:
            (root / name / "MANIFEST.json").write_text("{}")
    found = last_checkpoint(run, plan_of(run, CheckpointConfig(folder=str(tmp_path / "shared") if elsewhere else None)))
    assert found == str(root / "step-00001200")
    failure = Failure("node_lost", "NodeLost", "gone", host="node2", checkpoint=found)
    assert f"last checkpoint {found}" in failure_block(run, failure).plain


def test_last_checkpoint_on_nodes_is_named_by_what_the_ranks_told_in_any_attempt(tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs/tiny/20260101-000000-abcdef", {})
    plan = plan_of(run, CheckpointConfig(folder="~/saved"))
    plan = replace(plan, launcher="ssh", nodes=tuple(replace(node, folder="/of/the/node") for node in plan.nodes))
    assert last_checkpoint(run, plan) is None
    for step in (900, 1200):
        run.append_event("checkpoint", step=step)
    run.transition("failed")
    run.transition("starting")
    node = plan.nodes[0].name
    assert last_checkpoint(run, plan) == f"~/saved/{run.run_id}/step-00001200 on {node}"
    fetched = run.path / "checkpoints" / "step-00000900"
    fetched.mkdir()
    (fetched / "MANIFEST.json").write_text("{}")
    own = replace(plan, config=replace(plan.config, train=TrainConfig()))
    assert last_checkpoint(run, own) == f"{plan.nodes[0].folder}/checkpoints/step-00001200 on {node}"
