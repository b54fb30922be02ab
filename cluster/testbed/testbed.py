"""A testbed as a value: its folder, its nodes, every path and every address.

Every node is a network namespace; a further one, the switch, holds a bridge per network. This machine has one link into
the management network, `eth0` of the nodes. Rails exist between nodes only.

                 this machine (.254)
                        |
        +------+--------+------ management ------+      10.A.B.0/24
      eth0   eth0     eth0                     eth0
     node 1  node 2  node 3       ...         node N
      rail0  rail0   rail0                    rail0
        +------+-------+--------- rail 0 --------+      10.A.B+1.0/24

/var/lib/burst-testbed/NAME/       0700; BURST_TESTBED_DIR puts it elsewhere
    state.json                     the value
    client_key known_hosts ssh_config
    shared/                        what cluster.shared_folder names
    slurm/                         everything of Slurm, see `cluster.testbed.slurm`
    run/NODE/                      in memory: namespaces `mnt` and `uts`, fake hardware `root`
    nodes/NODE/                    everything else of a node
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from cluster.ssh.hosts import Host
from cluster.testbed.machine import MARK_VARIABLE, SYSTEM_PATH, Command, TestbedError
from cluster.testbed.spec import MANAGEMENT, TestbedSpec
from engine.config.errors import ConfigError
from engine.runs.files import read_json_object, replace_json

DIR_VARIABLE = "BURST_TESTBED_DIR"
NAMESPACES = Path("/run/netns")
PREFIX = "btb"  # of every namespace and link on this machine; tear-down finds leftovers by it
BLOCKS = 256  # of 16 networks each: 10.100.0.0/20, 10.100.16.0/20, ... 10.115.240.0/20
SSH_USER = "root"
_HEAD_NUMBER = 254
_ENTRIES = frozenset(
    {"state.json", "client_key", "client_key.pub", "known_hosts", "ssh_config", "shared", "nodes", "slurm", "run"}
)


@dataclass(frozen=True)
class Fault:
    """One fault in force on a node: `disk_full` with value `/data`, `link_down` with none."""

    kind: str
    value: str | None = None

    def __str__(self) -> str:
        return self.kind if self.value is None else f"{self.kind} {self.value}"


@dataclass(frozen=True)
class Testbed:
    """A testbed in the folder `path`, with the addresses of the block number `block`.

    complete: `up` came to its end. config_file: what it wrote for `cluster=NAME`. python_folder: where the Python is
    that burst runs with; it comes before the system's in PATH of the nodes, so a launch finds there what it needs.
    """

    __test__ = False  # of pytest: not a class of tests

    path: Path
    spec: TestbedSpec
    block: int
    complete: bool = False
    config_file: str | None = None
    python_folder: str | None = None
    faults: dict[str, tuple[Fault, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, and the option of the configuration group `cluster` that means it."""
        return self.spec.name

    @property
    def node_names(self) -> tuple[str, ...]:
        """Host names of its nodes."""
        return self.spec.node_names

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes."""
        return tuple(Node(self, name, number) for number, name in enumerate(self.node_names, 1))

    @property
    def stands(self) -> bool:
        """Whether `up` came to its end, and this machine was not restarted since: then only the files are there."""
        return self.complete and all(node.namespace.exists() for node in self.nodes)

    def node(self, name: str) -> Node:
        """One node. Raises TestbedError for a name that it does not have."""
        if name not in self.node_names:
            raise TestbedError(f"testbed {self.name} has no node {name!r}; it has {self.spec.node_set}")
        return self.nodes[self.node_names.index(name)]

    def host(self, name: str) -> Host:
        """How SSH reaches a node."""
        return Host(
            name=name,
            address=self.node(name).address,
            user=SSH_USER,
            key_name=name,
            identity_files=(str(self.client_key),),
            known_hosts=(str(self.path / "known_hosts"),),
        )

    @property
    def ssh_config(self) -> Path:
        """Of OpenSSH's client: `ssh -F FILE NODE`."""
        return self.path / "ssh_config"

    @property
    def client_key(self) -> Path:
        """The private key that every node accepts."""
        return self.path / "client_key"

    @property
    def shared(self) -> Path:
        """A folder that all nodes see under one name."""
        return self.path / "shared"

    @property
    def slurm_conf(self) -> Path:
        """Beside everything else of Slurm."""
        return self.path / "slurm" / "slurm.conf"

    @property
    def switch(self) -> str:
        """The namespace with the bridges."""
        return f"{namespace_prefix(self.name)}switch"

    @property
    def head_link(self) -> str:
        """This machine's interface into the management network; at most 15 characters."""
        return f"{PREFIX}{self.name}"

    @property
    def head_address(self) -> str:
        """This machine's address in the management network."""
        return self.address(0, _HEAD_NUMBER)

    def address(self, network: int, number: int) -> str:
        """Address number `number` of a network: 0 is management, from 1 on they are rails."""
        return str(block_network(self.block).network_address + (network << 8) + number)

    def save(self) -> None:
        """Replace the description on disk."""
        replace_json(self.path / "state.json", {k: v for k, v in asdict(self).items() if k != "path"})


class Node:
    """The node `name` of a testbed, its `number`-th from 1."""

    def __init__(self, testbed: Testbed, name: str, number: int) -> None:
        self.testbed: Final = testbed
        self.name: Final = name
        self.number: Final = number
        self.path: Final = testbed.path / "nodes" / name
        self.etc: Final = self.path / "etc"  # what it has in the place of this machine's: hosts, hostname, passwd, ...
        self.ssh: Final = self.path / "ssh"  # configuration, host key, log and pid file of its sshd
        self.home: Final = self.path / "home"  # of the SSH user
        self.authorized_keys: Final = self.home / ".ssh" / "authorized_keys"
        self.docker: Final = self.path / "docker"  # everything of its Docker engine
        self.docker_socket: Final = self.docker / "docker.sock"
        self.bin: Final = self.path / "bin"  # fake tools, first in PATH
        self.run: Final = testbed.path / "run" / name  # what of it is in memory
        self.fake: Final = self.run / "root"  # fake /sys, /proc, ...: what BURST_PROBE_ROOT names
        self.namespace: Final = NAMESPACES / f"{namespace_prefix(testbed.name)}{name}"  # of its network

    @property
    def address(self) -> str:
        """Its address in the management network."""
        return self.addresses[MANAGEMENT]

    @property
    def addresses(self) -> dict[str, str]:
        """Its addresses by interface."""
        interfaces = self.testbed.spec.interfaces
        return {name: self.testbed.address(network, self.number) for network, name in enumerate(interfaces)}

    def mac(self, interface: str = MANAGEMENT) -> str:
        """The hardware address of an interface."""
        network = self.testbed.spec.interfaces.index(interface)
        return f"02:b7:00:{self.testbed.block:02x}:{network:02x}:{self.number:02x}"

    def port(self, interface: str) -> str:
        """The switch's end of a link."""
        return f"{interface}.{self.number}"

    def inside(self, *argv: str) -> Command:
        """`argv` as it runs inside the node. It fails, and touches nothing, where the namespaces are not there."""
        spaces = (f"--net={self.namespace}", f"--mount={self.run / 'mnt'}", f"--uts={self.run / 'uts'}")
        return ("nsenter", *spaces, *argv)

    @property
    def environment(self) -> dict[str, str]:
        """What every SSH session and every task of Slurm finds in its environment."""
        testbed = self.testbed
        folders = (str(self.bin), *((testbed.python_folder,) if testbed.python_folder else ()), SYSTEM_PATH)
        environment = {"PATH": ":".join(folders), MARK_VARIABLE: testbed.name}
        if testbed.spec.hardware != "none":
            environment["BURST_PROBE_ROOT"] = str(self.fake)
        if testbed.spec.slurm:
            environment["SLURM_CONF"] = str(testbed.slurm_conf)
        if testbed.spec.docker:
            environment["DOCKER_HOST"] = f"unix://{self.docker_socket}"
        return environment


def namespace_prefix(name: str) -> str:
    """What all namespaces of the testbed `name`, and of no other, begin with."""
    return f"{PREFIX}.{name}."


def block_network(block: int) -> ipaddress.IPv4Network:
    """The addresses of a block."""
    return ipaddress.IPv4Network((int(ipaddress.IPv4Address("10.100.0.0")) + (block << 12), 20))


def state_root() -> Path:
    """The folder of all testbeds of this machine; it need not exist.

    Raises ConfigError for a path that configuration files of sshd and others would read as something else.
    """
    path = os.environ.get(DIR_VARIABLE) or "/var/lib/burst-testbed"
    if re.fullmatch(r"/[A-Za-z0-9._/-]{1,60}", path) is None:
        raise ConfigError(
            f"{DIR_VARIABLE}={path!r}: expected an absolute path of letters, digits and . _ - /, at most 61 characters"
        )
    return Path(path)


def load_testbed(path: Path) -> Testbed | None:
    """The testbed in a folder; None when no description that makes sense lies there."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        record = read_json_object(path / "state.json") or {}
        faults = {node: tuple(Fault(**fault) for fault in given) for node, given in record.pop("faults").items()}
        return Testbed(path, **{**record, "spec": TestbedSpec(**record["spec"]), "faults": faults})
    return None


def is_ours(path: Path) -> bool:
    """Whether a testbed made this folder, or may make it: it has a description, or nothing but what a killed `up` or
    `down` leaves. What is not ours is never taken down: the root of all testbeds is any folder that a variable names.
    """
    if load_testbed(path) is not None or not os.path.lexists(path):
        return True
    names = {one.name for one in path.iterdir()} if path.is_dir() else {""}
    return all(name in _ENTRIES or name.startswith(".state.json-") for name in names)


def standing_folders() -> list[Path]:
    """Folders of all testbeds that stand, or of which something is left."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return [path for path in sorted(state_root().iterdir()) if path.is_dir() and is_ours(path)]
    return []


@contextlib.contextmanager
def locked(folder: Path, patience_s: float = 60.0) -> Iterator[None]:
    """Nobody else works on `folder` meanwhile; TestbedError when who does so takes longer than `patience_s`.

    A process that is killed lets go by itself.
    """
    deadline = time.monotonic() + patience_s
    while True:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _is_locked(handle, folder):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() > deadline:
            raise TestbedError(f"{folder} is in use by another `burst testbed`; wait for its end and try again")
        time.sleep(0.02)


def _is_locked(handle: int, folder: Path) -> bool:
    """Whether we hold the lock of the folder that lies there now: it may be removed, and made again, meanwhile."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), folder.stat())
    return False
