"""Whether this machine can carry a testbed, and the one place where its commands run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.errors import ClusterError
from cluster.remote_text import one_line

Command = tuple[str, ...]

MARK_VARIABLE = "BURST_TESTBED"  # in the environment of every daemon: tear-down finds by it what left its namespace
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Debian package -> the tools that it brings. sbin is not in everybody's PATH, so it is searched anyway.
_PACKAGES = {
    "iproute2": ["ip", "tc"],
    "util-linux": ["nsenter", "unshare", "setsid", "findmnt"],
    "mount": ["mount"],
    "hostname": ["hostname"],
    "openssh-client": ["ssh-keygen"],
    "openssh-server": ["sshd"],
}
_DOCKER_PACKAGES = {"docker.io": ["dockerd", "docker"], "iptables": ["iptables"]}
_SLURM_PACKAGES = {
    "slurmctld": ["slurmctld"],
    "slurmd": ["slurmd"],
    "slurm-client": ["sbatch"],
    "munge": ["munged"],
}
_COMMAND_TIMEOUT_S = 60.0
_READY_S = 60.0  # seconds even where many start at once; more only on a machine that is busy elsewhere


class TestbedError(ClusterError):
    """A testbed cannot be built, used or removed."""

    __test__ = False


def required_tools(*, docker: bool, slurm: bool) -> dict[str, list[str]]:
    """Debian package -> the commands of it that a testbed runs."""
    return {**_PACKAGES, **(_DOCKER_PACKAGES if docker else {}), **(_SLURM_PACKAGES if slurm else {})}


def missing_requirements(*, docker: bool, platform: str, root: bool, path: str, slurm: bool = False) -> list[str]:
    """What keeps this machine from carrying a testbed, one sentence each; empty when nothing does."""
    if platform != "linux":
        return [f"a testbed is made of Linux network namespaces; this is {platform}"]
    problems = []
    for package, tools in sorted(required_tools(docker=docker, slurm=slurm).items()):
        if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
            problems.append(f"{' and '.join(missing)} not found: apt-get install {package}")
    if not root:
        problems.append("a testbed needs root (network namespaces, mounts, sshd): run it with sudo")
    return problems


def check_machine(*, docker: bool = False, slurm: bool = False) -> None:
    """Raise TestbedError that says exactly what is missing."""
    problems = missing_requirements(
        docker=docker, slurm=slurm, platform=sys.platform, root=os.geteuid() == 0, path=_search_path()
    )
    if problems:
        raise TestbedError("this machine cannot carry a testbed:\n" + "\n".join(f"  {line}" for line in problems))


def _search_path() -> str:
    """PATH with the folders of system tools at its end."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def tool_path(name: str) -> str:
    """Absolute path of a daemon: sshd insists on being started by it. Where Debian has it when it is not installed."""
    return shutil.which(name, path=_search_path()) or f"/usr/sbin/{name}"


def try_command(argv: Command, mark: str = "") -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end, whatever that is. mark: of what testbed a process is that it leaves behind."""
    environment = {"PATH": _search_path(), "LC_ALL": "C.UTF-8", **({MARK_VARIABLE: mark} if mark else {})}
    # No pipe, which daemons keep open; no file on a disk, which may be full when a testbed is to go.
    with os.fdopen(os.memfd_create("output"), "w+", errors="replace") as output:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                timeout=_COMMAND_TIMEOUT_S,
            )
        except FileNotFoundError as error:
            raise TestbedError(f"{argv[0]} not found; is it installed?") from error
        except subprocess.TimeoutExpired as error:
            raise TestbedError(f"{shlex.join(argv)}: did not end within {_COMMAND_TIMEOUT_S:g} s") from error
        output.seek(0)
        return subprocess.CompletedProcess(argv, done.returncode, output.read())


def run_command(argv: Command, mark: str = "") -> str:
    """What `argv` printed; TestbedError with its words when it fails."""
    done = try_command(argv, mark)
    if done.returncode:
        said = one_line(done.stdout, 400) or f"exit code {done.returncode}"
        raise TestbedError(f"{shlex.join(argv)}: {said}")
    return done.stdout


def wait_until(ready: Callable[[], bool], what: str, log: Path) -> None:
    """Return as soon as `ready` says so; TestbedError with the end of `log` when it takes too long."""
    deadline = time.monotonic() + _READY_S
    while not ready():
        if time.monotonic() > deadline:
            said = log.read_text(encoding="utf-8", errors="replace")[-1000:] if log.exists() else ""
            raise TestbedError(f"{what} not there after {_READY_S:g} s; its log says: {said}")
        time.sleep(0.01)
