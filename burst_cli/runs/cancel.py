"""`burst cancel`: runs stopped from any terminal, each in a thread of its own: an end takes as long as nodes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.completion import complete_run
from burst_cli.options import RUNS_DIR, JsonOption, RunsDirOption
from burst_cli.runs.choose import choose_runs, living_runs
from burst_cli.runs.progress import RunProgress
from cluster.control.attempt import UNKNOWN, RunState, StopRequests
from cluster.control.controller import request_cancel
from engine.config.errors import BurstError, ConfigError
from engine.runs.folder import FINAL_STATES, RunFolder, list_runs

app = new_verb()

_AT_ONCE = 16


@app.command()
def cancel(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run ids (or how they begin, or their last six digits), EXP, EXP/ID, folders; none: the living one.",
            autocompletion=complete_run,
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Kill at once instead of waiting for the end of a step.")] = False,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run that has not ended.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Stop runs and wait for their end: ranks are asked first and killed after 12 s (longer where
    they save a checkpoint first: train.checkpoint.stop_grace_s), with --now at once.

    Works while the launcher lives, for runs in the background, and after the launcher was killed: then the nodes are
    told from here. Nodes that cannot be reached are named; their ranks end by themselves when the lease ends
    (cluster.lease_s), except those of detached runs. Ctrl-C here leaves the request standing; while this command leads
    the stopping itself, a second Ctrl-C kills at once.

    Exit codes: 0 all have ended, also when they had before; 3 something may still run.
    """
    if all_runs and run:
        raise ConfigError(f"--all means every run that has not ended; leave out {' '.join(run)}")
    chosen = living_runs(list_runs(runs_dir)) if all_runs else choose_runs(run or [], runs_dir)
    console = render.stderr()
    results = cancel_runs(chosen, now=now, say=lambda text: console.print(text, markup=False, soft_wrap=True))
    code = max((result.exit_code for result in results), default=0)
    if as_json:
        render.emit_json({"runs": [result.to_dict() for result in results], "exit_code": code})
    elif not results:
        render.stdout().print("All runs have ended.")
    else:
        for result in results:
            render.stdout().print(cancelled_text(result), soft_wrap=True)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Cancelled:
    """What became of one run. before: its state when it was asked. is_failed: it cannot be stopped from here."""

    run: RunFolder
    before: str
    seen: RunState
    step: int | None = None
    is_failed: bool = False

    @property
    def had_ended(self) -> bool:
        return self.before in FINAL_STATES

    @property
    def exit_code(self) -> int:
        """0 it has ended, 1 it cannot be stopped from here, 3 something may still run."""
        if self.is_failed or self.had_ended:
            return int(self.is_failed)
        return UNKNOWN if self.seen.problem or self.seen.leftover or not self.seen.is_final else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run_id": self.run.run_id,
            "exp": self.run.exp,
            "path": str(self.run.path),
            "status": self.seen.state,
            "status_before": self.before,
            "step": self.step,
            "leftover": self.seen.leftover,
            "problem": self.seen.problem,
            "exit_code": self.exit_code,
        }


def cancel_runs(runs: Sequence[RunFolder], *, now: bool, say: Callable[[str], None]) -> list[Cancelled]:
    """What became of every run, in their order; `say` is told what is waited for."""
    stop = StopRequests()
    with stop.listening(), ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda run: _cancel(run, stop, now=now, say=say), runs))


def cancelled_text(result: Cancelled) -> Text:
    """What became of a run, in a line or two."""
    name = f"{result.run.exp}/{result.run.run_id}"
    if result.had_ended:
        return Text.assemble((result.seen.state, "bold"), f" {name}: it had already ended")
    text = Text.assemble((result.seen.state if result.seen.is_final else "not stopped", "bold yellow"), f" {name}")
    if result.step is not None:
        text.append(f" after step {result.step}")
    for line in result.seen.leftover:
        text.append(f"\n  may still run: {line}", style="yellow")
    if result.seen.problem:
        text.append(f"\n  {result.seen.problem}", style="yellow")
    return text


def _cancel(run: RunFolder, stop: StopRequests, *, now: bool, say: Callable[[str], None]) -> Cancelled:
    before = "unreadable"
    try:
        before = str(run.read_state()["state"])
        if before not in FINAL_STATES:
            say(f"{run.exp}/{run.run_id}: asked to stop{' at once' if now else ''}, waiting for its end")
        seen = request_cancel(run, grace_s=0.0 if now else None, stop=stop)
    except BurstError as error:
        return Cancelled(run, before, RunState({"state": before}, problem=str(error)), is_failed=True)
    return result_of(run, before, seen)


def result_of(run: RunFolder, before: str, seen: RunState) -> Cancelled:
    """What became of a run that was in state `before`, by what is seen now."""
    progress = RunProgress(run)
    progress.poll()
    return Cancelled(run, before, seen, progress.step if progress.latest else None)
