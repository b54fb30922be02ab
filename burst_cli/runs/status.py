"""`burst status`: how a run is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import JsonOption, NewestRunArgument, RunsDirOption

if TYPE_CHECKING:
    from engine.runs.folder import RunFolder

app = new_verb()


@app.command()
def status(
    run: NewestRunArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until it ends.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --watch: lines, also on a terminal.")] = False,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a run is: state, progress, every node and its ranks, what went wrong, and what to type next.

    Works from any terminal, for runs in the background, and after the launcher was killed: then the nodes are asked,
    and a run that has ended meanwhile is judged. Ctrl-C ends the watching, never the run.

    Exit codes: 0 goes on or completed, 1 failed or out of memory, 130 cancelled, 3 unknown: its nodes cannot be asked.
    Ranks are R running, S waiting, D waiting for a device, T stopped, Z dead.
    """
    from burst_cli.runs.choose import choose_run
    from engine.config.errors import ConfigError

    if watch and as_json:
        raise ConfigError("--json is one document, which --watch has no end for; leave one of them out")
    chosen = choose_run(run, runs_dir)
    if watch:
        _watch(chosen, plain=plain)
    raise typer.Exit(_show(chosen, as_json=as_json))


def _show(run: RunFolder, *, as_json: bool) -> int:
    from burst_cli import render
    from burst_cli.runs.state import look_at
    from burst_cli.runs.status_view import gather_status, print_status, status_document

    found = gather_status(run, look_at(run))
    if as_json:
        render.emit_json(status_document(found))
    else:
        print_status(render.stdout(), found)
    return found.seen.exit_code


def _watch(run: RunFolder, *, plain: bool) -> None:
    """Show the run until it ends or nothing can be known of it."""
    import time

    from burst_cli import render
    from burst_cli.runs.live import open_view
    from burst_cli.runs.read import read_nodes
    from burst_cli.runs.state import RunWatch
    from burst_cli.runs.status_view import attached_progress, merge_statuses

    following = RunWatch(run)
    progress = attached_progress(run, following.look())
    console = render.plain_stderr() if plain else render.stderr()
    with open_view(console, progress) as view:
        while following.ended() is None:
            view.nodes(merge_statuses(read_nodes(run, progress.facts), following.look().nodes))
            view.tick()
            time.sleep(0.2)
        view.tick()
