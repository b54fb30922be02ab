"""Slurm in a testbed: one controller on this machine, a daemon per node inside its namespaces, munge between them.

slurm/                 of the testbed's folder
    slurm.conf cgroup.conf gres.conf   SLURM_CONF names the first
    prolog.sh env.NODE                 what every task gets into its environment
    munge/ state/ spool/ log/ and a pid file per daemon
    gpus/                              files that stand for the devices of fake GPUs
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from cluster.testbed.machine import Command, tool_path, try_command
from cluster.testbed.node import Daemon
from cluster.testbed.spec import MAX_NODES, TestbedSpec
from cluster.testbed.templates import render
from cluster.testbed.testbed import Node, Testbed

_CONTROLLER_PORT = 6817
_ANSWER_S = 1.0
_MIN_CPUS = 4  # so that several ranks fit on a node of a small machine
# It listens at the address that its machine's name has, and insists on that name. A copy of another namespace's mount
# would keep that namespace alive after its end.
_HEAD = 'hostname head && mount --bind "$0" /etc/hosts && { umount -l /run/netns; exec "$@"; }'


def slurm_files(testbed: Testbed) -> dict[Path, str]:
    """Its configuration. `slurmd -N` makes several nodes of one machine possible."""
    path, gpus = testbed.slurm_conf.parent, _gpus(testbed)
    conf = render(
        "slurm.conf",
        testbed=testbed,
        path=path,
        port=_CONTROLLER_PORT,
        has_freezer=Path("/sys/fs/cgroup/freezer").is_dir(),
        cpus=max(_MIN_CPUS, os.cpu_count() or 1),
        gpus=len(gpus),
    )
    exports = {
        path / f"env.{node.name}": "".join(f"export {name}={value}\n" for name, value in node.environment.items())
        for node in testbed.nodes
    }
    return {
        testbed.slurm_conf: conf,
        path / "cgroup.conf": "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n",
        path / "gres.conf": "".join(f"Name=gpu File={gpu}\n" for gpu in gpus),
        path / "prolog.sh": f'#!/bin/sh\nexec cat "{path}/env.$SLURMD_NODENAME"\n',
        **exports,
    }


def slurm_commands(testbed: Testbed) -> Iterator[Command]:
    """What starts munge and the controller, on this machine, with what they need."""
    path = testbed.slurm_conf.parent
    munge = path / "munge"
    yield ("chmod", "755", str(path / "prolog.sh"))
    yield ("mkdir", *(str(path / name) for name in ("munge", "state", "spool", "log", "gpus")))
    for gpu in _gpus(testbed):
        yield ("mknod", "-m", "600", str(gpu), "c", "1", "3")  # like /dev/null; Slurm counts devices only
    yield ("install", "-m", "600", "/dev/null", str(munge / "key"))
    yield ("dd", "if=/dev/urandom", f"of={munge / 'key'}", "bs=1024", "count=1")
    files = (f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed"))
    # munged wants every folder above its socket open to all; ours is open to root alone, as are its users.
    yield (tool_path("munged"), "--force", f"--socket={munge / 'socket'}", *files)
    hosts = str(testbed.nodes[0].etc / "hosts")
    slurmctld = (tool_path("slurmctld"), "-f", str(testbed.slurm_conf))
    yield ("unshare", "--mount", "--uts", "sh", "-c", _HEAD, hosts, *slurmctld)


def slurmd(node: Node) -> Daemon:
    """Its daemon of Slurm, which answers as soon as the node takes jobs."""
    conf = node.testbed.slurm_conf
    return Daemon(
        "Slurm idle",
        node,
        (tool_path("slurmd"), "-N", node.name, "-f", str(conf)),
        conf.with_name(f"slurmd.{node.name}.pid"),
        conf.parent / "log" / "slurmctld.log",
        lambda: slurm_states(node.testbed).get(node.name) == "idle",
    )


def slurm_states(testbed: Testbed) -> dict[str, str]:
    """What Slurm says of every node: idle, allocated, down*, ...; empty when its controller does not answer."""
    if not controller_answers(testbed):
        return {}  # a client would wait for seconds
    listing = try_command(("env", f"SLURM_CONF={testbed.slurm_conf}", "sinfo", "-h", "-N", "-o", "%N %T"))
    return dict(line.split(maxsplit=1) for line in listing.stdout.splitlines() if " " in line)


def controller_answers(testbed: Testbed) -> bool:
    """Whether slurmctld listens."""
    try:
        with socket.create_connection((testbed.head_address, _CONTROLLER_PORT), _ANSWER_S):
            return True
    except OSError:
        return False


def slurm_control_groups(name: str) -> tuple[str, ...]:
    """Names of the control groups that slurmd makes for the nodes of the testbed `name`, however many it has."""
    return tuple(f"slurm_{node}" for node in TestbedSpec(name, MAX_NODES).node_names)


def _gpus(testbed: Testbed) -> list[Path]:
    """One per fake GPU of a node, by the name of its hardware."""
    hardware = testbed.spec.hardware
    count = int(hardware.rpartition("x")[2]) if hardware[-1].isdigit() else 0
    return [testbed.slurm_conf.parent / "gpus" / f"nvidia{index}" for index in range(count)]
