"""Arguments and options that several verbs share, each written once; and which nodes a verb works on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from burst_cli import render
from burst_cli.overrides import complete_override, complete_run
from engine.config.settings import RunConfig
from engine.runs.folder import RUNS_DIR_VARIABLE

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.ssh.hosts import Host, NodeList

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]...",
        help="Settings in Hydra's grammar: exp=tiny train.steps=50 attention=burst",
        autocompletion=complete_override,
    ),
]

_RUN = "Run id (or how it begins, or its last six digits), EXP, EXP/ID or folder; none:"
NewestRunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help=f"{_RUN} the newest run.", autocompletion=complete_run)
]
LivingRunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help=f"{_RUN} the run that lives.", autocompletion=complete_run)
]

ConfigDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with your own exp/, model/, ... files; searched before all others. May be repeated.",
    ),
]

FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        file_okay=False,
        help="A folder of Hugging Face: its model, weights, windows and tokenizer; overrides change them.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]

RUNS_DIR = Path("runs")
RunsDirOption = Annotated[
    Path, typer.Option(metavar="FOLDER", envvar=RUNS_DIR_VARIABLE, file_okay=False, help="Folder of all runs.")
]

DetachOption = Annotated[
    bool, typer.Option(help="Return once the ranks run; a process in the background stays with them.")
]

DryRunOption = Annotated[bool, typer.Option(help="Show the files, environment and commands; create and start nothing.")]

AsOption = Annotated[
    Literal["kubernetes", "skypilot"] | None,
    typer.Option("--as", help="With --dry-run: print only this job or task, as YAML.", show_default=False),
]

ForceOption = Annotated[
    bool, typer.Option(help="Start also what may not fit into memory, and on nodes that are busy or differ.")
]

SkipChecksOption = Annotated[bool, typer.Option(help="Do not check the health of the nodes before.")]

PlainOption = Annotated[bool, typer.Option(help="Progress as lines, also on a terminal.")]
HostsOption = Annotated[
    str | None,
    typer.Option("--hosts", "-w", metavar="NODES", help="Nodes, such as node[1-4,7]; default: cluster.nodes."),
]
HostfileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with one node per line, instead of --hosts.")
]


@dataclass(frozen=True)
class Targets:
    """What a verb works on. source: where the list of nodes came from, in words."""

    config: RunConfig
    hosts: tuple[Host, ...]
    source: str


@dataclass(frozen=True)
class NodeOptions:
    """What a verb that reaches nodes is told on the command line of the configuration and of nodes."""

    overrides: OverridesArgument = None
    hosts: HostsOption = None
    hostfile: HostfileOption = None
    config_dir: ConfigDirOption = None

    def select(self, *, or_here: bool = False, local: bool = False) -> Targets:
        """The composed configuration and the nodes: of --hosts, --hostfile, cluster.nodes or Slurm, the first given.

        or_here: where none is, this machine is meant, and there are no hosts; local: that is so whatever is named.
        Raises ConfigError (HostsError among them) when none is, or when a name or the way to it makes no sense.
        """
        from burst_cli.compose import compose
        from cluster.ssh.hosts import resolve_hosts, slurm_nodes

        overrides = self.overrides or ()
        config = compose(overrides, self.config_dir or ()).config
        is_named = any(one is not None for one in (self.hosts, self.hostfile, config.cluster.nodes))
        if local or (or_here and not is_named and slurm_nodes(os.environ) is None):
            return Targets(config, (), "this machine")
        nodes = select_nodes(config, hosts=self.hosts, hostfile=self.hostfile)
        return Targets(config, resolve_hosts(nodes.names, config.cluster, overrides), nodes.source)


def from_folder(
    folder: Path | None, words: Sequence[str], folders: Sequence[Path]
) -> tuple[tuple[str, ...], tuple[Path, ...]]:
    """Return (words, folders of files) with all that --from FOLDER means; they themselves without one."""
    if folder is None:
        return tuple(words), tuple(folders)
    from burst_cli.model_source import words_from  # reads models and tokenizers, which other launches need not

    found = words_from(folder, words, folders)
    render.say(render.stderr(), *(render.told("note", note) for note in found.notes))
    return found.overrides, found.config_dirs


def select_nodes(config: RunConfig, *, hosts: str | None, hostfile: Path | None) -> NodeList:
    """The names alone."""
    from cluster.errors import HostsError
    from cluster.ssh.hosts import parse_nodes, read_hostfile, slurm_nodes

    if hosts is not None and hostfile is not None:
        raise HostsError("--hosts and --hostfile both name nodes; give one of them")
    if hosts is not None:
        return parse_nodes(hosts, "--hosts")
    if hostfile is not None:
        return read_hostfile(hostfile)
    if config.cluster.nodes is not None:
        return parse_nodes(config.cluster.nodes, "cluster.nodes")
    if (allocation := slurm_nodes(os.environ)) is not None:
        return allocation
    raise HostsError(
        "no nodes are named: give --hosts node[1-4], --hostfile FILE or cluster=NAME (a file in conf/cluster/ with "
        "`nodes:`), or start burst inside a Slurm allocation; `burst testbed up` makes nodes to try things on"
    )


@dataclass(frozen=True)
class LaunchRequest:
    """What is to run where. run_path: the run folder to use, in place of a new one in `runs_dir`.

    base: the configuration that the overrides change, in place of that of the files.
    """

    hosts: HostsOption = None
    hostfile: HostfileOption = None
    runs_dir: RunsDirOption = RUNS_DIR
    force: ForceOption = False
    skip_checks: SkipChecksOption = False
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    run_path: Path | None = None
    dry_run: bool = False
    base: RunConfig | None = None

    @property
    def names_nodes(self) -> bool:
        """Whether --hosts or --hostfile does."""
        return self.hosts is not None or self.hostfile is not None


@dataclass(frozen=True)
class OutputOptions:
    """How a launch talks.

    detach: leave the run to a process in the background once the nodes run, or be that process. form: of a rehearsal:
    only the job as another program takes it.
    """

    detach: DetachOption = False
    plain: PlainOption = False
    as_json: JsonOption = False
    form: str | None = None

    def console(self) -> Console:
        """Where progress goes."""
        return render.plain_stderr() if self.plain else render.stderr()
