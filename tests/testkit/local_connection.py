"""A `Connection` whose node is this machine: commands run as they are, over pipes. For tests of what runs on nodes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import CommandResult, Connection, RemoteProcess
from cluster.ssh.hosts import Host

# Of this very Python: one behind a version manager takes ten times as long to start.
AT_HAND = Path(sys.executable).parent


class LocalConnection(Connection):
    """Runs commands with `environment` on top of this one's; `processes` are all it started.

    given: what a command reads instead of what it was given, or an error.
    """

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        given: Callable[[bytes], bytes] = lambda stdin: stdin,
    ) -> None:
        self.host, self._given = Host(name, "127.0.0.1"), given
        self._environment = {**os.environ, "PATH": f"{AT_HAND}:{os.environ['PATH']}", **(environment or {})}
        self.processes: list[LocalProcess] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        return super().run(argv, stdin=self._given(stdin), timeout_s=timeout_s)

    def start(self, argv: Sequence[str]) -> LocalProcess:
        process = LocalProcess(self.host.name, argv, self._environment)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(5.0)


class LocalProcess(RemoteProcess):
    """As over SSH: closing it closes the streams and kills nothing."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        pipe = subprocess.PIPE
        # A shell as sshd uses one: it answers 127 for a command that is not there.
        command = ["/bin/sh", "-c", 'exec "$@"', "sh", *argv]
        self.popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=dict(environment), start_new_session=True
        )
        assert self.popen.stdin is not None
        # communicate() would flush it, while another thread may still write.
        self._stdin, self.popen.stdin = self.popen.stdin, None

    def write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._stdin.write(view) :]
        except (OSError, ValueError) as error:
            raise SshError(self._name, SshFailure.LOST, "the command no longer reads its input") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], timeout_s)[0]:
            raise SshError(self._name, SshFailure.COMMAND_TIMEOUT, f"no output within {timeout_s} s")
        return os.read(self.popen.stdout.fileno(), max_bytes)

    def wait(self, timeout_s: float) -> CommandResult:
        try:
            stdout, stderr = self.popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise SshError(self._name, SshFailure.COMMAND_TIMEOUT, f"not done within {timeout_s} s") from error
        code = self.popen.returncode
        return CommandResult(code if code >= 0 else None, stdout, stderr)

    def close(self) -> None:
        self.close_stdin()
        for stream in (self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()

    def end(self) -> None:
        """For the end of a test: kill whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.close()
