"""`burst status`: how one run is, gathered once; for people and as one JSON document."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import RUNS_DIR, JsonOption, NewestRunArgument, RunsDirOption
from burst_cli.render import clean
from burst_cli.runs.choose import choose_run
from burst_cli.runs.failure import failure_block
from burst_cli.runs.nccl_network import fallback_text, socket_fallbacks
from burst_cli.runs.read import STATE_STYLES, RunWatch, look_at, read_nodes, read_progress
from burst_cli.runs.view import NodeRow, figures_text, hang_text, heading, node_rows, nodes_table, open_view
from cluster.control.attempt import RunState
from cluster.control.link import NodeStatus
from cluster.failure import failure_from_dict
from cluster.remote_text import number, seconds_between
from engine.config.errors import ConfigError
from engine.runs.figures import duration
from engine.runs.folder import RunFolder

app = new_verb()

_FIGURES = ("loss", "tokens_per_s", "tokens_per_s_per_device", "mfu", "peak_memory_bytes")
_WARNINGS = 3
_MOST_WIDTH = 140


@app.command()
def status(
    run: NewestRunArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until it ends.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --watch: lines, also on a terminal.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show how a run is: state, progress, every node and its ranks, what went wrong, and what to type next.

    Works from any terminal, for runs in the background, and after the launcher was killed: then the nodes are asked,
    and a run that has ended meanwhile is judged. Ctrl-C ends the watching, never the run.

    Exit codes: 0 goes on or completed, 1 failed or out of memory, 130 cancelled, 3 unknown: its nodes cannot be asked.
    Ranks are R running, S waiting, D waiting for a device, T stopped, Z dead.
    """
    if watch and as_json:
        raise ConfigError("--json is one document, which --watch has no end for; leave one of them out")
    chosen = choose_run(run, runs_dir)
    if watch:
        _watch(chosen, plain=plain)
    found = RunStatus(chosen, look_at(chosen))
    if as_json:
        render.emit_json(status_document(found))
    else:
        print_status(render.stdout(), found)
    raise typer.Exit(found.seen.exit_code)


def _watch(run: RunFolder, *, plain: bool) -> None:
    """Show the run until it ends or nothing can be known of it."""
    following = RunWatch(run)
    progress = read_progress(run, following.look())
    with open_view(render.plain_stderr() if plain else render.stderr(), progress) as view:
        while following.ended() is None:
            view.nodes(merge_statuses(read_nodes(run, progress.facts), following.look().nodes))
            view.tick()
            time.sleep(0.2)
        view.tick()


class RunStatus:
    """One run as it is now, by its folder and by what nodes that were asked said.

    rows: one for each of `statuses`. fallbacks: nodes on which NCCL took sockets in place of planned RDMA ports, with
    its own words. elapsed_s: seconds of this attempt, so far.
    """

    def __init__(self, run: RunFolder, seen: RunState) -> None:
        self.run, self.seen, self.progress = run, seen, read_progress(run, seen)
        facts, straggler = self.progress.facts, self.progress.straggler
        self.statuses = merge_statuses(read_nodes(run, facts), seen.nodes)
        self.rows = node_rows(self.statuses, facts, straggler, is_over=seen.is_final)
        self.fallbacks = socket_fallbacks(run)
        self.elapsed_s = seconds_between(seen.document.get("started_at"), seen.document.get("ended_at"))

    @property
    def next_steps(self) -> dict[str, str]:
        """{command: what it does} that a person may want to type, most useful first."""
        name, state = self.run.run_id, self.seen.state
        resume, cancel = f"burst resume {name}", f"burst cancel {name}"
        if self.seen.is_lost:
            return {
                resume: "takes it over where it still runs, else starts its next attempt",
                cancel: "stops what may still run",
            }
        rank = number(self.seen.document.get("failure"), "rank")
        logs = f"burst logs {name}" + ("" if rank is None else f" --ranks {rank:.0f}")
        again = {resume: "starts the next attempt"}
        failed = {logs: "shows what was said last", **again}
        known = {
            "completed": {f"burst report {name}": "shows its figures"},
            "failed": failed,
            "oom": failed,
            "cancelled": again,
            "planned": {resume: "starts it"},
        }
        return known.get(state, {f"burst logs -f {name}": "follows its ranks", cancel: "stops it"})


def merge_statuses(read: Sequence[NodeStatus], told: Sequence[NodeStatus]) -> list[NodeStatus]:
    """What lies in the run folder, replaced by what the nodes said themselves; of those that said nothing, why not."""
    by_name = {status.node: status for status in told}

    def merged(old: NodeStatus) -> NodeStatus:
        new = by_name.get(old.node, old)
        is_unreachable = new.problem is not None and new.phase in ("none", "lost")
        return replace(old, problem=new.problem) if is_unreachable else new

    return [merged(status) for status in read]


# --- for programs -----------------------------------------------------------------------------------------------------


def status_document(status: RunStatus) -> dict[str, Any]:
    """The one JSON document of `burst status --json`."""
    seen, progress, facts = status.seen, status.progress, status.progress.facts
    return {
        "run_id": status.run.run_id,
        "exp": status.run.exp,
        "path": str(status.run.path),
        "status": seen.state,
        "lost": seen.is_lost,
        "problem": seen.problem,
        "exit_code": seen.exit_code,
        **{name: seen.document.get(name) for name in ("attempt", "started_at", "ended_at", "failure")},
        "elapsed_s": status.elapsed_s,
        "controller": seen.controller and {**asdict(seen.controller), "detached": seen.document.get("detached")},
        "launcher": facts.launcher,
        "attention_preset": facts.preset,
        "seq_len": facts.seq_len,
        "world_size": facts.world_size,
        "phase": progress.phase,
        "step": progress.step,
        "steps": progress.total_steps or None,
        **{name: progress.figure(name) for name in _FIGURES},
        "remaining_s": None if seen.is_final else progress.remaining_s(),
        "silence_s": None if seen.is_final else progress.silence_s,
        "straggler_rank": progress.straggler,
        "warnings": progress.warnings[-20:],
        "socket_fallback": status.fallbacks,
        "nodes": [_node(one, row) for one, row in zip(status.statuses, status.rows, strict=True)],
        "leftover": seen.leftover,
        "next": list(status.next_steps),
    }


def _node(status: NodeStatus, row: NodeRow) -> dict[str, Any]:
    return {
        "node": status.node,
        "phase": status.phase,
        "heard_s": status.heard_s,
        "problem": status.problem,
        "mark": row.mark,
        "notes": list(row.notes),
        "health": status.health or None,
        "outcome": status.outcome,
    }


# --- for people -------------------------------------------------------------------------------------------------------


def print_status(console: Console, status: RunStatus) -> None:
    """Heading, state, controller, progress, nodes, what went wrong, what to type."""
    seen, progress = status.seen, status.progress
    parts: list[RenderableType] = [heading(progress), _state_line(status)]
    none = "none" if seen.is_final or seen.is_lost else "none (started without `burst launch`)"
    where = " in the background" if seen.document.get("detached") else ""
    who = none if seen.controller is None else clean(f"{seen.controller}{where}")
    parts.append(Text.assemble(("controller  ", "dim"), who))
    if progress.latest is not None or not seen.is_final:
        parts.append(Text.assemble(("progress  ", "dim"), _progress_text(status)))
    parts += [figures_text(progress)] if progress.latest is not None else []
    # Nodes of a run that has ended have no figures any more: only what went wrong on them is news.
    nodes = [row for row in status.rows if row.notes or not seen.is_final]
    parts += [nodes_table(nodes, min(console.width, _MOST_WIDTH))] if nodes else []
    console.print(Group(*parts, *_troubles(status)))
    failure = failure_from_dict(seen.document.get("failure"))
    if failure is not None:
        render.say(console, failure_block(status.run, failure))
    for command, what in status.next_steps.items():
        console.print(Text.assemble((command, "bold"), (f"  {what}", "dim")))


def _state_line(status: RunStatus) -> Text:
    seen = status.seen
    attempt, lease_s = seen.document["attempt"], number(seen.document, "lease_s")
    text = Text.assemble((seen.shown, f"bold {STATE_STYLES.get(seen.shown, '')}".strip()))
    if seen.is_lost:  # nobody controls it
        why = "its ranks go on, nobody controls them"
        if not seen.goes_on:
            why = f"run.json says {seen.state}, and the process that controlled it is gone"
        elif lease_s is not None:
            why = f"nobody controls it: its ranks end by themselves {lease_s:g} s after they last heard of a launcher"
        text.append(f" ({why})", style="dim")
    text.append(f"  attempt {clean(str(attempt))}", style="dim" if attempt == 1 else "")
    if status.elapsed_s is not None and (seen.is_final or not seen.is_lost):
        text.append(f"  {duration(status.elapsed_s)}", style="dim")
    return text


def _progress_text(status: RunStatus) -> str:
    progress = status.progress
    done = f"step {progress.step}/{progress.total_steps or '?'}"
    if progress.total_steps:
        done += f" ({100 * progress.step // progress.total_steps}%)"
    if status.seen.is_final:
        return done
    left = f", {duration(progress.remaining_s())} left" if progress.latest is not None else ""
    return f"{done}{left}, phase {clean(progress.phase)}"


def _troubles(status: RunStatus) -> list[Text]:
    seen, progress = status.seen, status.progress
    lines = [("unknown: ", "bold magenta", clean(seen.problem))] if seen.problem is not None else []
    hang = None if seen.is_final or seen.is_lost else hang_text(progress)
    lines += [("", "", hang)] if hang else []
    warnings = [fallback_text(status.fallbacks), *map(clean, progress.warnings[-_WARNINGS:])]
    lines += [("warning: ", "yellow", text) for text in warnings if text]
    if len(progress.warnings) > _WARNINGS:
        lines.append(("", "", f"and {len(progress.warnings) - _WARNINGS} earlier warnings"))
    lines += [("may still run: ", "yellow", text) for text in seen.leftover]
    return [Text.assemble((label, style), text) for label, style, text in lines]
