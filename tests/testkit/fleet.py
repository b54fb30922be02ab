"""A fleet of SSH servers in one process on 127.0.0.0/8, healthy and faulty ones, to try clients at scale.

`with start_fleet(folder, {"n1": "ok", "n2": "silent"}) as fleet:` starts it as a process of its own and writes
an OpenSSH configuration and known_hosts for it. Commands are answered by `answer_command`, never run.

    python -m testkit.fleet FOLDER      serves what FOLDER/fleet.json says until its stdin ends
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import asyncssh
from asyncssh.constants import MSG_GLOBAL_REQUEST, MSG_USERAUTH_FAILURE
from asyncssh.packet import String

from testkit.waiting import wait_for

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
    folder.mkdir(parents=True, exist_ok=True)
    user_key = asyncssh.generate_private_key("ssh-ed25519")
    user_key.write_private_key(folder / "id_ed25519")
    (folder / "id_ed25519").chmod(0o600)  # or ssh does not use it
    user_key.write_public_key(folder / "id_ed25519.pub")
    (folder / "fleet.json").write_text(json.dumps({"modes": dict(modes)}))
    if record is not None:
        (folder / "record").write_bytes(record)
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "testkit.fleet", str(folder.resolve())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=Path(__file__).resolve().parent.parent
        )
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, (folder / "log").read_text)
        assert ready.exists(), (folder / "log").read_text()
        yield _describe(folder, json.loads(ready.read_text()), jumps or {}, process.pid)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.kill()
        process.wait(200)


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
    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    async def begin_auth(self, username: str) -> bool:
        if self._mode == "malformed":
            self._connection.send_packet(MSG_USERAUTH_FAILURE, String(b"no text: \xff"))
            await asyncio.Event().wait()
        if self._mode == "mute_login":
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


class Servers:
    """All servers of a fleet; `nodes` says where they listen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modes: dict[str, Mode] = json.loads((folder / "fleet.json").read_text())["modes"]
        record = folder / "record"
        self._record = record.read_bytes() if record.exists() else None
        self._user_keys = str(folder / "id_ed25519.pub")
        self.nodes: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """Listen everywhere, then say so in ready.json."""
        for number, (name, mode) in enumerate(self._modes.items()):
            self.nodes[name] = await self._start(f"127.77.{number // 250}.{1 + number % 250}", mode)
        partial = self._folder / "ready.part"
        partial.write_text(json.dumps(self.nodes))
        partial.rename(self._folder / "ready.json")

    async def _start(self, address: str, mode: Mode) -> dict[str, Any]:
        key = asyncssh.generate_private_key("ssh-ed25519")
        known = key if mode != "wrong_key" else asyncssh.generate_private_key("ssh-ed25519")
        line = " ".join(known.export_public_key().decode().split()[:2]) if mode != "unknown_key" else ""
        plain = {
            "refuse": _close_at_once,
            "silent": _say_nothing,
            "stall": _stall,
            "endless_banner": _speak_for_ever,
            "not_ssh": _speak_http,
            "hang_up": _close_at_once,
        }
        if mode in plain:
            server: Any = await asyncio.start_server(plain[mode], address, 0)
        elif mode == "busy_door":
            server = await self._busy_door(address, key)
        else:
            server = await self._ssh(address, 0, mode, key)
        port = server.sockets[0].getsockname()[1]
        if mode == "refuse":
            server.close()
        return {"address": address, "port": port, "known_key": line}

    async def _ssh(self, address: str, port: int, mode: Mode, key: asyncssh.SSHKey) -> Any:
        return await asyncssh.create_server(
            lambda: _Server(mode),
            address,
            port,
            server_host_keys=[key],
            process_factory=(lambda process: self._serve(process, mode)) if not mode.endswith("_exec") else None,
            **_SETTINGS,
        )

    async def _busy_door(self, address: str, key: asyncssh.SSHKey) -> Any:
        """A door in front of a healthy server that turns the first two guests away."""
        behind = await self._ssh(address, 0, "ok", key)
        port = behind.sockets[0].getsockname()[1]
        turned_away = 0

        async def open_door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal turned_away
            if turned_away < 2:
                turned_away += 1
                writer.close()
                return
            inner_reader, inner_writer = await asyncio.open_connection(address, port)
            await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))

        return await asyncio.start_server(open_door, address, 0)

    async def _serve(self, process: asyncssh.SSHServerProcess[bytes], mode: Mode) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            await self._answer(process, mode)

    async def _answer(self, process: asyncssh.SSHServerProcess[bytes], mode: Mode) -> None:
        if mode == "deaf":
            process.channel.pause_reading()
            await asyncio.Event().wait()
        command = process.command or ""
        stdin = await process.stdin.read()
        if mode == "slow":
            await asyncio.sleep(SLOW_S)
        if mode == "greedy":
            process.channel._send_window = 2 * FLOOD_BYTES  # a server of ours that keeps no promise
            process.channel.set_write_buffer_limits(2 * FLOOD_BYTES)
        if mode in ("flood", "greedy"):
            await _flood(process)
            return
        output, code = answer_command(command, stdin, self._record)
        if mode == "garbage":
            output = GARBAGE
        if mode == "die":
            process.stdout.write(output[: len(output) // 2])
            await process.stdout.drain()
            process.channel.get_connection().abort()
            return
        process.stdout.write(output)
        process.exit(code)


async def _flood(process: asyncssh.SSHServerProcess[bytes]) -> None:
    block = b"x" * 65535 + b"\n"
    for _ in range(FLOOD_BYTES // len(block)):
        process.stdout.write(block)
        await process.stdout.drain()
    process.exit(0)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1 << 20)
    await asyncio.Event().wait()


async def _stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-stall\r\n")
    await asyncio.Event().wait()


async def _speak_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()


async def _speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad \x1b[31mRequest\r\n\r\n" * 200)
    await reader.read(1 << 16)
    writer.close()


async def _main(folder: Path) -> None:
    servers = Servers(folder)
    await servers.start()
    # The parent holds the other end: its death, too, ends the fleet.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
