"""`burst check-nodes`: what is wrong on which node, before a launch finds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.nodes.check_view import open_check_view, print_report, print_usable
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.targets import HostfileOption, HostsOption, select_targets
from cluster.checks import run
from cluster.checks.finding import FleetReport
from cluster.checks.run import CheckOptions
from cluster.checks.selection import explain, read_selection
from cluster.ssh.hosts import Host
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig

app = new_verb()

LocalOption = Annotated[
    bool,
    typer.Option("--local", help="This machine, whatever is named: for init containers and prologs of schedulers."),
]


@dataclass(frozen=True)
class Output:
    """How the result is given. Raises ConfigError for nonsense."""

    as_json: bool = False
    names_only: bool = False
    all_findings: bool = False

    def __post_init__(self) -> None:
        if self.as_json and self.names_only:
            raise ConfigError("--json and --list are two ways to print the result; give one of them")


@app.command()
def check_nodes(
    overrides: OverridesArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    local: LocalOption = False,
    config_dir: ConfigDirOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECKS", help="Only these groups or checks: gpu,ib or gpu.busy."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECKS", help="Not these groups or checks.")
    ] = None,
    names_only: Annotated[
        bool, typer.Option("--list", "-l", help="Print only the usable nodes: one line such as node[1-3].")
    ] = False,
    collectives: Annotated[
        bool,
        typer.Option("--collectives", help="Measure all-reduce, all-to-all and pairs of nodes by a launch instead."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --collectives: print the launch.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds that one node may take to answer.")
    ] = 60,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Show what is OK or was skipped, too.")] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CHECK", help="Say what a check means, and check nothing.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every node: SSH, GPUs, InfiniBand, network, disks and software.

    All nodes are asked at once, over SSH; nothing is installed or changed on them. Nodes come from --hosts, --hostfile,
    cluster.nodes (cluster=NAME) or Slurm; without any, this machine is checked. What should be there comes from
    cluster.expected, else from what most nodes have.

    FAIL: start no run there. UNKNOWN: could not be seen, which does not count as healthy. WARN: usable, worth a look.

    Exit code 0: all nodes are usable. 1: a node failed. 3: none failed, but one is unknown. 2: wrong usage.

        burst check-nodes cluster=testbed
        burst check-nodes --hosts node[1-8] --skip ib -l
        burst check-nodes cluster=lab --collectives

    --collectives starts ranks as `burst launch` does (NCCL where GPUs are, else gloo) and trains nothing. It prints
    busbw, as nccl-tests count it, per size, and names a node or a pair below half of the usual rate: exit code 1.
    """
    if explain is not None:
        _explain(explain, as_json=as_json)
        return
    if dry_run and not collectives:
        raise ConfigError("--dry-run shows the launch of --collectives; checks change nothing on nodes")
    if local and (hosts is not None or hostfile is not None):
        raise ConfigError("--local checks this machine, so it takes no --hosts or --hostfile")
    if collectives and (only or skip or names_only or show_all):
        raise ConfigError("--collectives makes no checks, so it takes no --only, --skip, --list or --all")
    output = Output(as_json, names_only, show_all)
    options = CheckOptions(read_selection(only or (), skip or ()), timeout_s=timeout)
    targets = select_targets(
        overrides or (), config_dir or (), hosts=hosts, hostfile=hostfile, or_here=True, local=local
    )
    if collectives:
        from burst_cli.nodes.collectives import check_collectives  # loads a launch

        raise typer.Exit(check_collectives(targets, overrides or (), dry_run=dry_run, as_json=as_json))
    raise typer.Exit(run_check(targets.hosts, targets.config, options, output))


def run_check(hosts: Sequence[Host], config: RunConfig, options: CheckOptions, output: Output) -> int:
    """Check `hosts` (none: this machine) and show the result; the exit code."""
    report = _check(hosts, config, options)
    if output.as_json:
        render.emit_json(report.to_dict())
    elif output.names_only:
        print_usable(report)
    else:
        print_report(render.stdout(), report, all_findings=output.all_findings)
    return report.exit_code


def _explain(check: str, *, as_json: bool) -> None:
    if as_json:
        render.emit_json({"checks": explain(check)})
        return
    for name, text in explain(check).items():
        render.stdout().print(Text.assemble((name, "bold"), f": {text}"), soft_wrap=True)


def _check(hosts: Sequence[Host], config: RunConfig, options: CheckOptions) -> FleetReport:
    console = render.stderr()
    if not hosts:
        report = run.check_this_machine(config.cluster, options)
    else:
        with open_check_view(console, (host.name for host in hosts)) as view:
            report = run.check_nodes(hosts, config.cluster, options, view)
    for note in report.notes:  # what is wrong here, not on a node
        console.print(render.told("warning", note), soft_wrap=True)
    return report
