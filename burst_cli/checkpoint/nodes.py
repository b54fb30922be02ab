"""The checkpoints of a run over SSH, on the disks of its nodes: asked for, and one of them brought here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from cluster.launch.runner import runner_of
from cluster.node_checkpoints import NodeCheckpoints, ask_nodes
from cluster.plan import LaunchPlan, PlanFileError, read_launch_plan, roots_of
from cluster.ssh.nodes import fold_nodes
from engine.runs.commit import Checkpoint, checkpoints_folder, list_checkpoints
from engine.runs.folder import RunFolder, typed_overrides
from engine.runs.manifest import CheckpointError


def plan_of_nodes(run: RunFolder) -> LaunchPlan | None:
    """The plan of a run whose checkpoints lie on its nodes; None where this machine sees the folder they are in."""
    try:
        plan = read_launch_plan(run.path)
    except PlanFileError:
        return None
    settings = plan.config.train.checkpoint
    is_seen = settings.folder is not None and list_checkpoints(checkpoints_folder(settings, run.path))
    return None if not runner_of(plan).takes_nodes or is_seen else plan


@contextlib.contextmanager
def on_nodes(run: RunFolder, console: Console) -> Iterator[NodeCheckpoints]:
    """What the nodes of `run` hold, for as long as the connections to them are open; nothing for a run without any."""
    plan = plan_of_nodes(run)
    if plan is None:
        yield NodeCheckpoints((), {})
        return
    from cluster.ssh.pool import SshPool
    from cluster.ssh.resolve import resolve_hosts

    hosts = resolve_hosts([node.name for node in plan.nodes], plan.config.cluster.ssh, typed_overrides(run.path))
    with SshPool() as pool:
        with console.status(f"asking {len(hosts)} nodes"):
            answer = ask_nodes(hosts, roots_of(plan), pool.connect)
        for name, error in answer.errors.items():
            text = error if error.startswith(name) else f"{name}: {error}"
            console.print(Text(f"not asked for checkpoints: {text}", style="yellow"), soft_wrap=True)
        yield answer


def bring(run: RunFolder, step: int | None, console: Console) -> Checkpoint | None:
    """The checkpoint of `step`, or the newest whole one, brought from the nodes of `run` unless it is here already.

    None where its nodes have nothing to do with it: this machine sees its checkpoints, or has some and no node has a
    whole one. Raises CheckpointError when there is none to be had.
    """
    if plan_of_nodes(run) is None:
        return None
    here = {one.step: one for one in list_checkpoints(run.path / "checkpoints")}
    if step in here:
        return here[step]
    with on_nodes(run, console) as answer:
        chosen = next((one for one in answer.found if one.problem is None and step in (None, one.step)), None)
        if chosen is None and step is None and here:
            return None
        if chosen is None or chosen.manifest is None:
            raise CheckpointError(_none_whole(run, answer, step))
        if chosen.step in here:
            return here[chosen.step]
        with progress_bar(console, f"step {chosen.step} from {chosen.nodes}", chosen.manifest.bytes) as advance:
            return Checkpoint(chosen.step, chosen.fetch(run.path / "checkpoints", advance))


def _none_whole(run: RunFolder, answer: NodeCheckpoints, step: int | None) -> str:
    found = ", ".join(f"{one.step} ({one.problem})" if one.problem else str(one.step) for one in answer.found)
    silent = f"; no answer of {fold_nodes(sorted(answer.errors))}" if answer.errors else ""
    what = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
    return f"the nodes of run {run.run_id} have no {what}; they have: {found or 'none'}{silent}"


@contextlib.contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of so many bytes on `console` while it is needed; gives what it is told of more bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda size: progress.advance(task, size)
