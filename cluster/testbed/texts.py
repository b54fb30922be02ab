"""Every file that a testbed is made of, as text: pure functions of the plan. Most are templates beside this file."""

from __future__ import annotations

import shlex

from cluster.testbed.folder import NodeFolder, TestbedFolder, TestbedState
from cluster.testbed.templates import render

SSH_USER = "root"
MARK_VARIABLE = "BURST_TESTBED"  # in the environment of every daemon: tear-down finds by it what left its namespace
CONFIG_MARK = "`burst testbed down` removes this file"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def hosts_text(state: TestbedState) -> str:
    """The /etc/hosts of a node: all nodes by name, their rails as NODE-rail0, and this machine as `head`."""
    return render("hosts", spec=state.spec, network=state.network)


def passwd_text(passwd: str, home: str, shell: str | None = None) -> str:
    """`passwd` with another home for the SSH user, so that keys and caches of a node are its own; and another shell."""
    lines = []
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[0] == SSH_USER:
            fields[5] = home
            fields[6] = shell or login_shell(fields[6])
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def login_shell(path: str) -> str:
    """The shell of an entry of passwd, or /bin/sh where that lets nobody in."""
    return "/bin/sh" if not path or path.endswith(("nologin", "false")) else path


def shadow_text() -> str:
    """A /etc/shadow in which the SSH user has no password but is not locked: sshd lets nobody into a locked account."""
    return f"{SSH_USER}:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n"


def slow_shell_text(shell: str, seconds: float) -> str:
    """A login shell that sleeps first."""
    return f'#!/bin/sh\nsleep {seconds:g}\nexec {shlex.quote(shell)} "$@"\n'


def sshd_config_text(state: TestbedState, node: str, folder: NodeFolder, extra: tuple[str, ...] = ()) -> str:
    """The configuration of a node's sshd: keys only."""
    environment = session_environment(state, node, folder)
    return render("sshd_config", folder=folder, user=SSH_USER, extra=extra, environment=environment)


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
    return render("ssh_config", spec=state.spec, network=state.network, folder=folder, user=SSH_USER)


def daemon_json_text(state: TestbedState, folder: NodeFolder) -> str:
    """The configuration of a node's Docker engine."""
    return render("daemon.json", spec=state.spec, folder=folder, group=control_group(state.spec.name))


def control_group(name: str) -> str:
    """The control group of all containers of a testbed."""
    return f"burst-testbed-{name}"


def cluster_config_text(state: TestbedState, folder: TestbedFolder) -> str:
    """The file that makes `cluster=NAME` mean this testbed."""
    return render("cluster.yaml", spec=state.spec, folder=folder, mark=CONFIG_MARK)


def is_cluster_config(text: str) -> bool:
    """Whether `cluster_config_text` wrote this."""
    return CONFIG_MARK in text.partition("\n")[0]
