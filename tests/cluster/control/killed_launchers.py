"""Launchers that are killed at random: `python killed_launchers.py RUN NODE_FOLDER KILLS SEED`.

Each is a fork of this process, which has no threads: it begins to copy and dies by SIGKILL up to 0.2 s later; the
last one not before something was copied.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from agent_rig import FakeNode


def main(run: str, folder: str, kills: int, seed: int) -> None:
    moments = random.Random(seed)
    node = FakeNode(Path(folder))
    for left in reversed(range(kills)):
        pid = os.fork()
        if pid == 0:
            node.link(Path(run)).follow()
            time.sleep(60)
            os._exit(0)
        time.sleep(moments.uniform(0.0, 0.2))
        give_up_at = time.monotonic() + 200
        while not left and not has_begun(Path(run)) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def has_begun(run: Path) -> bool:
    """Whether anything of the log is here."""
    return any(log.stat().st_size for log in run.glob("logs/*/rank*.log"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
