"""A rank that starts fast, for tests of the supervisor: `python -m supervise_rank MODE`. Standard library only."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.run.process import die_with_parent

FOREVER_S = 120.0


def main(mode: str) -> None:
    rank, logs = int(os.environ["RANK"]), Path(os.environ["BURST_RANK_LOGS"])
    die_with_parent(signal.SIGKILL)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "polite":
        signal.signal(signal.SIGTERM, lambda *_: finish(logs, rank))
    if mode == "children":
        start_children()
    stacks = (logs / f"rank{rank:04d}.stacks").open("a")
    if mode == "listens":
        faulthandler.register(signal.SIGUSR1, file=stacks)
        print(f"# rank {rank}, pid {os.getpid()}", file=stacks, flush=True)
    (logs / f"rank{rank:04d}.log").write_text(f"rank {rank} is there\n")
    if mode == "ok":
        return
    if mode in ("exits", "dies") and rank == 1:
        time.sleep(0.5)
        if mode == "exits":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "counted" and rank == 1:
        die_counted()
    time.sleep(FOREVER_S)


def die_counted() -> None:
    """Die as one whom the kernel kills for lack of memory, and count it as the kernel would, in a file given."""
    taken = b"x" * (60 * 2**20)
    time.sleep(5.0)  # resident sets are looked at every second, later on a machine that is busy elsewhere
    Path(os.environ["FAKE_VMSTAT"]).write_text(f"pgfault {len(taken)}\noom_kill 8\n", encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


def finish(logs: Path, rank: int) -> None:
    """What a rank does at its step edge."""
    time.sleep(0.3)
    (logs / f"rank{rank:04d}.log").write_text("finished\n")
    os._exit(0)


def start_children() -> None:
    """A worker; a grandchild in a session of its own; and one that also lost the marks and its parent."""
    naked = {"PATH": os.environ["PATH"]}
    forget = f"import subprocess; subprocess.Popen(['sleep', '{FOREVER_S}'], start_new_session=True)"
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", forget], env=naked).wait()


if __name__ == "__main__":
    main(sys.argv[1])
