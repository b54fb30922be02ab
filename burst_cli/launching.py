"""What `burst launch` does once its plan is made: data, run folder, ranks, result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from burst_cli import render
from burst_cli.data_progress import show_progress
from burst_cli.failure_block import failure_block
from burst_cli.figures import binary_bytes, count, duration, percent, plain
from burst_cli.live import open_view
from burst_cli.run_progress import RunProgress
from burst_cli.run_records import run_record
from cluster.launch import LaunchOutcome, LaunchTiming, StopRequests, launch_local
from cluster.plan import LaunchPlan
from engine.config import RunConfig
from engine.data import PackedSampler, prepare
from engine.errors import ConfigError
from engine.run.provenance import collect_provenance
from engine.run.records import json_text
from engine.runs import RunFolder, check_writable, create_run


@dataclass(frozen=True)
class LaunchManner:
    """How a launch talks: plain lines, or one JSON document on stdout; and how patient it is."""

    plain_lines: bool = False
    as_json: bool = False
    timing: LaunchTiming = LaunchTiming()  # noqa: RUF009 - frozen


def run_plan(plan: LaunchPlan, overrides: Sequence[str], manner: LaunchManner) -> int:
    """The exit code of the launch that `plan` describes; progress on stderr, the result on stdout.

    Nothing is created when the data cannot be prepared; from then on every end is recorded in the run folder.
    """
    check_writable(Path(plan.run_path))
    console = _plain_console() if manner.plain_lines else render.stderr()
    prepare_data(plan.config, console)
    stop = StopRequests()
    with stop.listening():
        run = create_run(Path(plan.run_path), _files(plan, overrides), world_size=plan.world_size)
        console.print(_heading(plan, run), soft_wrap=True)
        progress = RunProgress(run, plan.config.train.steps)
        with open_view(console, progress) as view:
            outcome = launch_local(plan, run, view, stop, manner.timing)
    _conclude(run, outcome, progress, manner)
    return outcome.exit_code


def prepare_data(config: RunConfig, console: Console) -> None:
    """Tokenise what is not tokenised yet; check that the model knows every token and that one sequence can be filled.

    Raises ConfigError or DataError before anything was started.
    """
    with show_progress(console) as report:
        prepared = prepare(config.data, progress=report)
    if prepared.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is too small: the data has tokens up to "
            f"{prepared.vocab_size - 1}. Set model.vocab_size={prepared.vocab_size} or more."
        )
    PackedSampler(prepared.train, config.train.seq_len, config.seed)


def _plain_console() -> Console:
    """A console on stderr that never redraws, even on a terminal."""
    return Console(stderr=True, force_terminal=False, highlight=False, emoji=False)


def _files(plan: LaunchPlan, overrides: Sequence[str]) -> dict[str, str]:
    return {
        **dict(plan.files),
        "overrides.txt": "".join(f"{override}\n" for override in overrides),
        "provenance.json": json_text(collect_provenance()),
    }


def _heading(plan: LaunchPlan, run: RunFolder) -> Text:
    ranks = f"{plan.world_size} rank{'' if plan.world_size == 1 else 's'}"
    return Text.assemble(
        (f"{run.exp}/{run.run_id}", "bold"),
        f"  {ranks}, {plan.backend.name} ({plan.backend.reason})\n",
        (f"{run.path}", "dim"),
    )


def _conclude(run: RunFolder, outcome: LaunchOutcome, progress: RunProgress, manner: LaunchManner) -> None:
    """Say how it ended: a failure on stderr, the result on stdout."""
    console = render.stderr()
    name = f"{run.exp}/{run.run_id}"
    record = run_record(run)
    if outcome.failure is not None:
        console.print(failure_block(run, outcome.failure), soft_wrap=True)
    if outcome.leftover_pids:
        pids = " ".join(map(str, outcome.leftover_pids))
        console.print(Text(f"warning: these processes did not end even when killed: {pids}", style="yellow"))
    if manner.as_json:
        render.emit_json({**record, "exit_code": outcome.exit_code})
    elif outcome.failure is None:
        style = "green" if outcome.status == "completed" else "yellow"
        render.stdout().print(Text.assemble((outcome.status, style), f" {name} in {duration(progress.elapsed_s())}"))
        render.stdout().print(Text(result_line(record)), soft_wrap=True)
        render.stdout().print(Text(f"more: burst report {run.run_id}"), soft_wrap=True)


def result_line(record: dict[str, Any]) -> str:
    """The figures a person asks for first, in one line."""
    parts = [
        f"{record.get('steps')} steps",
        f"train loss {plain(record.get('final_train_loss'))}",
        f"validation loss {plain(record.get('final_validation_loss'))}",
        f"bits/byte {plain(record.get('final_validation_bits_per_byte'))}",
        f"{count(record.get('tokens_per_s_per_device'))} tokens/s per device",
        f"MFU {percent(record.get('mfu'))}",
        f"peak memory {binary_bytes(record.get('peak_memory_bytes'))}",
    ]
    return "  ".join(parts)
