"""Building a testbed, and the handle of one that stands.

`build_plan` says what will be made, `up` makes it: network, files, then per node a process that holds its namespaces,
an sshd and, when asked for, a Docker engine. When a step fails, everything is taken away again.
"""

from __future__ import annotations

import ipaddress
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.ssh.hosts import Host
from cluster.testbed.folder import (
    TestbedError,
    TestbedFolder,
    TestbedState,
    folder_of,
    locked,
    standing_folders,
    state_root,
)
from cluster.testbed.hardware.files import lay_hardware
from cluster.testbed.machine import check_machine, run_command
from cluster.testbed.network import BLOCKS, Command, block_network
from cluster.testbed.node import Node, make_key, sshd_options
from cluster.testbed.slurm import SlurmRig
from cluster.testbed.spec import TestbedSpec
from cluster.testbed.teardown import leftovers, tear_down
from cluster.testbed.templates import render
from cluster.testbed.texts import CONFIG_MARK, MARK_VARIABLE, SSH_USER, is_cluster_config

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Testbed:
    """A standing testbed. Names of nodes that it does not have raise TestbedError."""

    __test__ = False

    folder: TestbedFolder
    state: TestbedState

    @property
    def name(self) -> str:
        """Its name, and the option of the configuration group `cluster` that means it."""
        return self.state.spec.name

    @property
    def node_names(self) -> tuple[str, ...]:
        """Host names of its nodes."""
        return self.state.spec.node_names

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes."""
        return tuple(self.node(name) for name in self.node_names)

    def node(self, name: str) -> Node:
        """One node."""
        if name not in self.node_names:
            raise TestbedError(f"testbed {self.name} has no node {name!r}; it has {self.state.spec.node_set}")
        return Node(self.state, name, self.folder.node(name))

    @property
    def slurm(self) -> SlurmRig | None:
        """Its Slurm; None when it has none."""
        return SlurmRig(self.state, self.folder) if self.state.spec.slurm else None

    def host(self, name: str, connect_timeout_s: float = 10.0) -> Host:
        """How SSH reaches a node."""
        return Host(
            name=name,
            address=self.node(name).address,
            user=SSH_USER,
            key_name=name,
            identity_files=(str(self.folder.client_key),),
            known_hosts=(str(self.folder.known_hosts),),
            connect_timeout_s=connect_timeout_s,
        )

    def hosts(self, connect_timeout_s: float = 10.0) -> tuple[Host, ...]:
        """All nodes."""
        return tuple(self.host(name, connect_timeout_s) for name in self.node_names)


@dataclass(frozen=True)
class TestbedPlan:
    """What `up` will do; commands in order, files by path. `inside` of a node are its namespaces, made by the first of
    its commands; keys and their known_hosts are made on the spot."""

    __test__ = False

    name: str
    nodes: tuple[str, ...]
    folder: str
    config_file: str
    commands: tuple[Command, ...]
    files: dict[str, str]


def build_plan(spec: TestbedSpec, config_file: Path) -> TestbedPlan:
    """What `up(spec, config_file)` would do on this machine now, in the first free block of addresses."""
    folder = folder_of(spec.name)
    testbed = Testbed(folder, TestbedState(spec, _free_block(), python_folder=_python_folder()))
    passwd = Path("/etc/passwd").read_text(encoding="utf-8")
    files = {str(path): text for path, text in _shared_files(testbed, config_file).items()}
    commands = list(testbed.state.network.commands())
    for node in testbed.nodes:
        files |= {str(path): text for path, text in node.files("(made by ssh-keygen)\n", passwd).items()}
    for part in _parts(spec):
        commands += [part.command(node) for node in testbed.nodes]
    if testbed.slurm is not None:
        files |= {str(path): text for path, text in testbed.slurm.files().items()}
        commands += testbed.slurm.commands()
        commands += [_inside(node, testbed.slurm.node_command(node.name)) for node in testbed.nodes]
    return TestbedPlan(spec.name, spec.node_names, str(folder.path), str(config_file), tuple(commands), files)


def up(spec: TestbedSpec, config_file: Path, *, on_step: OnStep = lambda step: None) -> Testbed:
    """Build the testbed and write `config_file`, by which `cluster=NAME` means it.

    Raises TestbedError, with nothing left behind, when this machine cannot carry it, when one of that name stands, or
    when `config_file` is somebody else's. `on_step` is told what is done now.
    """
    check_machine(docker=spec.docker, slurm=spec.slurm)
    if config_file.exists() and not is_cluster_config(config_file.read_text(encoding="utf-8", errors="replace")):
        raise TestbedError(f"{config_file} is not ours; choose another --name, or move that file away")
    folder, begun = folder_of(spec.name), False
    try:
        state_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(state_root()):
            if leftovers(spec.name):
                raise TestbedError(
                    f"a testbed {spec.name} stands already, whole or in part. Look at it: burst testbed status "
                    f"--name {spec.name}; remove it: burst testbed down --name {spec.name}"
                )
            state = TestbedState(spec, _free_block(), config_file=str(config_file), python_folder=_python_folder())
            begun = True
            folder.path.mkdir(mode=0o700, parents=True)
            folder.save(state)
        testbed = Testbed(folder, state)
        with locked(folder.path):
            _build(testbed, config_file, on_step)
    except BaseException:
        if begun:
            on_step("taking it down again")
            tear_down(spec.name, config_file)
        raise
    return open_testbed(spec.name)


def open_testbed(name: str) -> Testbed:
    """The standing testbed `name`; TestbedError when there is none."""
    folder = folder_of(name)
    state = folder.load()
    if state is None or not state.complete:
        others = ", ".join(found.path.name for found in standing_folders() if found.path.name != name)
        known = f"; there are: {others}" if others else ""
        raise TestbedError(f"no testbed {name} stands{known}. Build it: burst testbed up --name {name}")
    return Testbed(folder, state)


@dataclass(frozen=True)
class _Part:
    """What runs on every node: started on all, then awaited on all. command: what starts it, as a plan shows it."""

    name: str
    command: Callable[[Node], Command]
    start: Callable[[Node], None]
    wait: Callable[[Node], None]


def _parts(spec: TestbedSpec) -> Iterator[_Part]:
    yield _Part("namespaces", Node.hold_command, Node.start_holder, Node.wait_for_holder)
    yield _Part("sshd", lambda node: _inside(node, node.sshd_command()), Node.start_sshd, Node.wait_for_sshd)
    if spec.docker:
        yield _Part(
            "Docker", lambda node: _inside(node, node.docker_command()), Node.start_docker, Node.wait_for_docker
        )


def _inside(node: Node, command: Command) -> Command:
    """A command inside a node, as a plan shows it: the node's namespaces are not there yet."""
    return ("nsenter", f"--target=$(cat {node.folder.holder_pid})", "--net", "--mount", "--uts", *command)


def _build(testbed: Testbed, config_file: Path, on_step: OnStep) -> None:
    spec, nodes = testbed.state.spec, testbed.nodes
    on_step("network")
    for command in testbed.state.network.commands():
        run_command(command, environment={MARK_VARIABLE: spec.name})
    on_step("keys and files")
    _write_files(testbed)
    for part in _parts(spec):
        on_step(part.name)
        for step in (part.start, part.wait):
            for node in nodes:
                step(node)
    for node in nodes:
        lay_hardware(node)
    if testbed.slurm is not None:
        on_step("Slurm")
        testbed.slurm.write()
        testbed.slurm.start(nodes)
        testbed.slurm.wait()
    for path, text in _shared_files(testbed, config_file).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    testbed.folder.save(replace(testbed.state, complete=True))


def _write_files(testbed: Testbed) -> None:
    folder, spec = testbed.folder, testbed.state.spec
    folder.shared.mkdir(mode=0o755)
    make_key(folder.client_key, f"burst testbed {spec.name}")
    client_key = folder.client_key.with_suffix(".pub").read_text(encoding="utf-8")
    passwd = Path("/etc/passwd").read_text(encoding="utf-8")
    options = sshd_options(folder.client_key)
    for node in testbed.nodes:
        for path, text in node.files(client_key, passwd, options).items():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(text, encoding="utf-8")
        (node.folder.docker / "data").mkdir(parents=True, exist_ok=True, mode=0o711)
        make_key(node.folder.ssh / "host_key", node.name)
    folder.known_hosts.write_text("".join(node.host_key() for node in testbed.nodes))


def _shared_files(testbed: Testbed, config_file: Path) -> dict[Path, str]:
    """Files by which this machine reaches the nodes."""
    folder, spec = testbed.folder, testbed.state.spec
    return {
        folder.ssh_config: render("ssh_config", spec=spec, network=testbed.state.network, folder=folder, user=SSH_USER),
        config_file: render("cluster.yaml", spec=spec, folder=folder, mark=CONFIG_MARK),
    }


def _python_folder() -> str | None:
    """Where this Python is; None when sshd's configuration could not hold that path."""
    folder = str(Path(sys.executable).parent)
    return folder if re.fullmatch(r"/[^:\"'\\\s]+", folder) else None


def _free_block() -> int:
    """The first block of addresses that neither a testbed nor a route of this machine uses."""
    taken = {state.block for folder in standing_folders() if (state := folder.load()) is not None}
    routes = json.loads(run_command(("ip", "-json", "-4", "route", "show")))
    used = [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]
    for block in range(BLOCKS):
        if block not in taken and not any(block_network(block).overlaps(network) for network in used):
            return block
    raise TestbedError("no free addresses: every network in 10.100.0.0 to 10.115.255.255 is in use on this machine")
