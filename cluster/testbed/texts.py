"""Texts and names that several parts of a testbed share; whole files are templates beside this file."""

from __future__ import annotations

import shlex

from cluster.testbed.folder import NodeFolder, TestbedState

SSH_USER = "root"
MARK_VARIABLE = "BURST_TESTBED"  # in the environment of every daemon: tear-down finds by it what left its namespace
CONFIG_MARK = "`burst testbed down` removes this file"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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


def slow_shell_text(shell: str, seconds: float) -> str:
    """A login shell that sleeps first."""
    return f'#!/bin/sh\nsleep {seconds:g}\nexec {shlex.quote(shell)} "$@"\n'


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


def control_group(name: str) -> str:
    """The control group of all containers of a testbed."""
    return f"burst-testbed-{name}"


def is_cluster_config(text: str) -> bool:
    """Whether `up` wrote this file of `cluster=NAME`."""
    return CONFIG_MARK in text.partition("\n")[0]
