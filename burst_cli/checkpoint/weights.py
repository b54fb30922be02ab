"""Where the weights of a run are, as its ranks know the path."""

from __future__ import annotations

from burst_cli.checkpoint.view import checkpoint_of_step
from cluster.control.runner import read_run_plan, runner_of
from cluster.plan import PlanFileError, roots_of
from engine.runs.checkpoints import CheckpointError, checkpoints_of, list_checkpoints
from engine.runs.folder import RunFolder


def weights_of(run: RunFolder, step: int | None) -> str:
    """The path of the run's checkpoints, or of that of `step`, as its ranks know it.

    Raises CheckpointError when there is none and this machine would know.
    """
    if (folder := _folder_on_nodes(run)) is not None:
        return folder if step is None else f"{folder}/step-{step:08d}"
    root = checkpoints_of(run.path)
    if step is not None:
        return str(checkpoint_of_step(run, step).path.absolute())
    if not list_checkpoints(root):
        raise CheckpointError(
            f"run {run.run_id} has no checkpoint under {root}, so there are no weights to take; name a run that "
            "was launched with train.checkpoint.at_end=true"
        )
    return str(root.absolute())


def _folder_on_nodes(run: RunFolder) -> str | None:
    """Where the nodes of a run over SSH keep its checkpoints, each in its own home where that is meant; None where they
    keep them in the folder we see."""
    try:
        plan = read_run_plan(run.path)
    except PlanFileError:
        return None
    if not plan.has_separate_folders:
        return None
    if plan.config.train.checkpoint.folder is not None or not runner_of(plan).takes_nodes:  # all of them the same
        return roots_of(plan)[plan.nodes[0].name]
    root = plan.config.cluster.node_folder or "~/.burst"
    return f"{root.rstrip('/')}/runs/{run.run_id}/checkpoints"
