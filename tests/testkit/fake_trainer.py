"""A stand-in for `engine.train` that starts fast: `python -m fake_trainer RUN/config.yaml`, conduct by FAKE_MODE.

FAKE_RANK (1) misbehaves. FAKE_LEAD is the run folder of rank 0 where that is another one. Mode `gate` goes on
once there is a file `gate` in the run folder.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.errors import ConfigError
from engine.run.rank_process import RankStatus, leave, run_rank
from engine.run.summary import summarise
from engine.runs import RunFolder, open_run

STEPS = 5
FOREVER_S = 300.0


def train(run: RunFolder, mode: str, rank: int, status: RankStatus) -> None:
    if rank == 0:
        if run.read_state()["state"] != "starting":
            run.transition("starting")
        run.append_event("phase", phase="building the model")
        run.transition("running")
    lead = RunFolder(Path(os.environ.get("FAKE_LEAD", run.path)))
    print(f"rank {rank} in mode {mode}", flush=True)
    for step in range(1, STEPS + 1):
        status.step, status.phase = step, "forward"
        if rank == 0:
            run.append_metrics(row(step))
        while len(lead.read_metrics()) < step:  # ranks of a real run keep step by their collectives
            time.sleep(0.01)
        act(mode, rank, step)
    while mode == "gate" and not (lead.path / "gate").exists():
        time.sleep(0.01)
    if mode in ("ignore", "sleep", "wait"):
        time.sleep(FOREVER_S)
    if rank == 0 and mode != "incomplete":
        run.write_summary({**summarise(run.read_metrics(), 1), "attention_preset": "ring", "world_size": 2})
        run.transition("completed")


def row(step: int) -> dict[str, float | int | None]:
    return {"step": step, "loss": 4.0 / step, "tokens": 128, "step_time_s": 0.5, "tokens_per_s": 256.0, "mfu": None}


def act(mode: str, rank: int, step: int) -> None:
    """Misbehave on one rank at step 3; the others then wait, as they would in a collective."""
    if mode == "ignore" or (mode == "raise_stubborn" and rank == 0):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "sleep" and step == 1:
        subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    if step != 3 or mode in ("ok", "gate", "ignore", "sleep", "wait", "incomplete"):
        return
    if rank != int(os.environ.get("FAKE_RANK", "1")):
        time.sleep(FOREVER_S)
    if mode in ("raise", "raise_stubborn"):
        raise ValueError("the tenth expert [bold]is\x1b[31m missing")
    if mode == "config":
        raise ConfigError(["train.seq_len is odd", "model.num_heads is odd"])
    if mode == "memory":
        raise MemoryError("cannot hold the logits")
    if mode == "hoard":
        hoard()
    if mode == "counted":
        killed_and_counted()
    if mode == "limited":
        limited()
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "silent":
        os._exit(7)


def hoard() -> None:
    """Take memory until somebody ends it, slowly enough to be seen."""
    taken = []
    for _ in range(400):
        taken.append(b"x" * (4 * 2**20))
        time.sleep(0.02)


def killed_and_counted() -> None:
    """Die as one whom the kernel kills for lack of memory, and count it as the kernel would, in a file given."""
    taken = b"x" * (100 * 2**20)
    time.sleep(5.0)  # resident sets are looked at every second, later on a machine that is busy elsewhere
    Path(os.environ["FAKE_VMSTAT"]).write_text(f"pgfault {len(taken)}\noom_kill 1\n", encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


def limited() -> None:
    """Take all that the process may have, to the last hole, so that nothing is left to say so with."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 2**20,) * 2)
    taken, size = [], 2**20
    while True:
        try:
            taken.append(bytearray(size))
        except MemoryError:
            if size < 64:
                raise
            size //= 2


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    folder = open_run(sys.argv[1])
    number = int(os.environ["RANK"])
    leave(run_rank(folder, lambda status: train(folder, os.environ["FAKE_MODE"], number, status)))
