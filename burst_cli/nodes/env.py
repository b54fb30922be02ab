"""`burst env`: the NCCL and gloo environment of every node, with the reason for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.figures import count_of
from burst_cli.nodes import env_view
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.targets import HostfileOption, HostsOption, select_targets
from cluster.env.plan import Format
from cluster.errors import HostsError
from cluster.ssh.nodes import fold_nodes, parse_nodes
from engine.config.errors import ConfigError

if TYPE_CHECKING:
    from cluster.env.ask import FleetEnvironment

LOG_BYTES = 64 << 20
app = new_verb()


NodeOption = Annotated[
    str | None, typer.Option("--node", metavar="NODES", help="Only these of the nodes, such as node3 or node[1-2].")
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run", metavar="DIR", help="A run folder: NCCL's log and the flight recorder go to its logs/ on every node."
    ),
]


@app.command()
def show(
    context: typer.Context,
    overrides: OverridesArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    node: NodeOption = None,
    run: RunOption = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Print the environment of one node as text, without a table.")
    ] = None,
    config_dir: ConfigDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the variables of each node, the adapters that NCCL uses, and why.

    Nodes come from --hosts, --hostfile, cluster=NAME or Slurm; without any,
    this machine is looked at. Each node is asked once, over SSH; nothing is
    installed or changed there. Nodes that get the same are shown once.

    \b
    burst env show cluster=lab
        every node, with reasons
    burst env show cluster=lab --node node3 --format sh
        lines to source in a shell

    Exit codes: 0 every node has a plan, 1 some have none, 2 usage or
    configuration.
    """
    if as_json and form is not None:
        raise ConfigError(f"--json and --format {form.value} exclude each other: one document, or lines of text")
    fleet, source = _ask(context.params)
    if form is not None:
        env_view.print_text(fleet, form)
    elif as_json:
        nodes = {name: environment.to_dict() for name, environment in fleet.environments.items()}
        render.emit_json({"nodes": nodes, "errors": fleet.errors, "source": source})
    else:
        render.stdout().print(env_view.fleet_view(fleet, source))
    env_view.print_errors(fleet)
    raise typer.Exit(1 if fleet.errors else 0)


@app.command()
def check(
    context: typer.Context,
    overrides: OverridesArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    node: NodeOption = None,
    run: RunOption = None,
    nccl_log: Annotated[
        Path | None,
        typer.Option(
            "--nccl-log", metavar="FILE", help="Compare NCCL's own log (NCCL_DEBUG=INFO) with the plan instead."
        ),
    ] = None,
    config_dir: ConfigDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the plan with what is set on the nodes, or with NCCL's log.

    Looked at are a login, nccl.conf and running ranks. Named are variables that
    differ, and NCCL_ and GLOO_ variables that the plan does not know;
    nothing else of an environment leaves a node.
    With --nccl-log: which adapters and which network NCCL says it took.

    Exit codes: 0 as planned, 1 differences, 2 usage or configuration,
    3 something could not be looked at.
    """
    log = _read_log(nccl_log) if nccl_log is not None else None
    fleet, source = _ask(context.params, with_live=log is None)
    report = env_view.check_report(fleet, log)
    if as_json:
        render.emit_json(report.to_dict() | {"source": source})
    else:
        render.stdout().print(env_view.report_view(report))
        env_view.print_errors(fleet)
    raise typer.Exit(report.exit_code)


def _ask(typed: Mapping[str, Any], *, with_live: bool = False) -> tuple[FleetEnvironment, str]:
    """(environments of the nodes that are meant, where their names came from); of this machine when none is named.

    All nodes are asked even if --node picks a few, because rails are compared across nodes.
    """
    from cluster.env.ask import ask_fleet  # loads SSH, which `--help` need not

    hosts, hostfile, node, run = (typed[name] for name in ("hosts", "hostfile", "node", "run"))
    targets = select_targets(
        typed["overrides"] or (), typed["config_dir"] or (), hosts=hosts, hostfile=hostfile, or_here=True
    )
    if targets.hosts:
        _chosen(node, [host.name for host in targets.hosts])
    log_dir = str(run.absolute() / "logs") if run is not None else None
    with render.stderr().status(f"asking {count_of('node', len(targets.hosts)) if targets.hosts else 'this machine'}"):
        fleet = ask_fleet(targets.hosts, targets.config.cluster, with_live=with_live, log_dir=log_dir)
    chosen = _chosen(node, [*fleet.environments, *fleet.errors])

    def keep(table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in table.items() if name in chosen}

    kept = replace(fleet, environments=keep(fleet.environments), live=keep(fleet.live), errors=keep(fleet.errors))
    return kept, targets.source


def _read_log(path: Path) -> str:
    """The text of a log of NCCL; its beginning, should it be huge, for NCCL says at the start what it uses."""
    if not path.is_file():
        raise ConfigError(f"--nccl-log {path}: no such file; NCCL writes one where NCCL_DEBUG_FILE says")
    with path.open("rb") as file:
        return file.read(LOG_BYTES).decode("utf-8", errors="replace")


def _chosen(node: str | None, names: Sequence[str]) -> set[str]:
    """The names that --node picks; all without it. Raises HostsError for one that is none of them."""
    wanted = set(names) if node is None else set(parse_nodes(node, "--node").names)
    if not wanted <= set(names):
        unknown = fold_nodes(sorted(wanted - set(names)))
        raise HostsError(f"--node {node}: {unknown} is none of the nodes; they are {fold_nodes(names)}")
    return wanted
