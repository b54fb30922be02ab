"""`burst cancel`: runs stopped from any terminal, each in a thread of its own: an end takes as long as nodes need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import typer
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import RUNS_DIR, JsonOption, RunsDirOption
from burst_cli.overrides import complete_run
from burst_cli.runs.choose import choose_runs, living_runs
from burst_cli.runs.read import RunProgress
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
) -> int:
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
    stop = StopRequests()
    with stop.listening(), ThreadPoolExecutor(_AT_ONCE) as pool:
        results = list(pool.map(lambda one: _cancel(one, stop, now=now), chosen))
    code = max((result.exit_code for result in results), default=0)
    document = {"runs": [result.to_dict() for result in results], "exit_code": code}
    render.show(document, *[result.text for result in results] or [Text("All runs have ended.")], as_json=as_json)
    return code


@dataclass(frozen=True)
class Cancelled:
    """What became of one run. before: its state when it was asked. is_failed: it cannot be stopped from here."""

    run: RunFolder
    before: str
    seen: RunState
    is_failed: bool = False

    @property
    def had_ended(self) -> bool:
        return self.before in FINAL_STATES

    @cached_property
    def step(self) -> int | None:
        """The last one that is known."""
        progress = RunProgress(self.run)
        progress.poll()
        return progress.step if progress.latest and not self.is_failed else None

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

    @property
    def text(self) -> Text:
        """What became of it, in a line or more."""
        name, seen = f"{self.run.exp}/{self.run.run_id}", self.seen
        if self.had_ended:
            return Text.assemble((seen.state, "bold"), f" {name}: it had already ended")
        step = "" if self.step is None else f" after step {self.step}"
        more = [f"may still run: {line}" for line in seen.leftover] + ([seen.problem] if seen.problem else [])
        return Text.assemble(
            (seen.state if seen.is_final else "not stopped", "bold yellow"),
            f" {name}{step}",
            *((f"\n  {line}", "yellow") for line in more),
        )


def _cancel(run: RunFolder, stop: StopRequests, *, now: bool) -> Cancelled:
    before = "unreadable"
    try:
        before = str(run.read_state()["state"])
        if before not in FINAL_STATES:
            how = " at once" if now else ""
            render.say(render.stderr(), f"{run.exp}/{run.run_id}: asked to stop{how}, waiting for its end")
        return Cancelled(run, before, request_cancel(run, grace_s=0.0 if now else None, stop=stop))
    except BurstError as error:
        return Cancelled(run, before, RunState({"state": before}, problem=str(error)), is_failed=True)
