"""The block that a failed run gets: place, memory, stacks, checkpoint, and nothing of the ranks that is markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from testkit.fake_plan import TWO_RANKS, fake_plan
from testkit.terminal import styled

from burst_cli.runs.failure import failure_block
from cluster.control.judge import last_checkpoint
from cluster.failure import Failure
from cluster.plan import LaunchPlan
from engine.config.settings import CheckpointConfig, RunConfig, TrainConfig
from engine.runs.folder import RunFolder, create_run

GIB = 2**30
NAME = "tiny/20260101-000000-abcdef"
RUN = RunFolder(Path("/runs") / NAME)
MEMORY = {
    **{"where": "device", "device": "cuda:1", "peak_bytes": 75 * GIB},
    **{"peak_source": "CUDA caching allocator, peak of this step", "requested_bytes": 6 * GIB},
    **{"capacity_bytes": 80 * GIB, "predicted_peak_bytes": 78 * GIB},
}


def block(**facts: Any) -> str:
    given = {"kind": "oom", "type": "OutOfMemoryError", "message": "full", "rank": 3, "host": "node1", "step": 7}
    return failure_block(RUN, Failure(**{**given, **facts})).plain


def test_block_of_an_out_of_memory_failure() -> None:
    assert block(phase="backward", memory=MEMORY, advice="Use less.") == (
        "OOM tiny/20260101-000000-abcdef: rank 3 on node1, step 7, phase backward\n"
        "  OutOfMemoryError: full\n"
        "  memory: cuda:1: peak 75 GiB of 80 GiB (CUDA caching allocator, peak of this step), 6 GiB more asked for, "
        "predicted peak 78 GiB\n"
        "  what to do: Use less."
    )
    unknown = dict.fromkeys(("requested_bytes", "capacity_bytes", "predicted_peak_bytes", "peak_bytes"))
    line = "memory: cuda:1: peak – (CUDA caching allocator, peak of this step)\n"
    assert block(memory={**MEMORY, **unknown}).endswith(line)
    failure = Failure("oom", "T", "full", details=("why",), checkpoint="/c", advice="Use less.")
    assert styled(failure_block(RUN, failure)) == [
        *(("OOM", "bold red"), (NAME, "bold"), ("T: full", "red"), ("│ why", "dim"), ("what to do:", "bold")),
    ]


def test_block_of_a_hang_has_stacks() -> None:
    details = ("File train.py, line 3 in step\x1b[31m", "File [bold]x[/bold]")
    told = {"message": "no step for 31 s", "phase": "forward", "details": details, "advice": "Read it."}
    assert block(kind="hang", log="/l/rank0003.log", stacks="/l/rank0003.stacks", **told).splitlines() == [
        "FAILED tiny/20260101-000000-abcdef: rank 3 on node1, step 7, phase forward",
        "  no step for 31 s",
        "  │ File train.py, line 3 in step",
        "  │ File [bold]x[/bold]",
        "  stacks of the rank /l/rank0003.stacks, those of the others beside it",
        "  what to do: Read it.",
    ]


def test_block_of_a_lost_node_names_it() -> None:
    nowhere = {"rank": None, "host": None, "step": None}
    text = block(kind="node_lost", message="nothing was heard of it", **{**nowhere, "host": "node2"})
    assert text == f"FAILED {NAME}: on node2\n  nothing was heard of it\n"


def test_block_of_other_failures_has_no_position() -> None:
    nowhere = {"rank": None, "host": None, "step": None}
    for kind in ("config", "user", "start", "hang", "node_lost", "port"):  # they explain themselves
        assert block(kind=kind, message="", log="/l/no.log", **nowhere) == f"FAILED {NAME}\n  (no message)\n"


def test_block_has_the_end_of_the_log(tmp_path: Path) -> None:
    nowhere = {"rank": None, "host": None, "step": None}
    told = f"FAILED {NAME}: rank 3 on node1, after step 7\n  OutOfMemoryError: full\n"
    assert block(kind="signal", log="/l/no.log") == f"{told}  log /l/no.log (empty)\n"
    assert "after step 7, phase train\n" in block(phase="train", signal="SIGKILL")  # the last step that is known
    said = block(kind="launcher", details=("why",), log="/l/no.log", **nowhere)
    assert said == f"FAILED {NAME}\n  full\n  │ why\n  log /l/no.log (empty)\n"
    (log := tmp_path / "rank.log").write_text("".join(f"{number} said\n\n" for number in range(10, 26)))
    lines = [f"  │ {number} said" for number in range(11, 26)]
    assert block(kind="signal", log=str(log)).splitlines()[2:] == [f"  last lines of {log}", *lines]
    log.write_text("one")
    assert block(kind="signal", log=str(log)).endswith("  │ one\n")


def plan_of(run: RunFolder, settings: CheckpointConfig) -> LaunchPlan:
    return fake_plan(run.path, RunConfig(train=TrainConfig(checkpoint=settings), cluster=TWO_RANKS.cluster))


def test_last_checkpoint_is_named(tmp_path: Path) -> None:
    for folder in (None, str(tmp_path / "shared")):
        run = RunFolder(tmp_path / "runs/tiny/20260101-000000-abcdef")
        root = Path(folder) / run.path.name if folder else run.path / "checkpoints"
        for name, is_whole in (("step-00000900", True), ("step-00001200", True), ("step-00001500", False)):
            (root / name).mkdir(parents=True)
            if is_whole:
                (root / name / "MANIFEST.json").write_text("{}")
        found = last_checkpoint(run, plan_of(run, CheckpointConfig(folder=folder)))
        assert found == str(root / "step-00001200")
        assert f"last checkpoint {found}" in block(checkpoint=found)


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
