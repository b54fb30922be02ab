"""A real ssh-agent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testkit.waiting import wait_for


class Agent(str):
    """The socket of a running agent."""

    __slots__ = ()

    def add(self, key: Path, *options: str) -> None:
        """Hand it a key, with the certificate that lies beside; options: of ssh-add."""
        command = ["ssh-add", "-q", *options, str(key)]
        subprocess.run(command, env=os.environ | {"SSH_AUTH_SOCK": self}, check=True)


@contextlib.contextmanager
def agent_with(folder: Path, *keys: Path) -> Iterator[Agent]:
    """An agent of this test's own that holds `keys`."""
    agent = Agent(folder / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", agent], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers(agent), "ssh-agent")
        for key in keys:
            agent.add(key)
        yield agent
    finally:
        process.terminate()
        process.wait(200)


def _answers(path: str) -> bool:
    """Whether somebody does there: its name is there before anybody listens."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as guest:
        guest.connect(path)
        return True
    return False
