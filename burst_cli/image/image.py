"""`burst image`: the container image, on every node."""

from __future__ import annotations

import functools
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.image.view import PushView, plan_view, results_view, status_view
from burst_cli.options import JsonOption, NodeOptions, Targets
from cluster.errors import ClusterError
from cluster.image.archive import pack_image
from cluster.image.build import Device, build_command, run_build
from cluster.image.engine import Engine, Image, build_status, engine_here
from cluster.image.push import Push
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.session import SshPool
from cluster.testbed.spec import parse_rate
from engine.config.errors import ConfigError
from engine.runs.figures import binary_bytes
from engine.runs.record import git_facts

app = new_verb()

ImageOption = Annotated[str | None, typer.Option(metavar="NAME:TAG", help="Default: cluster.container.image.")]


@app.command()
def build(
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="More options of the engine's build.")
    ] = None,
    tag: Annotated[str, typer.Option("--tag", "-t", help="NAME:TAG of the image.")] = "burst:latest",
    device: Annotated[Device, typer.Option(help="cuda: NVIDIA GPUs; cpu: much smaller.")] = "cuda",
    context: Annotated[Path | None, typer.Option(help="A checkout of burst; default: the one that runs.")] = None,
    command: Annotated[str, typer.Option(help="The engine's command line.")] = "docker",
    dry_run: Annotated[bool, typer.Option(help="Show the command; build nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the image of this checkout through the Docker engine that DOCKER_HOST names.

    Layers from the one that changes least: torch, other packages, burst. For
    machines without network, fetch wheels once where there is one, into the
    checkout: pip wheel -w docker/wheels -c constraints.txt
    '.[parquet,tensorboard]' hatchling. Nothing else is installed then.

    burst image build --tag burst:1 -- --no-cache --build-arg BASE=NAME:TAG
    """
    root = (context or Path(__file__).resolve().parents[2]).absolute()
    argv = build_command(root, command, tag, device, options or [], git_facts(root))
    if dry_run:
        render.show({"command": argv}, shlex.join(argv), as_json=as_json)
        return
    run_build(argv)
    image = _image_here((command,), tag)
    document = {"image": tag, "id": image.image_id, "size_bytes": image.size_bytes}
    built = f"{tag}: {binary_bytes(image.size_bytes)}, {image.image_id}"
    render.show(document, built, f"next: burst image push --image {tag} cluster=NAME", as_json=as_json)


@app.command()
def push(
    nodes: NodeOptions,
    image: ImageOption = None,
    limit: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of what leaves this machine, such as 50MB/s.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would go where; send nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Bring an image of this machine's engine to every node.

    Every node's own engine pulls it through the SSH connection from a registry
    that lives as long as the push; layers that it pulled before do not move
    again. From three nodes on, nodes feed each other. Needed on the nodes:
    python3 (3.9) and the engine. At the end every node's image is compared with
    the one here.

    Exit code 1 if any node failed; the others complete.

    burst image push cluster=mycluster --image burst:latest
    """
    targets = nodes.select()
    rate = None if limit is None else parse_rate(limit) / 8
    try:
        return 0 if _push(targets, _image_name(targets, image), rate, dry_run=dry_run, as_json=as_json) else 1
    except KeyboardInterrupt:
        text = "interrupted: layers that are whole stay on the nodes; the same command sends the others"
        render.say(render.stderr(), text)
        raise


@app.command()
def status(nodes: NodeOptions, image: ImageOption = None, as_json: JsonOption = False) -> int:
    """Show which nodes hold which image under a name.

    Nodes are compared with the image of this machine, or with most nodes where
    it has none: by identity (layers and settings), because ids differ between
    kinds of engines.

    Exit codes: 0 all hold it, 1 one does not, 3 one could not be asked.
    """
    targets = nodes.select()
    name, engine = _image_name(targets, image), tuple(shlex.split(targets.config.cluster.container.command))
    try:
        local = _image_here(engine, name).identity
    except ClusterError:
        local = None

    def find(host: Host) -> Image | None:
        with pool.connect(host) as connection:
            return Engine(connection.run, engine).find(name)

    with SshPool() as pool:
        result = build_status(name, list(fan_out(targets.hosts, find).values()), local)
    render.show(asdict(result), status_view(result), as_json=as_json)
    return result.exit_code


def _push(targets: Targets, name: str, limit: float | None, *, dry_run: bool, as_json: bool) -> bool:
    """Whether a push did, or will do, what it is to do, everything shown. Raises ClusterError."""
    if "@" in name or name.startswith("sha256:"):
        raise ConfigError(f"{name}: no engine lets a digest be given to an image as its name; push it under NAME:TAG")
    begin, console = time.monotonic(), render.stderr()
    engine = tuple(shlex.split(targets.config.cluster.container.command))
    image = _image_here(engine, name)
    pack = functools.partial(pack_image, engine, image)
    with SshPool() as pool:
        push = Push(image, pack, engine, targets.hosts, pool.connect)
        plan = push.plan(limit)
        if dry_run:
            render.show(asdict(plan), plan_view(plan), as_json=as_json)
            return not any(node.problem for node in plan.nodes)
        if plan.pulling:
            console.print(plan_view(plan))
        view = PushView(console, push)
        with console.status(view):
            results = push.run(plan, view.tell)
        sent = push.sent_bytes
    elapsed_s, is_ok = time.monotonic() - begin, all(result.ok for result in results)
    received = sum(result.received_bytes for result in results)
    head = {"image": plan.image, "identity": plan.identity, "ok": is_ok, "seconds": elapsed_s, "sent_bytes": sent}
    document = {**head, "received_bytes": received, "nodes": [asdict(result) for result in results]}
    render.show(document, results_view(results, elapsed_s), as_json=as_json)
    return is_ok


def _image_here(engine: tuple[str, ...], name: str) -> Image:
    """Raises ClusterError when this machine has none of that name."""
    image = engine_here(engine).find(name)
    if image is None:
        words = f"{shlex.join(engine)} image ls"
        raise ClusterError(f"this machine has no image {name!r}; build it with `burst image build`, or see `{words}`")
    return image


def _image_name(targets: Targets, given: str | None) -> str:
    name = given or targets.config.cluster.container.image
    if name is None:
        raise ConfigError("no image is named: give --image NAME:TAG, or set cluster.container.image")
    return name
