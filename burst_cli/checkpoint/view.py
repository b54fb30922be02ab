"""What a run has saved, here and on the disks of its nodes: manifests read, files compared, brought here, deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from burst_cli.render import listing, say
from cluster.control.runner import read_run_plan, runner_of
from cluster.node_checkpoints import NodeCheckpoint, NodeCheckpoints, ask_nodes
from cluster.plan import LaunchPlan, PlanFileError, roots_of
from cluster.ssh.hosts import fold_nodes
from engine.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    Manifest,
    checkpoints_folder,
    checkpoints_of,
    list_checkpoints,
    open_checkpoint,
    superfluous,
    verify_files,
)
from engine.runs.figures import DASH, binary_bytes, count
from engine.runs.files import remove_folder
from engine.runs.folder import FINAL_STATES, RunFolder, typed_overrides


@dataclass(frozen=True)
class HereCheckpoint:
    """A checkpoint on this machine, which is asked as one on nodes is. problem: why its manifest cannot be read."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None = None
    nodes = None

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(child.stat().st_size for child in self.path.iterdir() if child.is_file())

    def verify(self, advance: Callable[[int], None]) -> str | None:
        """What differs from the manifest; None: nothing does."""
        if self.manifest is not None:
            try:
                verify_files(self.path, self.manifest, advance=advance)
            except CheckpointError as error:
                return str(error)
        return self.problem

    def remove(self) -> None:
        """Delete it. Raises CheckpointError."""
        try:
            remove_folder(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be deleted: {error.strerror}") from error


AnyCheckpoint = HereCheckpoint | NodeCheckpoint
CheckpointT = TypeVar("CheckpointT", HereCheckpoint, NodeCheckpoint)


def checkpoints_here(run: RunFolder) -> list[HereCheckpoint]:
    """The run's checkpoints on this machine, newest first."""
    found = []
    for checkpoint in list_checkpoints(checkpoints_of(run.path)):
        try:
            found.append(HereCheckpoint(checkpoint.step, checkpoint.path, open_checkpoint(checkpoint)))
        except CheckpointError as error:
            found.append(HereCheckpoint(checkpoint.step, checkpoint.path, None, str(error)))
    return found


def checkpoint_of_step(run: RunFolder, step: int | None) -> HereCheckpoint:
    """The run's checkpoint of `step`, or its newest, on this machine. Raises CheckpointError when there is none."""
    known = checkpoints_here(run)
    for checkpoint in known:
        if step in (None, checkpoint.step):
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in known)
    raise CheckpointError(f"run {run.run_id} has no checkpoint" + (f" of step {step}; it has {steps}" if steps else ""))


def compared(one: AnyCheckpoint, console: Console) -> str | None:
    """What is wrong with it, every file read where it lies, which a bar on `console` shows; None: nothing is."""
    with progress_bar(console, f"step {one.step}", one.manifest.bytes if one.manifest else 0) as advance:
        return one.verify(advance)


def newest_undamaged(found: Iterable[CheckpointT], console: Console) -> CheckpointT | None:
    """The first of `found` that is as it was written; damaged ones are named on `console`."""
    for one in found:
        problem = compared(one, console)
        if problem is None:
            return one
        where = " on nodes" if one.nodes else ""
        say(console, Text(f"step {one.step}{where} is passed over: {problem}", "yellow"))
    return None


def plan_of_nodes(run: RunFolder) -> LaunchPlan | None:
    """The plan of a run whose checkpoints lie on its nodes; None where this machine sees the folder they are in."""
    try:
        plan = read_run_plan(run.path)
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
    from cluster.ssh.hosts import resolve_hosts
    from cluster.ssh.session import SshPool

    hosts = resolve_hosts([node.name for node in plan.nodes], plan.config.cluster, typed_overrides(run.path))
    with SshPool() as pool:
        with console.status(f"asking {len(hosts)} nodes"):
            answer = ask_nodes(hosts, roots_of(plan), pool.connect)
        for name, error in answer.errors.items():
            text = error if error.startswith(name) else f"{name}: {error}"
            say(console, Text(f"not asked for checkpoints: {text}", style="yellow"))
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
    """A bar of `total` bytes, drawn where `console` is a terminal; gives a function that advances it by some bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda size: progress.advance(task, size)


def examine(run: RunFolder, *, verify: bool, console: Console) -> list[dict[str, Any]]:
    """The run's checkpoints as JSON values, newest first, those here before those on its nodes.

    verify: with every file read where it lies. verified: whether that was done and nothing differs; problem: what does.
    path: of its folder on this machine, or in that of the run on `nodes`; nodes: who holds its parts, None: here.
    """
    with on_nodes(run, console) as answer:
        found: list[AnyCheckpoint] = [*checkpoints_here(run), *answer.found]
        return [_entry(one, verify, console) for one in sorted(found, key=lambda one: -one.step)]


def _entry(one: AnyCheckpoint, verify: bool, console: Console) -> dict[str, Any]:
    is_here, known = isinstance(one, HereCheckpoint), one.manifest
    problem = compared(one, console) if verify else one.problem
    tokens = known.state.get("tokens") if known else None
    return {
        "step": one.step,
        "path": str(one.path) if isinstance(one, HereCheckpoint) else f"checkpoints/step-{one.step:08d}",
        "nodes": None if is_here else one.nodes or "nodes",
        "saved_at": known.saved_at if known else None,
        "bytes": known.bytes if known else None,
        "tokens": tokens if isinstance(tokens, int) else None,
        "ranks": len(known.files) if known else None,
        "verified": verify and problem is None,
        "problem": problem,
    }


def checkpoints_table(entries: Sequence[dict[str, Any]]) -> Table:
    """One row per checkpoint."""
    rows = [
        (
            str(one["step"]),
            count(one["tokens"]),
            binary_bytes(one["bytes"]),
            DASH if one["ranks"] is None else str(one["ranks"]),
            one["saved_at"] or DASH,
            one["nodes"] or "here",
            Text(one["problem"], "red") if one["problem"] else Text("as it was written" * one["verified"], "green"),
        )
        for one in entries
    ]
    numbers = ("step", "tokens", "size", "ranks")
    return listing((*numbers, "saved", "where", ""), rows, numbers)


def prune_run(
    run: RunFolder,
    away: NodeCheckpoints,
    *,
    keep_last: int,
    keep_every: int | None,
    dry_run: bool,
    console: Console,
) -> dict[str, Any]:
    """Delete all but the newest `keep_last`, multiples of `keep_every` and the newest undamaged ones: of those here and
    those on its nodes (`away`), which count as one where they are of the same step. Gives what went and what stays.

    Raises CheckpointError while the run has not ended, where a node does not answer, and for the first that cannot be
    deleted.
    """
    if run.read_state()["state"] not in FINAL_STATES:
        raise CheckpointError(
            f"run {run.run_id} has not ended and keeps its own checkpoints (train.checkpoint.keep_last); "
            "wait for its end, or `burst cancel` it"
        )
    if away.errors:
        raise CheckpointError(
            f"no answer of {fold_nodes(sorted(away.errors))}, so nothing is deleted: which checkpoints are whole is "
            "not known; try again when all nodes of the run answer"
        )
    here = checkpoints_here(run)
    found: list[AnyCheckpoint] = [*here, *away.found]
    kept = [one.step for one in (newest_undamaged(here, console), newest_undamaged(away.found, console)) if one]
    steps = sorted({one.step for one in found}, reverse=True)
    gone = superfluous(steps, keep_last=keep_last, keep_every=keep_every, protected=kept)
    leaving = [one for one in found if one.step in gone]
    freed = sum(one.size for one in leaving)
    for one in leaving if not dry_run else ():
        one.remove()
    stay = [step for step in steps if step not in gone]
    return {"run_id": run.run_id, "removed": gone, "kept": stay, "freed_bytes": freed, "dry_run": dry_run}


def pruned_text(result: dict[str, Any]) -> str:
    """What was done, for people."""
    if not result["removed"]:
        return f"nothing to delete; kept: {_steps(result['kept'])}"
    did = "would delete" if result["dry_run"] else "deleted"
    size = binary_bytes(result["freed_bytes"])
    return f"{did} {_steps(result['removed'])}, {size}; kept: {_steps(result['kept'])}"


def _steps(steps: Sequence[int]) -> str:
    return f"step {', '.join(map(str, sorted(steps)))}" if steps else "none"
