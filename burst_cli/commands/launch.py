"""`burst launch`: train, on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument, RunsDirOption

app = new_verb()


@app.command()
def launch(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    runs_dir: RunsDirOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files, environment and command; create and start nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start a run that does not fit into memory, by what is known of it.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Progress as lines, also on a terminal.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train: write the run folder, start the ranks on this machine, show progress.

    Ctrl-C once stops the ranks at the end of their step; twice kills them. No process is left behind either way.
    Exit codes: 0 completed, 1 failed, 2 usage or configuration, 130 interrupted.
    """
    from burst_cli import render
    from burst_cli.compose import compose
    from burst_cli.engine_memory import EnginePlanner
    from burst_cli.memory_check import check_memory, with_memory
    from burst_cli.plan_candidates import group_topology
    from cluster.facts import probe_local_node
    from cluster.plan import build_launch_plan
    from engine.attention.auto import check_attention
    from engine.config_checks import check_config
    from engine.runs import default_runs_dir, new_run_path

    composed = compose(overrides or [], config_dir or [])
    run_path = new_run_path(runs_dir or default_runs_dir(), composed.config.exp)
    facts = probe_local_node()
    config = build_launch_plan(composed.config, facts, run_path).config
    check_config(config)  # once more: the number of ranks is known only now
    check_attention(config, group_topology(config))
    console = render.stderr()
    planner = EnginePlanner(lambda text: console.print(text, style="dim", markup=False))
    memory = check_memory(planner.settle_attention(config), planner, force=force)
    settled = replace(config, memory=memory.config.memory)  # attention=auto stays: the ranks settle it themselves
    plan = with_memory(build_launch_plan(settled, facts, run_path), memory)
    if dry_run:
        from burst_cli.plan_view import show_plan

        show_plan(plan, memory, as_json=as_json)
        return
    from burst_cli.launching import LaunchManner, run_plan
    from burst_cli.plan_view import memory_notes

    console.print(memory_notes(memory), soft_wrap=True, end="")
    raise typer.Exit(run_plan(plan, composed.overrides, LaunchManner(plain_lines=plain, as_json=as_json)))
