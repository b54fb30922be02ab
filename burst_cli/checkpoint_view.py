"""What `burst checkpoint` shows and does: manifests read, files compared, old ones deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_cli.checkpoint_nodes import on_nodes, progress_bar
from burst_cli.figures import DASH, binary_bytes, count
from cluster.access.nodes import fold_nodes
from cluster.node_checkpoints import NodeCheckpoint, NodeCheckpoints
from engine.checkpoint.commit import (
    Checkpoint,
    checkpoints_of,
    list_checkpoints,
    open_checkpoint,
    remove,
    superfluous,
    verify_files,
)
from engine.checkpoint.manifest import CheckpointError, Manifest
from engine.runs import FINAL_STATES, RunFolder


@dataclass(frozen=True)
class Entry:
    """One checkpoint. verified: whether its files were compared with its manifest; problem: what is wrong with it.

    path: of its folder on this machine, or in that of the run on `nodes`; nodes: who holds its parts, None: here.
    """

    step: int
    path: str
    nodes: str | None = None
    saved_at: str | None = None
    bytes: int | None = None
    tokens: int | None = None
    ranks: int | None = None
    verified: bool = False
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Pruned:
    """Which steps went (or would go) and which stay."""

    run_id: str
    removed: tuple[int, ...]
    kept: tuple[int, ...]
    freed_bytes: int
    dry_run: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def newest_here(run: RunFolder, step: int | None) -> Checkpoint:
    """The run's checkpoint of `step`, or its newest, on this machine. Raises CheckpointError when there is none."""
    known = list_checkpoints(checkpoints_of(run.path))
    return known[0] if step is None and known else checkpoint_of_step(run, step or 0)


def checkpoint_of_step(run: RunFolder, step: int) -> Checkpoint:
    """The run's checkpoint of that step. Raises CheckpointError when it has none."""
    known = list_checkpoints(checkpoints_of(run.path))
    for checkpoint in known:
        if checkpoint.step == step:
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in known) or "none"
    raise CheckpointError(f"run {run.run_id} has no checkpoint of step {step}; it has {steps}")


def examine(run: RunFolder, *, verify: bool, console: Console) -> list[Entry]:
    """The run's checkpoints, newest first, those here before those on its nodes; `verify`: with every file read where
    it lies, which a bar on `console` shows.
    """
    with on_nodes(run, console) as answer:
        entries = [_entry_on_nodes(one, verify=verify, console=console) for one in answer.found]
    return sorted([*_examine_here(run, verify=verify, console=console), *entries], key=lambda entry: -entry.step)


def _examine_here(run: RunFolder, *, verify: bool, console: Console) -> list[Entry]:
    entries = []
    for checkpoint in list_checkpoints(checkpoints_of(run.path)):
        try:
            manifest = open_checkpoint(checkpoint)
        except CheckpointError as error:
            entries.append(Entry(checkpoint.step, str(checkpoint.path), problem=str(error)))
            continue
        problem = _compare(checkpoint, manifest, console) if verify else None
        entries.append(_entry(checkpoint, manifest, verified=verify, problem=problem))
    return entries


def _entry_on_nodes(one: NodeCheckpoint, *, verify: bool, console: Console) -> Entry:
    checkpoint = Checkpoint(one.step, Path(f"checkpoints/step-{one.step:08d}"))
    nodes = one.nodes or "nodes"
    if one.manifest is None:
        return Entry(one.step, str(checkpoint.path), nodes, problem=one.problem)
    problem = _compare_on_nodes(one, console) if verify else one.problem
    return replace(_entry(checkpoint, one.manifest, verified=verify, problem=problem), nodes=nodes)


def verified(checkpoint: Checkpoint, console: Console) -> Manifest:
    """Its manifest, after every file was compared with it, which a bar on `console` shows. Raises CheckpointError."""
    manifest = open_checkpoint(checkpoint)
    if problem := _compare(checkpoint, manifest, console):
        raise CheckpointError(problem)
    return manifest


def newest_undamaged(root: Path, console: Console) -> tuple[Checkpoint, Manifest] | None:
    """The newest checkpoint under `root` that is as it was written; damaged ones are named on `console`."""
    for checkpoint in list_checkpoints(root):
        try:
            return checkpoint, verified(checkpoint, console)
        except CheckpointError as error:
            console.print(Text(f"step {checkpoint.step} is passed over: {error}", "yellow"), soft_wrap=True)
    return None


def checkpoints_table(entries: Sequence[Entry]) -> Table:
    """One row per checkpoint."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "tokens", "size", "ranks"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("saved", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("")
    for entry in entries:
        state = Text("as it was written", "green") if entry.verified else Text("")
        table.add_row(
            str(entry.step),
            DASH if entry.tokens is None else count(entry.tokens),
            binary_bytes(entry.bytes),
            DASH if entry.ranks is None else str(entry.ranks),
            entry.saved_at or DASH,
            entry.nodes or "here",
            state if entry.problem is None else Text(entry.problem, "red"),
        )
    return table


def prune_run(
    run: RunFolder,
    away: NodeCheckpoints,
    *,
    keep_last: int,
    keep_every: int | None,
    dry_run: bool,
    console: Console,
) -> Pruned:
    """Delete all but the newest `keep_last`, multiples of `keep_every` and the newest undamaged ones: of those here and
    those on its nodes (`away`), which count as one where they are of the same step.

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
    root = checkpoints_of(run.path)
    here = {one.step: one.path for one in list_checkpoints(root)}
    there = {one.step: one for one in away.found}
    protected = [*_newest_undamaged_on(away, console)]
    if found := newest_undamaged(root, console):
        protected.append(found[0].step)
    steps = sorted({*here, *there}, reverse=True)
    gone = superfluous(steps, keep_last=keep_last, keep_every=keep_every, protected=protected)
    freed = sum(_size(here[step]) for step in gone if step in here)
    freed += sum(sum(there[step].held.values()) for step in gone if step in there)
    for step in gone if not dry_run else ():
        if step in here:
            _remove_here(here[step])
        if step in there:
            there[step].remove()
    kept = tuple(step for step in steps if step not in gone)
    return Pruned(run.run_id, tuple(gone), kept, freed, dry_run)


def _newest_undamaged_on(away: NodeCheckpoints, console: Console) -> Iterator[int]:
    """The step of the newest one that the nodes hold as it was written, or nothing; damaged ones are named."""
    for one in away.found:
        problem = _compare_on_nodes(one, console)
        if problem is None:
            yield one.step
            return
        console.print(Text(f"step {one.step} on nodes is passed over: {problem}", "yellow"), soft_wrap=True)


def _remove_here(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be deleted: {error.strerror}") from error


def pruned_text(result: Pruned) -> str:
    """What was done, for people."""
    if not result.removed:
        return f"nothing to delete; kept: {_steps(result.kept)}"
    did = "would delete" if result.dry_run else "deleted"
    size = binary_bytes(result.freed_bytes)
    return f"{did} {_steps(result.removed)}, {size}; kept: {_steps(result.kept)}"


def _steps(steps: Sequence[int]) -> str:
    return f"step {', '.join(map(str, sorted(steps)))}" if steps else "none"


def _entry(checkpoint: Checkpoint, manifest: Manifest, *, verified: bool, problem: str | None) -> Entry:
    tokens = manifest.state.get("tokens")
    return Entry(
        checkpoint.step,
        str(checkpoint.path),
        None,
        manifest.saved_at,
        manifest.bytes,
        tokens if isinstance(tokens, int) else None,
        len(manifest.files),
        verified and problem is None,
        problem,
    )


def _compare(checkpoint: Checkpoint, manifest: Manifest, console: Console) -> str | None:
    with progress_bar(console, f"step {checkpoint.step}", manifest.bytes) as advance:
        for name in sorted(manifest.files):
            try:
                verify_files(checkpoint.path, manifest, [name])
            except CheckpointError as error:
                return str(error)
            advance(manifest.files[name].bytes)
    return None


def _compare_on_nodes(one: NodeCheckpoint, console: Console) -> str | None:
    with progress_bar(console, f"step {one.step}", one.manifest.bytes if one.manifest else 0) as advance:
        return one.verify(advance)


def _size(path: Path) -> int:
    return sum(child.stat().st_size for child in path.iterdir() if child.is_file())
