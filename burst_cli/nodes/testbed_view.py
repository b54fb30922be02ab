"""What a person sees of a testbed: its table, what to type next, and the plan of one that is not yet there."""

from __future__ import annotations

import os

from rich.console import Group, RenderableType
from rich.text import Text

from burst_cli.figures import DASH
from burst_cli.tables import listing
from cluster.testbed.node import Service
from cluster.testbed.status import NodeStatus, TestbedStatus

_SLURM_STYLES = {"idle": "green", "mixed": "green", "allocated": "green", "completing": "yellow"}
_STYLES = {Service.UP: "green", Service.NONE: "dim"}


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
    lines = [
        f"Built in {elapsed_s:.1f} s. Next:",
        f"  {sudo}burst check-nodes cluster={status.name}",
        f"  {sudo}burst testbed fault {last} sshd_hang{named}      and check again; --clear mends it",
        f"  {sudo}burst testbed down{named}",
    ]
    return Text("\n".join(lines))


def _cells(node: NodeStatus, *, docker: bool) -> list[str | Text]:
    services = [node.sshd, *((node.docker,) if docker else ())]
    return [
        node.name,
        *node.addresses.values(),
        *(Text(service.value, _STYLES.get(service, "red")) for service in services),
        *(() if node.slurm is None else (Text(node.slurm, _SLURM_STYLES.get(node.slurm, "red")),)),
        ", ".join(node.faults) or DASH,
    ]


def _sudo() -> str:
    return "sudo " if os.environ.get("SUDO_USER") else ""
