"""The weights of a run's checkpoint for transformers: which checkpoint, with which tokenizer, and what is told."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from burst_cli.checkpoint.nodes import bring, progress_bar
from burst_cli.checkpoint.view import checkpoint_of_step, checkpoints_here, compared, newest_undamaged
from burst_cli.figures import binary_bytes
from engine.config.errors import ConfigError, DataError
from engine.config.settings import DataConfig, load_config
from engine.data.chat import ChatTemplate, find_template
from engine.data.tokenizers import TOKENIZER_FILE
from engine.pretrained.export import DTYPES, Exported, ExportOrder, check_new, export, weight_bytes
from engine.runs.commit import Checkpoint, checkpoints_of
from engine.runs.folder import RunFolder
from engine.runs.manifest import CheckpointError, Manifest


def export_run(
    run: RunFolder, folder: Path, *, step: int | None, dtype: str, file_gib: float, console: Console
) -> Exported:
    """Writes the checkpoint of `step`, or the newest undamaged one. Raises CheckpointError and ConfigError."""
    check_new(folder)  # before gigabytes are read
    chosen = next((known for known in DTYPES if known == dtype), None)
    if chosen is None:
        raise ConfigError(f"--dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    config = load_config(run.path / "config.yaml")
    checkpoint, manifest = _choose(run, step, console)
    original, kept = Path(config.data.tokenizer).expanduser(), run.path / TOKENIZER_FILE
    tokenizer = original if original.is_file() else kept
    order = ExportOrder(
        checkpoint,
        config,
        folder,
        dtype=chosen,
        file_bytes=int(file_gib * 2**30),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        tokenizer_folder=original.parent if original.is_file() else None,
        chat=_chat_template(config.data, console),
    )
    with progress_bar(console, f"exporting step {checkpoint.step}", weight_bytes(manifest)) as advance:
        return export(order, manifest, advance)


def exported_text(result: Exported) -> Text:
    """What was written, and what transformers will do otherwise."""
    files = "1 file" if result.files == 1 else f"{result.files} files"
    lines = [f"step {result.step}: {files} of weights, {binary_bytes(result.bytes)}, in {result.folder}"]
    return Text("\n".join([*lines, *(f"warning: {text}" for text in result.warnings)]))


def _chat_template(data: DataConfig, console: Console) -> ChatTemplate | None:
    """What renders the conversations of a run, if it had any."""
    if data.messages_field is None:
        return None
    try:
        return find_template(data)
    except DataError as error:
        console.print(Text(f"warning: the folder gets no chat template: {error}", style="yellow"), soft_wrap=True)
        return None


def _choose(run: RunFolder, step: int | None, console: Console) -> tuple[Checkpoint, Manifest]:
    """The checkpoint to export; that of a run on other machines is fetched unless it is here."""
    step = step if (brought := bring(run, step, console)) is None else brought.step
    if step is None:
        found = newest_undamaged(checkpoints_here(run), console)
        if found is None:
            raise CheckpointError(f"run {run.run_id} has no undamaged checkpoint under {checkpoints_of(run.path)}")
    else:
        found = checkpoint_of_step(run, step)
        if problem := compared(found, console):
            raise CheckpointError(problem)
    assert found.manifest is not None
    return Checkpoint(found.step, found.path), found.manifest
