"""What `up` does, as a value: the text of every file and the commands in order. A dry run shows what `up` runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.testbed.machine import Command, tool_path
from cluster.testbed.node import Daemon, docker, passwd_text, sshd
from cluster.testbed.slurm import slurm_commands, slurm_files, slurmd
from cluster.testbed.spec import MANAGEMENT
from cluster.testbed.templates import render
from cluster.testbed.testbed import SSH_USER, Node, Testbed

CONFIG_MARK = "`burst testbed down` removes this file"
_HOLD = Path(__file__).with_name("hold.sh")
_BURST_BYTES = 256 << 10
# No password, but not locked either: sshd lets nobody into a locked account.
_SHADOW = "".join(f"{user}:*:19000:0:99999:7:::\n" for user in (SSH_USER, "sshd"))


@dataclass(frozen=True)
class TestbedPlan:
    """What `up` does: it writes `files`, by path, and runs `commands`; known_hosts and fake hardware follow."""

    name: str
    nodes: tuple[str, ...]
    folder: str
    config_file: str
    commands: tuple[Command, ...]
    files: dict[str, str]


def plan_testbed(testbed: Testbed) -> TestbedPlan:
    """The plan of a testbed that knows its `config_file`."""
    config = str(testbed.config_file)
    files = {
        testbed.ssh_config: render("ssh_config", testbed=testbed, user=SSH_USER),
        Path(config): render("cluster.yaml", testbed=testbed, mark=CONFIG_MARK),
    }
    for node in testbed.nodes:
        files |= _node_files(node)
    if testbed.spec.slurm:
        files |= slurm_files(testbed)
    commands = tuple(_commands(testbed))
    texts = {str(path): text for path, text in files.items()}
    return TestbedPlan(testbed.name, testbed.node_names, str(testbed.path), config, commands, texts)


def node_daemons(node: Node) -> list[Daemon]:
    """All daemons of a node, in the order in which they start."""
    spec = node.testbed.spec
    return [sshd(node), *([docker(node)] if spec.docker else ()), *([slurmd(node)] if spec.slurm else ())]


def key_command(path: Path, comment: str) -> Command:
    """Make a key pair, `path` and `path`.pub; neither may be there."""
    return ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def rate_commands(node: Node, rate_bits_per_s: int | None) -> Iterator[Command]:
    """Give every link of a node this rate, both ways; None: no limit."""
    for interface in node.testbed.spec.interfaces:
        yield _rate_command(node.namespace.name, interface, rate_bits_per_s)
        yield _rate_command(node.testbed.switch, node.port(interface), rate_bits_per_s)


def link_command(node: Node, interface: str, *, up: bool) -> Command:
    """Cut or mend the switch's end of a node's link: the node keeps its carrier's address and is silent."""
    return ("ip", "-n", node.testbed.switch, "link", "set", node.port(interface), "up" if up else "down")


def control_group(name: str) -> str:
    """The control group of all containers of a testbed."""
    return f"burst-testbed-{name}"


def is_cluster_config(path: Path) -> bool:
    """Whether `up` wrote this file of `cluster=NAME`; True for none, which it may write."""
    try:
        return CONFIG_MARK in path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return True


def network_commands(testbed: Testbed) -> Iterator[Command]:
    """All commands that build the network, in order."""
    yield from (tuple(line.split()) for line in render("network", testbed=testbed, management=MANAGEMENT).splitlines())
    if (rate := testbed.spec.rate_bits_per_s) is not None:
        yield _rate_command(None, testbed.head_link, rate)
        yield _rate_command(testbed.switch, "head", rate)
        for node in testbed.nodes:
            yield from rate_commands(node, rate)


def _node_files(node: Node) -> dict[Path, str]:
    """The text of every file of the node but its keys."""
    daemon = Path(tool_path("sshd"))
    # Newer versions of sshd punish a client for what faults do; older ones do not know the option that forbids it.
    punishes = daemon.exists() and b"persourcepenalties" in daemon.read_bytes().lower()
    files = {
        node.etc / "hosts": render("hosts", testbed=node.testbed),
        node.etc / "hostname": f"{node.name}\n",
        node.etc / "resolv.conf": "nameserver 127.0.0.1\n",
        node.etc / "passwd": passwd_text(Path("/etc/passwd").read_text(encoding="utf-8"), str(node.home)),
        node.etc / "shadow": _SHADOW,
        node.ssh / "sshd_config": render("sshd_config", node=node, user=SSH_USER, punishes=punishes),
    }
    if node.testbed.spec.docker:
        group = control_group(node.testbed.name)
        files[node.docker / "daemon.json"] = render("daemon.json", node=node, group=group)
    return files


def _commands(testbed: Testbed) -> Iterator[Command]:
    key, run, nodes = testbed.client_key, str(testbed.path / "run"), testbed.nodes
    yield ("mkdir", "-p", "/run/sshd", run, str(testbed.shared))
    yield key_command(key, f"burst testbed {testbed.name}")
    for node in nodes:
        yield key_command(node.ssh / "host_key", node.name)
        yield ("install", "-D", "-m", "600", f"{key}.pub", str(node.authorized_keys))
    yield from network_commands(testbed)
    # In memory: a disk would take seconds for hundreds of small files of fake hardware. Private: only there can a file
    # hold a mount namespace.
    yield ("mount", "-t", "tmpfs", "-o", "mode=0755", "--make-private", "tmpfs", run)
    for node in nodes:
        yield ("install", "-D", "/dev/null", str(node.run / "mnt"))
        yield ("install", "/dev/null", str(node.run / "uts"))
        spaces = (f"--mount={node.run / 'mnt'}", f"--uts={node.run / 'uts'}")
        disk = str(node.docker / "data") if testbed.spec.docker_in_memory else ""
        hold = ("sh", str(_HOLD), node.name, str(node.path), disk)
        yield ("nsenter", f"--net={node.namespace}", "unshare", *spaces, *hold)
    if testbed.spec.slurm:
        yield from slurm_commands(testbed)
    for started in zip(*map(node_daemons, nodes), strict=True):
        yield from (daemon.node.inside(*daemon.command) for daemon in started)


def _rate_command(namespace: str | None, link: str, rate_bits_per_s: int | None) -> Command:
    """Limit what leaves through `link` to this rate; None: no limit. `namespace` None: this machine's own."""
    where = ("tc",) if namespace is None else ("tc", "-n", namespace)
    if rate_bits_per_s is None:
        return (*where, "qdisc", "replace", "dev", link, "root", "noqueue")
    # The bucket must hold what the rate brings between two ticks of the kernel's timer.
    burst = max(_BURST_BYTES, rate_bits_per_s // 8 // 100)
    bucket = ("tbf", "rate", f"{rate_bits_per_s}bit", "burst", f"{burst}b", "latency", "50ms")
    return (*where, "qdisc", "replace", "dev", link, "root", *bucket)
