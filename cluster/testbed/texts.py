"""Every file that a testbed is made of, as text: pure functions of the plan."""

from __future__ import annotations

import json
import shlex

from cluster.testbed.folder import NodeFolder, TestbedFolder, TestbedState

SSH_USER = "root"
MARK_VARIABLE = "BURST_TESTBED"  # in the environment of every daemon: tear-down finds by it what left its namespace
CONFIG_MARK = "`burst testbed down` removes this file"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def hosts_text(state: TestbedState) -> str:
    """The /etc/hosts of a node: all nodes by name, their rails as NODE-rail0, and this machine as `head`."""
    network = state.network
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{network.head_address} head"]
    for name in state.spec.node_names:
        for interface in state.spec.interfaces:
            alias = name if interface == state.spec.interfaces[0] else f"{name}-{interface}"
            lines.append(f"{network.address(name, interface)} {alias}")
    return "\n".join(lines) + "\n"


def passwd_text(passwd: str, home: str, shell: str | None = None) -> str:
    """`passwd` with another home for the SSH user, so that keys and caches of a node are its own; and another shell."""
    lines = []
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[0] == SSH_USER:
            fields[5] = home
            fields[6] = shell or (fields[6] if _is_shell(fields[6]) else "/bin/sh")
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def shadow_text() -> str:
    """A /etc/shadow in which the SSH user has no password but is not locked: sshd lets nobody into a locked account."""
    return f"{SSH_USER}:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n"


def slow_shell_text(shell: str, seconds: float) -> str:
    """A login shell that sleeps first."""
    return f'#!/bin/sh\nsleep {seconds:g}\nexec {shlex.quote(shell)} "$@"\n'


def sshd_config_text(state: TestbedState, node: str, folder: NodeFolder, extra: tuple[str, ...] = ()) -> str:
    """The configuration of a node's sshd: keys only, and one SetEnv line, for sshd heeds only the first."""
    ssh = folder.ssh
    lines = [
        "Port 22",
        "AddressFamily inet",
        "ListenAddress 0.0.0.0",
        f"HostKey {ssh / 'host_key'}",
        f"PidFile {folder.sshd_pid}",
        "AuthorizedKeysFile .ssh/authorized_keys",
        f"AllowUsers {SSH_USER}",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PubkeyAuthentication yes",
        "StrictModes no",
        "UsePAM no",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "MaxStartups 200:30:300",
        "MaxSessions 100",
        "Subsystem sftp internal-sftp",
        *extra,
        "SetEnv " + " ".join(f'{name}="{value}"' for name, value in session_environment(state, node, folder).items()),
    ]
    return "\n".join(lines) + "\n"


def session_environment(state: TestbedState, node: str, folder: NodeFolder) -> dict[str, str]:
    """What every SSH session of a node finds in its environment."""
    folders = (str(folder.bin), *((state.python_folder,) if state.python_folder else ()), SYSTEM_PATH)
    environment = {"PATH": ":".join(folders), MARK_VARIABLE: state.spec.name}
    if state.spec.hardware != "none":
        environment["BURST_PROBE_ROOT"] = str(folder.fake)
    if state.spec.slurm:
        environment["SLURM_CONF"] = str(folder.testbed.slurm_conf)
    if state.spec.docker:
        environment["DOCKER_HOST"] = f"unix://{folder.docker_socket}"
    return environment


def ssh_config_text(state: TestbedState, folder: TestbedFolder) -> str:
    """OpenSSH client configuration for all nodes."""
    blocks = []
    for node in state.spec.node_names:
        blocks += [
            f"Host {node}",
            f"    HostName {state.network.address(node)}",
            f"    HostKeyAlias {node}",
            "",
        ]
    return "\n".join(
        [
            *blocks,
            f"Host {' '.join(state.spec.node_names)}",
            "    Port 22",
            f"    User {SSH_USER}",
            f"    IdentityFile {folder.client_key}",
            "    IdentitiesOnly yes",
            f"    UserKnownHostsFile {folder.known_hosts}",
            "    GlobalKnownHostsFile none",
            "    StrictHostKeyChecking yes",
            "    BatchMode yes",
            "    ForwardAgent no",
            "",
        ]
    )


def daemon_json_text(state: TestbedState, folder: NodeFolder) -> str:
    """The configuration of a node's Docker engine: nothing shared with other engines, no network of its own."""
    docker = folder.docker
    settings = {
        "hosts": [f"unix://{folder.docker_socket}"],
        "data-root": str(docker / "data"),
        "exec-root": str(docker / "exec"),
        "pidfile": str(folder.docker_pid),
        "deprecated-key-path": str(docker / "key.json"),  # else all engines of this machine have one ID
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
        "ip-forward": False,
        "userland-proxy": False,
        "cgroup-parent": f"/{control_group(state.spec.name)}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "shutdown-timeout": 5,
        "labels": [f"burst.testbed={state.spec.name}"],
    }
    return json.dumps(settings, indent=2) + "\n"


def control_group(name: str) -> str:
    """The control group of all containers of a testbed."""
    return f"burst-testbed-{name}"


def cluster_config_text(state: TestbedState, folder: TestbedFolder) -> str:
    """The file that makes `cluster=NAME` mean this testbed."""
    spec = state.spec
    return "\n".join(
        [
            f"# {spec.nodes} virtual nodes on this machine, of `burst testbed up`; {CONFIG_MARK}.",
            f"name: {spec.name}",
            f'nodes: "{spec.node_set}"',
            f"interface: {spec.interfaces[1] if spec.rails else spec.interfaces[0]}",
            f"shared_folder: {json.dumps(str(folder.shared))}",
            "# All nodes share this machine's cores.",
            "ranks_per_node: 1",
            "threads_per_rank: 1",
            "ssh:",
            f"  config_file: {json.dumps(str(folder.ssh_config))}",
            f"  known_hosts: {json.dumps(str(folder.known_hosts))}",
            "container:",
            "  runtime: bare",
            "  # Such machines may lack the right to raise limits, and have no devices to hand on.",
            "  run_options: [--ipc=host]",
            "",
        ]
    )


def is_cluster_config(text: str) -> bool:
    """Whether `cluster_config_text` wrote this."""
    return CONFIG_MARK in text.partition("\n")[0]


def _is_shell(path: str) -> bool:
    return bool(path) and not path.endswith(("nologin", "false"))
