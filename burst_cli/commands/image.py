"""`burst image`: the container image, on every node."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from burst_cli.app import EXIT_INTERRUPTED, new_verb
from burst_cli.image_build import build
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.targets import HostfileOption, HostsOption

if TYPE_CHECKING:
    from burst_cli.targets import Targets

app = new_verb(help="Build the container image, bring it to every node over plain SSH, see which node holds which.")

ImageOption = Annotated[
    str | None,
    typer.Option("--image", metavar="NAME:TAG", help="Default: cluster.container.image.", show_default=False),
]
SharedOption = Annotated[
    str | None,
    typer.Option("--via-shared", metavar="PATH", help="A folder that all nodes see.", show_default=False),
]


class RouteChoice(enum.StrEnum):
    """How layers travel."""

    auto = "auto"
    direct = "direct"
    chain = "chain"
    shared = "shared"


app.command()(build)


@app.callback()
def _image() -> None:
    """Build the container image, bring it to every node over plain SSH, see which node holds which."""


@app.command()
def push(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    image: ImageOption = None,
    route: Annotated[
        RouteChoice,
        typer.Option(
            "--route",
            help="direct: everything from here; chain: every node passes on what it gets; auto: chain from 3 nodes on.",
        ),
    ] = RouteChoice.auto,
    via_shared: SharedOption = None,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="RATE", help="Of each sender, such as 50MB/s.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go where; send nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring an image of this machine's engine to every node.

    Only layers that a node lacks are sent, packed with zstd, and verified on
    arrival; from three nodes on every node passes them on to the next. Needed
    on the nodes: python3, ssh and the engine; no registry. An interrupted push
    goes on where it stopped. At the end every node's image is compared with
    the one here.

    Exit code 1 if any node failed; the others complete.

    burst image push cluster=mycluster --image burst:latest
    """
    from burst_cli.image_push import PushRequest, run_push
    from burst_cli.targets import select_targets
    from cluster.image.plan import PushOptions
    from cluster.image.rate import parse_rate

    targets = select_targets(overrides or [], config_dir or [], hosts=hosts, hostfile=hostfile)
    folder = via_shared or (targets.config.cluster.shared_folder if route is RouteChoice.shared else None)
    options = PushOptions(route.value, folder, None if limit is None else parse_rate(limit))
    request = PushRequest(targets, _image_name(targets, image), options, dry_run=dry_run, as_json=as_json)
    try:
        code = run_push(request)
    except KeyboardInterrupt:
        from burst_cli import render

        text = "interrupted: what has arrived stays on the nodes; the same command goes on from there"
        render.stderr().print(text, markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(code)


@app.command()
def status(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    image: ImageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which nodes hold which image under a name.

    Nodes are compared with the image of this machine, or with most nodes where
    it has none: by identity (layers and settings), because ids differ between
    kinds of engines.

    Exit codes: 0 all hold it, 1 one does not, 3 one could not be asked.
    """
    from burst_cli import render
    from burst_cli.image_view import status_view
    from burst_cli.targets import select_targets
    from cluster.access.fanout import fan_out
    from cluster.access.hosts import Host
    from cluster.access.ssh import SshPool
    from cluster.errors import ClusterError
    from cluster.image.local import LocalImage, engine_words
    from cluster.image.status import NodeImage, build_status, read_node_image

    targets = select_targets(overrides or [], config_dir or [], hosts=hosts, hostfile=hostfile)
    name, engine = _image_name(targets, image), engine_words(targets.config.cluster.container.command)
    try:
        local = LocalImage(engine, name).identity
    except ClusterError:
        local = None

    def ask(host: Host) -> NodeImage:
        with pool.connect(host) as connection:
            return read_node_image(connection, engine, name)

    with SshPool() as pool:
        outcomes = fan_out(targets.hosts, ask, width=targets.config.cluster.ssh.fan_out).values()
    found = [outcome.value or NodeImage(outcome.host.name, problem=str(outcome.error)) for outcome in outcomes]
    result = build_status(name, found, local)
    if as_json:
        render.emit_json(result.to_dict())
    else:
        render.stdout().print(status_view(result))
    raise typer.Exit(result.exit_code)


@app.command()
def prune(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    via_shared: SharedOption = None,
    images: Annotated[
        bool,
        typer.Option("--images", help="All tags of the image that burst built (--image), too, unless in use."),
    ] = False,
    image: ImageOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove packed layers that pushes keep on the nodes and here for the next push.

    The images stay where they are, unless --images is given: then those of the
    repository of --image that carry our label go. Containers and other images
    are never touched, not even those that were built upon ours.
    """
    from dataclasses import asdict

    from burst_cli import render
    from burst_cli.image_view import prune_view
    from burst_cli.targets import select_targets
    from cluster.access.ssh import SshPool
    from cluster.image.fleet import open_fleet
    from cluster.image.local import engine_words
    from cluster.image.prune import prune_nodes
    from cluster.image.store import default_store

    targets = select_targets(overrides or [], config_dir or [], hosts=hosts, hostfile=hostfile)
    engine = engine_words(targets.config.cluster.container.command)
    width = targets.config.cluster.ssh.fan_out
    repository = _repository(_image_name(targets, image)) if images else None
    with SshPool() as pool, open_fleet(targets.hosts, pool.connect, width=width) as fleet:
        nodes = prune_nodes(
            fleet, targets.hosts, engine=engine, repository=repository, dry_run=dry_run, shared_folder=via_shared
        )
        fleet.close({"op": "finish"})
    here = default_store().prune(dry_run=dry_run)
    if as_json:
        document = {"dry_run": dry_run, "here": {"files": here[0], "bytes": here[1]}}
        render.emit_json({**document, "nodes": [asdict(node) for node in nodes]})
    else:
        render.stdout().print(prune_view(nodes, here, dry_run=dry_run))
    raise typer.Exit(1 if any(node.problem for node in nodes) else 0)


def _repository(name: str) -> str:
    """The name without its tag; a port of a registry is no tag."""
    head, _, last = name.rpartition("/")
    return f"{head}/{last.partition(':')[0]}".lstrip("/")


def _image_name(targets: Targets, given: str | None) -> str:
    from engine.errors import ConfigError

    name = given or targets.config.cluster.container.image
    if name is None:
        raise ConfigError("no image is named: give --image NAME:TAG, or set cluster.container.image")
    return name
