"""`burst testbed`: a virtual cluster on this machine, to rehearse every verb on."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption
from burst_cli.overrides import builtin_conf_dir, user_conf_dir
from burst_cli.render import listing
from cluster.ssh.hosts import parse_nodes
from cluster.testbed.build import build_plan, open_testbed
from cluster.testbed.build import up as build_testbed
from cluster.testbed.faults import clear_faults, set_fault
from cluster.testbed.machine import check_machine
from cluster.testbed.node import Service
from cluster.testbed.spec import TestbedSpec, parse_rate
from cluster.testbed.status import NodeStatus, TestbedStatus, read_all, read_status
from cluster.testbed.teardown import standing_names, tear_down
from engine.config.errors import ConfigError
from engine.runs.figures import DASH

_SLURM_STYLES = {"idle": "green", "mixed": "green", "allocated": "green", "completing": "yellow"}
_STYLES = {Service.UP: "green", Service.NONE: "dim"}
app = new_verb()

NameOption = Annotated[str, typer.Option(help="Which testbed; several can stand at once.")]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 4,
    rails: Annotated[int, typer.Option(help="Networks between the nodes beside the one that SSH uses.")] = 0,
    rate: Annotated[
        str | None, typer.Option(help="Speed of every link, each way, such as 200mbit.", show_default="unlimited")
    ] = None,
    docker: Annotated[bool, typer.Option(help="A Docker engine of its own on every node.")] = False,
    docker_in_memory: Annotated[
        bool, typer.Option(help="With --docker: images in memory instead of on the disk.")
    ] = False,
    slurm: Annotated[bool, typer.Option(help="A Slurm controller, and its daemon on every node.")] = False,
    hardware: Annotated[str, typer.Option(help="Fake GPUs and InfiniBand: h100x8, h200x8, a100x8 or none.")] = "none",
    name: NameOption = "testbed",
    dry_run: Annotated[bool, typer.Option(help="Show commands and files; change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a virtual cluster and make `cluster=NAME` mean it: an sshd per node.

    Needs root on Linux. Every node is a network namespace with a name, address,
    host key, home and /etc/hosts of its own; the disks are this machine's. SSH
    takes only the testbed's key; nothing listens outside of the namespaces.

    If a step fails nothing is left behind. `burst testbed down` removes all,
    also after a crash.

    sudo burst testbed up --rails 2 --rate 200mbit --docker --hardware h100x8
    """
    bits = None if rate is None else parse_rate(rate)
    spec = TestbedSpec(name, nodes, rails, bits, docker, docker_in_memory, hardware, slurm)
    config_file = _config_file(name)
    if dry_run:
        plan = build_plan(spec, config_file)
        lines = [
            f"# folder {plan.folder}, configuration {plan.config_file}",
            *(f"# writes {one}" for one in plan.files),
        ]
        render.show(asdict(plan), *lines, *map(shlex.join, plan.commands), as_json=as_json)
        return
    begin_s = time.monotonic()
    with _ends_in_order(), render.stderr().status(f"testbed {name}: {nodes} nodes"):
        build_testbed(spec, config_file)
    elapsed_s = time.monotonic() - begin_s
    built = read_status(name)
    document = {**asdict(built), "elapsed_s": elapsed_s}
    render.show(document, status_table(built), next_steps(built, elapsed_s), as_json=as_json)


@app.command()
def status(
    name: Annotated[str | None, typer.Option(help="Which testbed; default: all.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Show testbeds: nodes, addresses, which daemons answer, faults in force.

    Exit code 1 when one of them does not stand whole.
    """
    check_machine()
    found = read_all(standing_names()) if name is None else (read_status(name),)
    none = "No testbed stands on this machine. Build one: sudo burst testbed up --nodes 4"
    views = [status_table(one) for one in found] or [none]
    render.show({"testbeds": [asdict(one) for one in found]}, *views, as_json=as_json)
    return 0 if all(one.complete for one in found) else 1


@app.command()
def down(
    name: Annotated[str | None, typer.Option(help="Which testbed; default: testbed.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every testbed of this machine, whoever built it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a testbed with everything it started and wrote.

    It finds what is left by its name, so it works after a crash, and twice.
    """
    if everything and name is not None:
        raise ConfigError("--name and --all exclude each other: one testbed, or all of this machine")
    name = "testbed" if name is None else name
    config_file = _config_file(name)
    check_machine()
    names = standing_names() if everything else (name,)
    begin_s = time.monotonic()
    removed = [tear_down(one, config_file.with_name(f"{one}.yaml")) for one in names]
    elapsed_s = time.monotonic() - begin_s
    lines = []
    for one in removed:
        what = f"{one.processes} processes, {one.namespaces} namespaces, {', '.join(one.files) or 'no files'}"
        told = f"removed {what} ({elapsed_s:.1f} s)" if one.anything else "nothing to remove"
        lines.append(f"{one.name}: {told}")
    document = {"removed": [asdict(one) for one in removed], "elapsed_s": elapsed_s}
    render.show(document, *(lines or ["No testbed stands on this machine."]), as_json=as_json)


@app.command()
def fault(
    nodes: Annotated[str, typer.Argument(metavar="NODES", help="Nodes in NodeSet grammar: tb2, tb[1-3].")],
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="One of the list above.")] = None,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="What the kind asks for.")] = None,
    clear: Annotated[bool, typer.Option(help="Take back: this fault, this kind, or all.")] = False,
    name: NameOption = "testbed",
    as_json: JsonOption = False,
) -> None:
    """Break something on nodes of a testbed, or mend it with --clear.

    `burst testbed status` lists what is in force. Kinds of faults:

    \b
    link_down [INTERFACE]    cut all links or one: nobody answers
    link_slow RATE           links carry no more than this, such as 5mbit
    sshd_stop                connections are refused
    sshd_hang                sshd accepts and stays silent
    key_swap                 sshd shows another host key
    login_refused            sshd accepts no key
    disk_full PATH[:FREE]    no space in this folder, or only FREE, such as 100m
    hardware FAULT           of fake hardware, such as gpu_lost:3, busy:0,
                             driver:535.104.05, port_down:mlx5_4

    burst testbed fault tb2 sshd_hang;  burst testbed fault tb2 --clear
    """
    if kind is None and not clear:
        raise ConfigError("which fault? Name a kind, or --clear; see `burst testbed fault --help`")
    chosen = parse_nodes(nodes, "NODES").names
    check_machine()
    testbed = open_testbed(TestbedSpec(name).name)
    for node in chosen:
        testbed.node(node)
    for node in chosen:
        if clear or kind is None:
            testbed = clear_faults(testbed, node, kind, value)
        else:
            testbed = set_fault(testbed, node, kind, value)
    faults = {node: [str(one) for one in testbed.faults.get(node, ())] for node in chosen}
    lines = (f"{node}: {', '.join(texts) or 'no faults'}" for node, texts in faults.items())
    render.show({"name": name, "faults": faults}, *lines, as_json=as_json)


def _config_file(name: str) -> Path:
    """Where the configuration of the testbed `name` lies; ConfigError for a name that means something else already."""
    file = f"{TestbedSpec(name).name}.yaml"
    if (builtin_conf_dir() / "cluster" / file).exists():
        raise ConfigError(f"testbed name {name!r}: cluster={name} comes with burst; choose another --name")
    return user_conf_dir() / "cluster" / file


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end the work inside like Ctrl-C does: what was begun is taken down again."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status_table(status: TestbedStatus) -> RenderableType:
    """One testbed with a row per node; of one that does not stand whole, what is left of it."""
    if not status.complete:
        lines = [Text.assemble((status.name, "bold"), ": ", ("stands only in part", "red"))]
        lines += [Text(f"  {left}") for left in status.leftovers]
        return Group(*lines, Text(f"  remove it: {_sudo()}burst testbed down --name {status.name}"))
    rails = f"{status.rails} rails" if status.rails != 1 else "1 rail"
    facts = [f"{len(status.nodes)} nodes", rails, f"links {status.rate or 'unlimited'}", f"hardware {status.hardware}"]
    title = Text.assemble((status.name, "bold"), f": {status.node_set}, {', '.join(facts)}")
    docker = any(node.docker is not Service.NONE for node in status.nodes)
    daemons = ("sshd", *(("docker",) if docker else ()), *(("slurm",) if status.slurm_conf else ()))
    rows = (_cells(node, docker=docker) for node in status.nodes)
    table = listing(("node", *status.nodes[0].addresses, *daemons, "faults"), rows)
    reach = Text(f"burst ... cluster={status.name}    ssh -F {status.ssh_config} {status.nodes[0].name}", style="dim")
    slurm = [Text(f"export SLURM_CONF={status.slurm_conf}", style="dim")] if status.slurm_conf else []
    return Group(title, table, reach, *slurm)


def next_steps(status: TestbedStatus, elapsed_s: float) -> Text:
    """What to type after `up`."""
    sudo, last = _sudo(), status.nodes[-1].name
    named = "" if status.name == "testbed" else f" --name {status.name}"
    return Text(
        f"Built in {elapsed_s:.1f} s. Next:\n"
        f"  {sudo}burst check-nodes cluster={status.name}\n"
        f"  {sudo}burst testbed fault {last} sshd_hang{named}      and check again; --clear mends it\n"
        f"  {sudo}burst testbed down{named}"
    )


def _cells(node: NodeStatus, *, docker: bool) -> list[str | Text]:
    services = (node.sshd, node.docker) if docker else (node.sshd,)
    daemons = [Text(service.value, _STYLES.get(service, "red")) for service in services]
    slurm = [] if node.slurm is None else [Text(node.slurm, _SLURM_STYLES.get(node.slurm, "red"))]
    return [node.name, *node.addresses.values(), *daemons, *slurm, ", ".join(node.faults) or DASH]


def _sudo() -> str:
    return "sudo " if os.environ.get("SUDO_USER") else ""
