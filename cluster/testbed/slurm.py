"""Slurm in a testbed: one controller on this machine, a daemon per node inside its namespaces, munge between them.

slurm/                 of the testbed's folder
    slurm.conf cgroup.conf        SLURM_CONF names the first
    prolog.sh env.NODE            what every task gets into its environment
    munge/ state/ spool/NODE/ log/ and a pid file per daemon
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.testbed.folder import TestbedFolder, TestbedState
from cluster.testbed.machine import run_command, tool_path, try_command, wait_until
from cluster.testbed.node import Node
from cluster.testbed.spec import MAX_NODES, TestbedSpec
from cluster.testbed.templates import render
from cluster.testbed.texts import MARK_VARIABLE, session_environment

CONF_VARIABLE = "SLURM_CONF"
_CONTROLLER_PORT = 6817
_ANSWER_S = 1.0
_MIN_CPUS = 4  # so that several ranks fit on a node of a small machine
_HEAD = Path(__file__).with_name("head.sh")
_FREEZER = Path("/sys/fs/cgroup/freezer")


@dataclass(frozen=True)
class SlurmRig:
    """Slurm of the testbed `state`."""

    state: TestbedState
    folder: TestbedFolder

    @property
    def conf(self) -> Path:
        """What SLURM_CONF must name."""
        return self.folder.slurm_conf

    def files(self) -> dict[Path, str]:
        """Its configuration. `slurmd -N` makes several nodes of one machine possible."""
        return {
            self.conf: self._conf_text(),
            self.conf.with_name("cgroup.conf"): "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n",
            self.conf.with_name("gres.conf"): "".join(f"Name=gpu File={path}\n" for path in self._gpus),
            self._prolog: f'#!/bin/sh\nexec cat "{self._path}/env.$SLURMD_NODENAME"\n',
            **{self._path / f"env.{node}": self._exports(node) for node in self.state.spec.node_names},
        }

    def commands(self) -> Iterator[tuple[str, ...]]:
        """What starts munge and the controller, on this machine."""
        munge = self._path / "munge"
        files = (f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed"))
        # munged wants every folder above its socket open to all; ours is open to root alone, as are its users.
        yield (tool_path("munged"), "--force", f"--socket={munge / 'socket'}", *files)
        hosts = str(self.folder.node(self.state.spec.node_names[0]).etc / "hosts")
        # It listens at the address that its machine's name has, and insists on that name.
        apart = ("unshare", "--mount", "--uts", "sh", str(_HEAD), hosts)
        yield (*apart, tool_path("slurmctld"), "-f", str(self.conf))

    def node_command(self, node: str) -> tuple[str, ...]:
        """What starts the daemon of a node, inside it."""
        return (tool_path("slurmd"), "-N", node, "-f", str(self.conf))

    def write(self) -> None:
        """Make the folders, the key and the configuration."""
        for folder in (self._path, *(self._path / name for name in ("munge", "state", "spool", "log", "gpus"))):
            folder.mkdir(mode=0o755, exist_ok=True)
        for path, text in self.files().items():
            path.write_text(text, encoding="utf-8")
        self._prolog.chmod(0o755)
        for path in self._gpus:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # like /dev/null; Slurm counts devices only
        key = self._path / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def start(self, nodes: Sequence[Node]) -> None:
        """Start all daemons; `wait` says when they are ready."""
        for command in self.commands():
            run_command(command, environment={MARK_VARIABLE: self.state.spec.name}, log=self._log)
        for node in nodes:
            self.start_node(node)

    def start_node(self, node: Node) -> None:
        """Start the daemon of one node."""
        environment = {MARK_VARIABLE: self.state.spec.name}
        run_command(node.inside(*self.node_command(node.name)), environment=environment, log=self._log)

    def wait(self) -> None:
        """Return as soon as every node takes jobs."""
        idle = ["idle"] * self.state.spec.nodes
        log = self._path / "log" / "slurmctld.log"
        wait_until(lambda: [*self.node_states().values()] == idle, "Slurm with all nodes idle", log)

    def node_states(self) -> dict[str, str]:
        """What Slurm says of every node: idle, allocated, down*, ...; empty when its controller does not answer."""
        if not self.controller_answers():
            return {}  # a client would wait for seconds
        listing = try_command(("sinfo", "-h", "-N", "-o", "%N %T"), environment={CONF_VARIABLE: str(self.conf)})
        return dict(line.split(maxsplit=1) for line in listing.stdout.splitlines() if " " in line)

    def controller_answers(self) -> bool:
        """Whether slurmctld listens."""
        try:
            with socket.create_connection((self.state.network.head_address, _CONTROLLER_PORT), _ANSWER_S):
                return True
        except OSError:
            return False

    @property
    def _path(self) -> Path:
        return self.conf.parent

    @property
    def _prolog(self) -> Path:
        return self._path / "prolog.sh"

    @property
    def _gpus(self) -> tuple[Path, ...]:
        """Files that stand for the devices of a node's fake GPUs."""
        return tuple(self._path / "gpus" / f"nvidia{index}" for index in range(gpus_per_node(self.state.spec)))

    def _conf_text(self) -> str:
        """The configuration of controller, nodes and clients: quick to notice what died, never running a job again."""
        return render(
            "slurm.conf",
            spec=self.state.spec,
            network=self.state.network,
            path=self._path,
            port=_CONTROLLER_PORT,
            has_freezer=_FREEZER.is_dir(),
            cpus=max(_MIN_CPUS, os.cpu_count() or 1),
            gpus=gpus_per_node(self.state.spec),
        )

    def _exports(self, node: str) -> str:
        """What tasks of a node get beside their job's environment: the same as its SSH sessions."""
        environment = session_environment(self.state, node, self.folder.node(node))
        return "".join(f"export {name}={value}\n" for name, value in environment.items())

    @property
    def _log(self) -> Path:
        return self._path / "log" / "start.log"


def gpus_per_node(spec: TestbedSpec) -> int:
    """How many fake GPUs a node has, by the name of its hardware."""
    return int(spec.hardware.rpartition("x")[2]) if spec.hardware[-1].isdigit() else 0


def slurm_control_groups(name: str) -> tuple[str, ...]:
    """Names of the control groups that slurmd makes for the nodes of the testbed `name`, however many it has."""
    return tuple(f"slurm_{node}" for node in TestbedSpec(name, MAX_NODES).node_names)
