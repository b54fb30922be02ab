"""`burst logs`: what the ranks of a run say."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.logs.files import LogFile, LogRequest, find_logs, parse_ranks
from burst_cli.logs.follow import LogPrinter, json_lines, present_lines
from burst_cli.logs.follow import follow as follow_logs
from burst_cli.options import RUNS_DIR, JsonOption, LivingRunArgument, RunsDirOption
from burst_cli.render import fold_names, fold_numbers
from burst_cli.runs.choose import choose_run
from burst_cli.runs.read import RunWatch, look_at
from cluster.control.attempt import UNKNOWN
from engine.config.errors import ConfigError
from engine.runs.folder import RunFolder, RunFolderError

app = new_verb()

DEFAULT_TAIL = 50


@app.command()
def logs(
    run: LivingRunArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    ranks: Annotated[str | None, typer.Option("--ranks", help="Only these, such as 0,3-5.")] = None,
    nodes: Annotated[str | None, typer.Option("--nodes", help="Only those of these nodes, such as tb[1-2].")] = None,
    grep: Annotated[str | None, typer.Option("--grep", help="Only lines with this regular expression.")] = None,
    tail: Annotated[
        str | None,
        typer.Option(
            "--tail",
            metavar="N|all",
            help=f"The last N lines of each log; default: {DEFAULT_TAIL}, with --grep all.",
        ),
    ] = None,
    launcher: Annotated[
        bool, typer.Option("--launcher", help="What torchrun, the supervisors and the controller say, not the ranks.")
    ] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show what the ranks say as `host:rank | line`.

    Logs carry no common clock: without -f they come in the order of ranks, with -f as they arrive. Terminal escapes
    are removed, and bytes that are no text are shown as replacement marks. When
    more arrives than can be read, lines are left out, and it is said how much; the log itself has all of them.

    -f ends with the run, with the exit code of `burst status`: 0 completed, 1 failed, 130 cancelled, 3 unknown.
    """
    if as_json and follow:
        raise ConfigError("--json is one document, which -f never ends; leave one of them out")
    chosen = choose_run(run, runs_dir, living=True)
    wanted_ranks, wanted_nodes = parse_ranks(ranks) if ranks else None, _node_folders(chosen, nodes)
    request = LogRequest(wanted_ranks, wanted_nodes, launcher, _pattern(grep), _lines(tail, has_grep=grep is not None))
    if not follow:
        _ask_if_lost(chosen)
    found = find_logs(chosen, request)
    if as_json:
        head = {"run_id": chosen.run_id, "exp": chosen.exp, "path": str(chosen.path)}
        render.emit_json({**head, "status": chosen.read_state()["state"], **json_lines(found, request)})
    elif not found and not follow:
        _say_nothing_there(chosen, request)
    else:
        raise typer.Exit(_show(chosen, found, request, follow=follow))


def _lines(tail: str | None, *, has_grep: bool) -> int | None:
    """How many lines of each log are meant; None: all. Raises ConfigError for what is no number."""
    if tail is None:
        return None if has_grep else DEFAULT_TAIL
    if tail != "all" and not (tail.isascii() and tail.isdigit() and len(tail) < 10):
        raise ConfigError(f"--tail {tail}: expected a number of lines, or all")
    return None if tail == "all" else int(tail)


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    """What lines must hold. Raises ConfigError for what is no regular expression."""
    try:
        return None if grep is None else re.compile(grep)
    except (re.error, OverflowError, RecursionError) as error:
        hint = r"Behind a \ characters such as ( [ * + stand for themselves."
        raise ConfigError(f"--grep {grep!r} is no regular expression: {error}. {hint}") from error


def _node_folders(run: RunFolder, nodes: str | None) -> frozenset[str] | None:
    """Names of the log folders of `nodes`."""
    if nodes is None:
        return None
    from cluster.ssh.hosts import parse_nodes

    return frozenset(run.log_dir(name).name for name in parse_nodes(nodes, "--nodes").names)


def _ask_if_lost(run: RunFolder) -> None:
    """Have the last lines fetched from the nodes of a run whose controller is gone; say so when that fails."""
    try:
        problem = look_at(run).problem
    except RunFolderError as error:
        problem = str(error)
    if problem is not None:
        render.say(render.stderr(), render.told("warning", f"these logs may not be all: {problem}"))


def _say_nothing_there(run: RunFolder, request: LogRequest) -> None:
    """Why there are no logs: none yet, or none of those that were asked for."""
    others = find_logs(run, LogRequest(launcher=request.launcher))
    if others:
        ranks = fold_numbers(log.rank for log in others if log.rank is not None)
        nodes = fold_names([log.node for log in others if log.node])
        text = f"{run.run_id} has no such logs; it has ranks {ranks or '(none)'} on {nodes or '(none)'}"
    elif request.launcher:
        text = f"{run.run_id}: neither torchrun nor a supervisor has said anything"
    else:
        text = f"{run.run_id}: no rank has said anything; `burst logs {run.run_id} --launcher` shows what started them"
    render.say(render.stderr(), text)


def _show(run: RunFolder, found: list[LogFile], request: LogRequest, *, follow: bool) -> int:
    """The exit code after the logs were printed, and followed."""
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    printer = LogPrinter(sys.stdout, found, has_colour=has_colour)
    if not follow:
        for log in found:
            printer.show(log, present_lines(log, request))
        return 0
    code = follow_logs(run, request, printer, RunWatch(run).ended)
    state, why = run.read_state()["state"], ": its nodes cannot be asked" if code == UNKNOWN else ""
    render.say(render.stderr(), f"{run.exp}/{run.run_id} {state}{why}; more: burst status {run.run_id}")
    return code
