"""A fleet of SSH servers in one process on 127.0.0.0/8, healthy and faulty ones, to try clients at scale.

`with start_fleet(folder, {"n1": "ok", "n2": "silent"}) as fleet:` starts it as a process of its own and writes
an OpenSSH configuration and known_hosts for it. Commands are answered by `answer_command`, never run.

    python -m testkit.fleet FOLDER MODES     serves until its stdin ends; stdout: a line that says where
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import asyncssh
from asyncssh.constants import MSG_GLOBAL_REQUEST, MSG_USERAUTH_FAILURE
from asyncssh.packet import String

from testkit import ROOT
from testkit.needs import require

Mode = Literal[
    "ok",
    "refuse",  # nobody listens
    "silent",  # accepts, never speaks
    "stall",  # speaks its first line, then never again
    "endless_banner",  # a first line that never ends
    "not_ssh",  # another protocol
    "hang_up",  # accepts and closes, always
    "busy_door",  # closes the first two connections, as MaxStartups does
    "slow",  # answers after SLOW_S
    "wrong_key",  # another host key than known_hosts says
    "unknown_key",  # known_hosts has none
    "deny",  # no key is accepted
    "malformed",  # a message that makes no sense, once keys are exchanged
    "mute_login",  # never answers the log-in
    "mute_exec",  # opens a session, never answers the command, nor a wish for a port
    "malformed_exec",  # such a message in place of a session
    "die",  # breaks off after half of its answer
    "flood",  # FLOOD_BYTES of output
    "greedy",  # FLOOD_BYTES of output, whatever the client's window
    "garbage",  # no UTF-8, escape sequences
    "deaf",  # never reads stdin, never ends
]
SLOW_S = 1.0
FLOOD_BYTES = 100 << 20
GARBAGE = b"\xff\xfe\x1b]0;owned\x07\x1b[2J\x1b[31mred\x00\r\n\xe2\x80\xae[bold]x[/bold]\n"
FENCE = b"@@FENCE"
# What those say that are no SSH servers; and then they wait for the end, but for who hangs up.
_GREETINGS: Mapping[str, Iterable[bytes]] = {
    "refuse": (),
    "silent": (),
    "stall": (b"SSH-2.0-stall\r\n",),
    "endless_banner": itertools.repeat(b"x" * 65536),
    "not_ssh": (b"HTTP/1.1 400 Bad \x1b[31mRequest\r\n\r\n" * 200,),
    "hang_up": (),
}
_SCRIPT = re.compile(r"printf '%s\\\\n' (\S+); printf .* >&2; (.*); code=\$\?; .* exit \$code\n", re.DOTALL)
_SETTINGS: dict[str, Any] = {
    "encoding": None,
    "line_editor": False,
    "kex_algs": ["curve25519-sha256", "curve25519-sha256@libssh.org"],
    "encryption_algs": ["aes128-gcm@openssh.com", "aes128-ctr"],
    "keepalive_interval": 0,
    "login_timeout": 0,
}


@dataclass(frozen=True)
class Fleet:
    """A running fleet. ports: by node; pid: of its process."""

    names: tuple[str, ...]
    config_file: Path
    known_hosts: Path
    ports: Mapping[str, int]
    pid: int


@contextlib.contextmanager
def start_fleet(
    folder: Path, modes: Mapping[str, str], *, record: bytes | None = None, jumps: Mapping[str, str] | None = None
) -> Iterator[Fleet]:
    """A fleet with these nodes, name -> Mode, until the block ends.

    record: the answer to a script on stdin, with FENCE where the script's own fence belongs. jumps: node -> the node to
    go through.
    """
    require("ssh")  # which says how a node is reached
    folder.mkdir(parents=True, exist_ok=True)
    user_key = asyncssh.generate_private_key("ssh-ed25519")
    user_key.write_private_key(folder / "id_ed25519")
    (folder / "id_ed25519").chmod(0o600)  # or ssh does not use it
    user_key.write_public_key(folder / "id_ed25519.pub")
    if record is not None:
        (folder / "record").write_bytes(record)
    command = [sys.executable, "-m", "testkit.fleet", str(folder.resolve()), json.dumps(dict(modes))]
    pipe = subprocess.PIPE
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, cwd=ROOT / "tests")
    with process:
        try:
            assert process.stdout is not None
            nodes = process.stdout.readline()
            assert nodes, (folder / "log").read_text()
            yield _describe(folder, json.loads(nodes), jumps or {}, process.pid)
        finally:
            process.kill()


def _describe(folder: Path, nodes: dict[str, Any], jumps: Mapping[str, str], pid: int) -> Fleet:
    """Write the client's configuration for a fleet that listens."""
    config = [
        "Host *",
        "  User tester",
        f"  IdentityFile {folder / 'id_ed25519'}",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {folder / 'known_hosts'}",
        "  GlobalKnownHostsFile none",
        "  StrictHostKeyChecking yes",
        "  BatchMode yes",
        "  LogLevel ERROR",
    ]
    for name, node in nodes.items():
        config += [f"Host {name}", f"  HostName {node['address']}", f"  Port {node['port']}"]
        config += [f"  ProxyJump {jumps[name]}"] if name in jumps else []
    (folder / "config").write_text("\n".join(config) + "\n")
    known = [f"[{node['address']}]:{node['port']} {node['known_key']}" for node in nodes.values() if node["known_key"]]
    (folder / "known_hosts").write_text("".join(f"{line}\n" for line in known))
    ports = {name: node["port"] for name, node in nodes.items()}
    return Fleet(tuple(nodes), folder / "config", folder / "known_hosts", ports, pid)


def answer_command(command: str, stdin: bytes, record: bytes | None) -> tuple[bytes, int]:
    """(output, exit code) of a command: a script on stdin gets the recorded answer, `cat` its input, others an echo."""
    if command == "sh -s" and record is not None:
        found = re.search(rb"fence='(@@[0-9a-f]+)'", stdin)
        return record.replace(FENCE, found[1] if found else b"?"), 0
    if command == "cat":
        return stdin, 0
    if command == "date +%s.%N":
        return f"{time.time():.9f}\n".encode(), 0
    return command.encode() + b"\n" + stdin, 0


class _Server(asyncssh.SSHServer):
    def __init__(self, mode: Mode, number: int) -> None:
        self._mode, self._number = mode, number

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        if self._mode == "busy_door" and self._number < 2:
            conn.abort()

    async def begin_auth(self, username: str) -> bool:
        if self._mode == "malformed":
            self._connection.send_packet(MSG_USERAUTH_FAILURE, String(b"no text: \xff"))
        if self._mode in ("malformed", "mute_login"):
            await asyncio.Event().wait()
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return self._mode != "deny"

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True

    async def server_requested(self, listen_host: str, listen_port: int) -> bool:
        if self._mode == "mute_exec":
            await asyncio.Event().wait()
        return False

    def session_requested(self) -> Any:
        if self._mode == "malformed_exec":
            self._connection.send_packet(MSG_GLOBAL_REQUEST, String(b"no text: \xff"))
        return _NeverStarts()


class _NeverStarts(asyncssh.SSHServerSession[bytes]):
    """A session whose command is neither confirmed nor refused: None stands for an answer that is to come."""

    def exec_requested(self, command: str) -> bool:
        return None  # type: ignore[return-value]


async def _listen(address: str, mode: Mode, record: bytes | None) -> dict[str, Any]:
    """Where a server listens, and what known_hosts is to have of its key."""
    key, guests = asyncssh.generate_private_key("ssh-ed25519"), itertools.count()
    known = key if mode != "wrong_key" else asyncssh.generate_private_key("ssh-ed25519")
    if mode in _GREETINGS:
        server: Any = await asyncio.start_server(lambda reader, writer: _greet(mode, reader, writer), address, 0)
    else:
        server = await asyncssh.create_server(
            lambda: _Server(mode, next(guests)),
            address,
            0,
            server_host_keys=[key],
            process_factory=(lambda process: _serve(process, mode, record)) if not mode.endswith("_exec") else None,
            **_SETTINGS,
        )
    port = server.sockets[0].getsockname()[1]
    if mode == "refuse":
        server.close()
    line = " ".join(known.export_public_key().decode().split()[:2]) if mode != "unknown_key" else ""
    return {"address": address, "port": port, "known_key": line}


async def _greet(mode: Mode, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        for piece in _GREETINGS[mode]:
            writer.write(piece)
            await writer.drain()
        if mode != "hang_up":
            await reader.read()
    writer.close()


async def _serve(process: asyncssh.SSHServerProcess[bytes], mode: Mode, record: bytes | None) -> None:
    if mode == "deaf":
        process.channel.pause_reading()
        await asyncio.Event().wait()
    with contextlib.suppress(OSError, asyncssh.Error):
        # As a node's shell: the words of the command are the first line of stdin, its output is between marks.
        script = (await process.stdin.readline()).decode()
        found = _SCRIPT.fullmatch(script)
        assert found is not None, script
        mark, words = found.groups()
        output, code = answer_command(words, await process.stdin.read(), record)
        if mode == "slow":
            await asyncio.sleep(SLOW_S)
        if mode == "garbage":
            output = GARBAGE
        if mode == "greedy":
            process.channel._send_window = 2 * FLOOD_BYTES  # a server of ours that keeps no promise
            process.channel.set_write_buffer_limits(2 * FLOOD_BYTES)
        process.stderr.write(f"{mark}\n".encode())
        process.stdout.write(f"{mark}\n".encode())
        is_flood = mode in ("flood", "greedy")
        for piece in itertools.repeat(b"x" * 65535 + b"\n", FLOOD_BYTES >> 16) if is_flood else [output]:
            process.stdout.write(piece if mode != "die" else piece[: len(piece) // 2])
            await process.stdout.drain()
        if mode == "die":
            process.channel.get_connection().abort()
        else:
            for stream in (process.stdout, process.stderr):
                stream.write(f"{mark} {code}\n".encode())
            process.exit(code)


async def _main(folder: Path, modes: Mapping[str, Mode]) -> None:
    record = (folder / "record").read_bytes() if (folder / "record").exists() else None
    nodes = {
        name: await _listen(f"127.77.{number // 250}.{1 + number % 250}", mode, record)
        for number, (name, mode) in enumerate(modes.items())
    }
    print(json.dumps(nodes), flush=True)
    # The parent holds the other end: its death, too, ends the fleet.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), json.loads(sys.argv[2])))
