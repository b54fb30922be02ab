"""Where a testbed keeps what it is made of, and its description: all that is needed to use it and to take it down.

/var/lib/burst-testbed/NAME/       0700; BURST_TESTBED_DIR puts it elsewhere
    state.json                     the description below
    client_key known_hosts ssh_config
    shared/                        what cluster.shared_folder names
    slurm/                         everything of Slurm, see `cluster.testbed.slurm`
    nodes/NODE/                    one folder per node, see `NodeFolder`
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError
from cluster.testbed.network import Network
from cluster.testbed.spec import TestbedSpec
from engine.config.errors import ConfigError
from engine.runs.records import read_json_object, replace_json

DEFAULT_ROOT = Path("/var/lib/burst-testbed")
_ENTRIES = frozenset(
    {"state.json", "client_key", "client_key.pub", "known_hosts", "ssh_config", "shared", "nodes", "slurm"}
)
DIR_VARIABLE = "BURST_TESTBED_DIR"
_LOCK_WAIT_S = 60.0


class TestbedError(ClusterError):
    """A testbed cannot be built, used or removed."""

    __test__ = False


@dataclass(frozen=True)
class Fault:
    """One fault in force on a node: `disk_full` with value `/data`, `link_down` with none."""

    kind: str
    value: str | None = None

    def __str__(self) -> str:
        return self.kind if self.value is None else f"{self.kind} {self.value}"


@dataclass(frozen=True)
class TestbedState:
    """What a standing testbed is.

    complete: `up` came to its end. config_file: what it wrote for `cluster=NAME`. python_folder: where the Python is
    that burst runs with; it comes before the system's in PATH of the nodes, so a launch finds there what it needs.
    """

    __test__ = False

    spec: TestbedSpec
    block: int
    complete: bool = False
    config_file: str | None = None
    python_folder: str | None = None
    faults: dict[str, tuple[Fault, ...]] = field(default_factory=dict)

    @property
    def network(self) -> Network:
        """Its network."""
        return Network(self.spec, self.block)

    def with_faults(self, node: str, faults: tuple[Fault, ...]) -> TestbedState:
        """The same with `faults` on `node`."""
        return replace(self, faults={**self.faults, node: faults})


class NodeFolder:
    """Paths of one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.etc = path / "etc"  # files that the node has in the place of this machine's: hosts, hostname, passwd, ...
        self.ssh = path / "ssh"  # configuration, host key, log and pid file of its sshd
        self.home = path / "home"  # of the SSH user
        self.authorized_keys = self.home / ".ssh" / "authorized_keys"
        self.docker = path / "docker"  # everything of its Docker engine
        self.docker_socket = self.docker / "docker.sock"
        self.bin = path / "bin"  # fake tools, first in PATH
        self.fake = path / "root"  # of the fake /sys, /proc, ...: what BURST_PROBE_ROOT names; in memory, seen inside
        self.holder_pid = path / "holder.pid"  # of the process that holds the node's namespaces
        self.holder_log = path / "holder.log"
        self.sshd_pid, self.sshd_log = self.ssh / "sshd.pid", self.ssh / "sshd.log"
        self.docker_pid, self.docker_log = self.docker / "docker.pid", self.docker / "dockerd.log"

    @property
    def testbed(self) -> TestbedFolder:
        """The folder of its testbed."""
        return TestbedFolder(self.path.parents[1])


class TestbedFolder:
    """Paths of one testbed, and its state on disk."""

    __test__ = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ssh_config = path / "ssh_config"  # of OpenSSH's client: `ssh -F FILE NODE`
        self.known_hosts = path / "known_hosts"
        self.client_key = path / "client_key"  # the private key that every node accepts
        self.shared = path / "shared"  # a folder that all nodes see under one name
        self.slurm_conf = path / "slurm" / "slurm.conf"  # beside everything else of Slurm
        self.state_file = path / "state.json"

    def node(self, name: str) -> NodeFolder:
        """Paths of a node."""
        return NodeFolder(self.path / "nodes" / name)

    def is_ours(self) -> bool:
        """Whether a testbed made this folder: it has a description, or nothing but what a killed `up` leaves.

        What is not ours is never taken down: the root of all testbeds is any folder that a variable names.
        """
        if self.load() is not None:
            return True
        try:
            names = {path.name for path in self.path.iterdir()}
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return all(name in _ENTRIES or name.startswith(".state.json-") for name in names)

    def save(self, state: TestbedState) -> None:
        """Replace the description."""
        replace_json(self.state_file, asdict(state))

    def load(self) -> TestbedState | None:
        """The description; None when there is none that makes sense."""
        try:
            record = read_json_object(self.state_file)
            return None if record is None else _state(record)
        except (OSError, ValueError, TypeError, KeyError, ConfigError):
            return None


def state_root() -> Path:
    """The folder of all testbeds of this machine; it need not exist.

    Raises ConfigError for a path that configuration files of sshd and others would read as something else.
    """
    path = os.environ.get(DIR_VARIABLE) or str(DEFAULT_ROOT)
    if re.fullmatch(r"/[A-Za-z0-9._/-]{1,60}", path) is None:
        raise ConfigError(
            f"{DIR_VARIABLE}={path!r}: expected an absolute path of letters, digits and . _ - /, at most 61 characters"
        )
    return Path(path)


def folder_of(name: str) -> TestbedFolder:
    """The folder of the testbed `name`."""
    return TestbedFolder(state_root() / name)


def standing_folders() -> tuple[TestbedFolder, ...]:
    """Folders of all testbeds that stand, or of which something is left."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        folders = (TestbedFolder(path) for path in sorted(state_root().iterdir()) if path.is_dir())
        return tuple(folder for folder in folders if folder.is_ours())
    return ()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else works on `folder` meanwhile. A process that is killed lets go by itself."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _try_lock(handle, folder):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() > deadline:
            raise TestbedError(f"{folder} is in use by another `burst testbed`; wait for its end and try again")
        time.sleep(0.02)


def _try_lock(handle: int, folder: Path) -> bool:
    """Whether we hold the lock of the folder that lies there now: it may be removed while we wait."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _state(record: dict[str, Any]) -> TestbedState:
    faults = {node: tuple(Fault(**fault) for fault in given) for node, given in record.pop("faults").items()}
    return TestbedState(**{**record, "spec": TestbedSpec(**record["spec"]), "faults": faults})
