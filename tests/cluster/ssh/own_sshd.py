"""A real OpenSSH server of this user's own, and a real ssh-agent."""

from __future__ import annotations

import base64
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from testkit.needs import require
from testkit.waiting import wait_for

from cluster.ssh.hosts import Host
from cluster.ssh.transport import PublicKey


@dataclass(frozen=True)
class Server:
    """A running sshd. log: what it said; host: how to reach it."""

    host: Host
    log: Path


@contextlib.contextmanager
def start_sshd(folder: Path, *options: str) -> Iterator[Server]:
    """An sshd of this user's own on a free port of 127.0.0.1, with an ed25519 and an RSA host key."""
    require("sshd", "ssh")
    sshd = str(shutil.which("sshd"))  # which insists on being started by its whole path
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    write_keys(folder)
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    with socket.socket() as reserved:
        # Nobody else is given a port that is bound; sshd may share it with one who does not listen.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port, log, known = reserved.getsockname()[1], folder / "log", folder / "known_hosts"
        lines = [
            *[f"ListenAddress 127.0.0.1:{port}", f"HostKey {folder}/host_ed25519", f"HostKey {folder}/host_rsa"],
            *[f"AuthorizedKeysFile {folder}/authorized_keys", f"PidFile {folder}/pid", "StrictModes no", "UsePAM no"],
            *["PermitRootLogin yes", "MaxSessions 100", *options],
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        known.write_text(f"[127.0.0.1]:{port} {public_key(folder / 'host_ed25519.pub').text}\n")
        user, files = pwd.getpwuid(os.geteuid()).pw_name, ((str(folder / "id"),), (), (str(known),))
        process = subprocess.Popen([sshd, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)])
        try:
            wait_for(lambda: _answers(socket.AF_INET, ("127.0.0.1", port)), "sshd")
            yield Server(Host("node1", "127.0.0.1", port, user, f"[127.0.0.1]:{port}", *files), log)
        finally:
            process.terminate()
            process.wait(200)


def write_keys(folder: Path) -> None:
    """Host keys (host_ed25519, host_rsa) and a client's (id) in `folder`, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (("host_ed25519", "ed25519"), ("host_rsa", "rsa"), ("id", "ed25519")):
        if not (folder / name).exists():
            make_key(folder / name, kind)


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new key, its public half beside it."""
    require("ssh-keygen")
    size = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-N", passphrase, "-t", kind, *size, "-f", str(path)], check=True)
    return path


def certify(authority: Path, key: Path, *options: str) -> Path:
    """The certificate of `key`, beside it, made anew; options: of ssh-keygen."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "test", *options, f"{key}.pub"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return key.with_name(f"{key.name}-cert.pub")


def public_key(path: Path | str) -> PublicKey:
    """What a file with a public key or a certificate holds."""
    return PublicKey(base64.b64decode(Path(path).read_text().split()[1]))


class Agent(str):
    """The socket of a running agent."""

    __slots__ = ()

    def add(self, key: Path, *options: str) -> None:
        """Hand it a key, with the certificate that lies beside; options: of ssh-add."""
        command = ["ssh-add", "-q", *options, str(key)]
        subprocess.run(command, env=os.environ | {"SSH_AUTH_SOCK": self}, check=True)


@contextlib.contextmanager
def agent_with(*keys: Path) -> Iterator[Agent]:
    """An agent of this test's own that holds `keys`."""
    with TemporaryDirectory(dir="/tmp") as folder:  # a socket's path has 107 letters at most, and TMPDIR may be long
        agent = Agent(f"{folder}/agent")
        process = subprocess.Popen(["ssh-agent", "-D", "-a", agent], stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: _answers(socket.AF_UNIX, agent), "ssh-agent")
            for key in keys:
                agent.add(key)
            yield agent
        finally:
            process.terminate()
            process.wait(200)


def _answers(family: int, address: object) -> bool:
    """Whether somebody does there; the name of a socket is there before anybody listens."""
    with contextlib.suppress(OSError), socket.socket(family) as guest:
        guest.connect(address)  # type: ignore[arg-type]
        return True
    return False
