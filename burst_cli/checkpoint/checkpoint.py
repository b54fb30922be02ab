"""`burst checkpoint`: what a run has saved, whether it is as it was written, its weights for others, what may go."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.checkpoint.view import (
    HereCheckpoint,
    bring,
    checkpoint_of_step,
    checkpoints_here,
    checkpoints_table,
    compared,
    examine,
    newest_undamaged,
    on_nodes,
    progress_bar,
    prune_run,
    pruned_text,
)
from burst_cli.options import RUNS_DIR, JsonOption, NewestRunArgument, RunsDirOption
from burst_cli.overrides import complete_run
from burst_cli.runs.choose import choose_run
from engine.config.errors import DataError
from engine.config.settings import DataConfig, RunConfig, load_config
from engine.data.chat import ChatTemplate, find_template
from engine.export.hugging_face import ExportDtype, ExportOrder, check_new, export, weight_bytes
from engine.pretrained.folder import CONFIG_FILE, TOKENIZER_FILE, find_tokenizer
from engine.runs.checkpoints import CheckpointError, checkpoints_of
from engine.runs.figures import binary_bytes, count_of
from engine.runs.files import home_path
from engine.runs.folder import RunFolder

app = new_verb()


@app.callback()
def _checkpoint() -> None:
    """List, verify, fetch, export and prune the checkpoints of a run.

    They are written at the end of a run and when it is asked to stop (train.checkpoint.at_end), and on the way with
    train.checkpoint.every_steps or every_minutes. A run that is taken up again goes on from its newest undamaged one.
    """


@app.command("list")
def list_all(run: NewestRunArgument = None, runs_dir: RunsDirOption = RUNS_DIR, as_json: JsonOption = False) -> None:
    """Show the checkpoints of a run, newest first; nothing is read but their manifests.

    The nodes of a run over SSH are asked for theirs.

    Exit codes: 0, also when there is none; 1 if one has no readable manifest.
    """
    _show(run, runs_dir, as_json=as_json, verify=False)


@app.command()
def verify(run: NewestRunArgument = None, runs_dir: RunsDirOption = RUNS_DIR, as_json: JsonOption = False) -> None:
    """Read every checkpoint of a run whole, where it lies, and compare it with what was written. Changes nothing.

    Exit codes: 0 all are as they were written, 1 one is damaged.
    """
    _show(run, runs_dir, as_json=as_json, verify=True)


@app.command()
def fetch(
    run: NewestRunArgument = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="The checkpoint of this step; else the newest whole one.")
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Bring a checkpoint from the nodes of a run into its run folder on this machine, and compare what came.

    What an interrupted fetch has brought is not brought again.

    Exit codes: 0 it is here, 1 no node has it whole.
    """
    chosen = choose_run(run, runs_dir)
    found = bring(chosen, step, render.stderr()) or checkpoint_of_step(chosen, step)
    document = {"run_id": chosen.run_id, "step": found.step, "path": str(found.path)}
    render.show(document, f"step {found.step} is in {found.path}", as_json=as_json)


@app.command()
def prune(
    run: NewestRunArgument = None,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Newest ones that stay.")] = 2,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="Those of multiples of this many steps stay, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Delete old checkpoints of a run that has ended, here and on its nodes. The newest undamaged one always stays.

    Exit codes: 0 done, 1 one could not be deleted, a node did not answer or the run has not ended.
    """
    chosen = choose_run(run, runs_dir)
    console = render.stderr()
    with on_nodes(chosen, console) as away:
        result = prune_run(chosen, away, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run, console=console)
    render.show(result, pruned_text(result), as_json=as_json)


@app.command("export")
def export_run(
    run: Annotated[
        str,
        typer.Argument(
            help="A run id (or how it begins, or its last six digits), EXP, EXP/ID or a folder.",
            autocompletion=complete_run,
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="The checkpoint of this step; else the newest undamaged one.")
    ] = None,
    dtype: Annotated[ExportDtype, typer.Option("--dtype", help="Number format of the weights.")] = "bfloat16",
    file_gib: Annotated[
        float, typer.Option("--file-gib", min=0.001, max=2**20, help="Size of one file at most, in GiB.")
    ] = 5.0,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Write the weights of a checkpoint as a folder that transformers loads.

    The checkpoint is fetched from the run's nodes if it is not here, and verified. One weight is in memory at a time,
    and the folder appears when it is whole: with config.json and the run's tokenizer (`bytes` has none).

    Exit codes: 0 written, 1 the checkpoint is damaged or missing, or the folder cannot be written, 2 --dtype is
    unknown or transformers has no model of this shape.
    """
    if math.isnan(file_gib):  # in every range, says click
        raise typer.BadParameter("nan is not in the range of sizes", param_hint="--file-gib")
    chosen, console = choose_run(run, runs_dir), render.stderr()
    check_new(folder)  # before gigabytes are read
    config = load_config(chosen.path / "config.yaml")
    checkpoint = _to_export(chosen, step)
    assert checkpoint.manifest is not None
    base = _base_folder(config)
    order = ExportOrder(
        checkpoint.path,
        config,
        folder,
        dtype=dtype,
        file_bytes=int(file_gib * 2**30),
        base=base,
        tokenizer=_tokenizer(config, base, chosen.path),
        chat=_chat_template(config.data),
    )
    with progress_bar(console, f"exporting step {checkpoint.step}", weight_bytes(checkpoint.manifest)) as advance:
        result = export(order, checkpoint.manifest, advance)
    files = count_of("file", result.files)
    lines = [f"step {result.step}: {files} of weights, {binary_bytes(result.bytes)}, in {folder}"]
    lines += [f"warning: {text}" for text in result.warnings]
    render.show({"folder": str(folder), **dataclasses.asdict(result)}, *lines, as_json=as_json)


def _to_export(run: RunFolder, step: int | None) -> HereCheckpoint:
    """The undamaged checkpoint to export; that of a run on other machines is fetched unless it is here."""
    console = render.stderr()
    step = step if (brought := bring(run, step, console)) is None else brought.step
    if step is None:
        newest = newest_undamaged(checkpoints_here(run), console)
        if newest is None:
            raise CheckpointError(f"run {run.run_id} has no undamaged checkpoint under {checkpoints_of(run.path)}")
        return newest
    found = checkpoint_of_step(run, step)
    if problem := compared(found, console):
        raise CheckpointError(problem)
    return found


def _base_folder(config: RunConfig) -> Path | None:
    """The model folder that a run began with, if it is on this machine."""
    if config.model.init_from is None:
        return None
    folder = home_path(config.model.init_from)
    if (folder / CONFIG_FILE).is_file():
        return folder
    text = f"warning: model.init_from={folder} is not on this machine, so nothing of its other files is carried over"
    render.say(render.stderr(), Text(text, style="yellow"))
    return None


def _tokenizer(config: RunConfig, base: Path | None, run: Path) -> Path | None:
    """The tokenizer of a run: what data.tokenizer names, the base folder's, or the copy in the run folder."""
    named, copied = home_path(config.data.tokenizer), run / TOKENIZER_FILE
    if config.data.tokenizer not in ("bytes", "bpe") and named.exists():
        return named
    if base is not None and find_tokenizer(base) is not None:
        return base
    return copied if copied.is_file() else None


def _chat_template(data: DataConfig) -> ChatTemplate | None:
    """What renders the conversations of a run, if it had any."""
    if data.messages_field is None:
        return None
    try:
        return find_template(data)
    except DataError as error:
        render.say(render.stderr(), Text(f"warning: the folder gets no chat template: {error}", style="yellow"))
        return None


def _show(run: str | None, runs_dir: RunsDirOption, *, as_json: bool, verify: bool) -> None:
    chosen = choose_run(run, runs_dir)
    entries = examine(chosen, verify=verify, console=render.stderr())
    view = checkpoints_table(entries) if entries else f"{chosen.exp}/{chosen.run_id} has no checkpoints."
    render.show({"run_id": chosen.run_id, "checkpoints": entries}, view, as_json=as_json)
    raise typer.Exit(1 if any(entry["problem"] for entry in entries) else 0)
