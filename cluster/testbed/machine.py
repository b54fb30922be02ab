"""Whether this machine can carry a testbed, and the one place where its commands run."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.remote_text import one_line
from cluster.testbed.folder import TestbedError
from cluster.testbed.texts import SYSTEM_PATH

# Tool -> the Debian package that brings it. sbin is not in everybody's PATH, so it is searched anyway.
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
    "findmnt": "util-linux",
    "hostname": "hostname",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
_DOCKER_TOOLS = {"dockerd": "docker.io", "docker": "docker.io", "iptables": "iptables"}
_SLURM_TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
_COMMAND_TIMEOUT_S = 60.0
_READY_S = 60.0  # seconds even where many start at once; more only on a machine that is busy elsewhere


def missing_requirements(*, docker: bool, platform: str, root: bool, path: str, slurm: bool = False) -> list[str]:
    """What keeps this machine from carrying a testbed, one sentence each; empty when nothing does."""
    if platform != "linux":
        return [f"a testbed is made of Linux network namespaces; this is {platform}"]
    missing: dict[str, list[str]] = {}
    tools = {**_TOOLS, **(_DOCKER_TOOLS if docker else {}), **(_SLURM_TOOLS if slurm else {})}
    for tool, package in tools.items():
        if shutil.which(tool, path=path) is None:
            missing.setdefault(package, []).append(tool)
    problems = [
        f"{' and '.join(names)} not found: apt-get install {package}" for package, names in sorted(missing.items())
    ]
    if not root:
        problems.append("a testbed needs root (network namespaces, mounts, sshd): run it with sudo")
    return problems


def check_machine(*, docker: bool = False, slurm: bool = False) -> None:
    """Raise TestbedError that says exactly what is missing."""
    problems = missing_requirements(
        docker=docker, slurm=slurm, platform=sys.platform, root=os.geteuid() == 0, path=search_path()
    )
    if problems:
        raise TestbedError("this machine cannot carry a testbed:\n" + "\n".join(f"  {line}" for line in problems))


def search_path() -> str:
    """PATH with the folders of system tools at its end."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def tool_path(name: str) -> str:
    """Absolute path of a daemon: sshd insists on being started by it. Where Debian has it when it is not installed."""
    return shutil.which(name, path=search_path()) or f"/usr/sbin/{name}"


def try_command(
    argv: Sequence[str], *, environment: dict[str, str] | None = None, log: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end, whatever that is. With `log`, its output goes there: daemons keep it open."""
    base = {"PATH": search_path(), "LC_ALL": "C.UTF-8", **(environment or {})}
    try:
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("a") as output:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                errors="replace",
                env=base,
                timeout=_COMMAND_TIMEOUT_S,
            )
        return done if log is None else subprocess.CompletedProcess(argv, done.returncode, "", last_lines(log))
    except FileNotFoundError as error:
        raise TestbedError(f"{argv[0]} not found; is it installed?") from error
    except subprocess.TimeoutExpired as error:
        raise TestbedError(f"{shlex.join(argv)}: did not end within {_COMMAND_TIMEOUT_S:g} s") from error


def run_command(argv: Sequence[str], *, environment: dict[str, str] | None = None, log: Path | None = None) -> str:
    """What `argv` printed; TestbedError with its words when it fails."""
    done = try_command(argv, environment=environment, log=log)
    if done.returncode:
        said = one_line(done.stderr or done.stdout, 400) or f"exit code {done.returncode}"
        raise TestbedError(f"{shlex.join(argv)}: {said}")
    return done.stdout


def wait_until(ready: Callable[[], bool], what: str, log: Path) -> None:
    """Return as soon as `ready` says so; TestbedError with the end of `log` when it takes too long."""
    deadline = time.monotonic() + _READY_S
    while not ready():
        if time.monotonic() > deadline:
            raise TestbedError(f"{what} not there after {_READY_S:g} s; its log says: {last_lines(log)}")
        time.sleep(0.01)


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log file; empty when there is none."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
    except OSError:
        return ""
