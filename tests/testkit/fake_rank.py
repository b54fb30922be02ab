"""A rank that starts fast; `fakes/torch` has the torchrun that starts it as quickly.

python -m fake_rank RUN/config.yaml    in the frame of a real rank, five steps; its conduct is FAKE_MODE: ok, wait, gate
    (does its last step once there is a file `gate` in the run folder), saves (waits to be asked to stop, which saves;
    an attempt after that completes), ignore (whoever asks it to stop), sleep (with a grandchild), one of
    FAULTS below or of engine.training.rank.faults. Faults strike rank FAKE_RANK (1) in step 3, while the others wait as
    in a collective. FAKE_LEAD is the run folder of rank 0 where that is another one.
python -m fake_rank MODE               without a frame, for tests of the supervisor: ok, wait, stubborn, polite,
    children, listens, exits
"""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.runs.folder import RunFolder
    from engine.training.rank.process import RankStatus

STEPS = 5
FAULT_STEP = 3
FOREVER_S = 300.0


# --- in the frame of a rank -------------------------------------------------------------------------------------------


def train(run: RunFolder, mode: str, rank: int, status: RankStatus) -> None:
    from engine.runs.folder import RunFolder
    from engine.runs.record import summarise

    if rank == 0:
        if run.read_state()["state"] != "starting":
            run.transition("starting")
        run.transition("running")
        run.append_event("phase", phase="train")
    lead = RunFolder(Path(os.environ.get("FAKE_LEAD", run.path)))
    print(f"rank {rank} in mode {mode}", flush=True)
    while mode == "saves" and lead.read_state()["state"] not in ("running", "completed"):
        time.sleep(0.01)  # the records are those of the attempt before until rank 0 has begun this one
    for step in range(1, STEPS + 1):
        status.step, status.phase = step, "forward"
        while mode == "gate" and step == STEPS and not (lead.path / "gate").exists():
            time.sleep(0.01)
        if rank == 0:
            if (mode, step) == ("disk", FAULT_STEP):
                strike(mode, status)
            run.append_metrics(row(step))
        while len(lead.read_metrics()) < step:  # ranks of a real run keep step by their collectives
            time.sleep(0.01)
        act(mode, rank, step, status)
    if mode == "saves" and not list(lead.path.glob("attempts/*/events.jsonl")):
        wait_and_save(run, rank)
    if mode in ("ignore", "sleep", "wait"):
        time.sleep(FOREVER_S)
    if rank == 0:
        run.write_summary({**summarise(run.read_metrics(), 1), "attention_preset": "ring", "world_size": 2})
        run.transition("completed")


def wait_and_save(run: RunFolder, rank: int) -> None:
    """As the trainer ends when it is asked to stop."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))  # which takes no lock: the signal comes twice
    while not asked:
        time.sleep(0.01)
    if rank == 0:
        run.append_event("checkpoint", step=STEPS)
    while not any(event["kind"] == "checkpoint" for event in run.read_events()):
        time.sleep(0.01)  # no rank leaves before all have saved
    raise KeyboardInterrupt


def row(step: int) -> dict[str, float | int | None]:
    return {"step": step, "loss": 4.0 / step, "tokens": 128, "step_time_s": 0.5, "tokens_per_s": 256.0, "mfu": None}


def act(mode: str, rank: int, step: int, status: RankStatus) -> None:
    """Misbehave on one rank; the others go on where ranks do not wait for each other, else they wait."""
    if mode == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "sleep" and step == 1:
        subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    if step != FAULT_STEP or mode in ("ok", "gate", "saves", "ignore", "sleep", "wait"):
        return
    if rank == int(os.environ.get("FAKE_RANK", "1")):
        strike(mode, status)
    elif mode not in ("flood", "garbage", "slow"):
        status.phase = "backward"
        time.sleep(FOREVER_S)


def strike(mode: str, status: RankStatus) -> None:
    """The fault itself."""
    from engine.training.rank.faults import Fault, Faults

    if mode in FAULTS:
        FAULTS[mode]()
        return
    if mode in ("hang_gil", "stop", "exit0"):
        time.sleep(0.5)  # a thread says where the rank is, and then nobody lets it; less of a life is not seen
    step = status.step or 0
    faults = Faults([Fault(mode, 0, step, seconds=0.3)])
    faults.at_forward(step)
    faults.at_metrics(step)
    if math.isnan(faults.at_loss(step, 1.0)):
        from engine.config.errors import RunError

        raise RunError(f"the loss is NaN in step {step}")


def raise_in_colours() -> None:
    raise ValueError("the tenth expert [bold]is\x1b[31m missing")


def find_mistakes() -> None:
    from engine.config.errors import ConfigError

    raise ConfigError(["train.seq_len is odd", "model.num_heads is odd"])


def hoard() -> None:
    """Take memory until somebody ends it, slowly enough to be seen."""
    taken = []
    for _ in range(400):
        taken.append(b"x" * (4 * 2**20))
        time.sleep(0.02)


def die_counted() -> None:
    """Die as one whom the kernel kills for lack of memory, and count it as the kernel would, in a file given."""
    taken = b"x" * (100 * 2**20)
    time.sleep(5.0)  # resident sets are looked at every second, later on a machine that is busy elsewhere
    Path(os.environ["FAKE_VMSTAT"]).write_text(f"pgfault {len(taken)}\noom_kill 8\n", encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


def fill_own_limit() -> None:
    """Take all that the process may have, to the last hole, so that nothing is left to say so with."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)
    taken, size = [], 2**20
    while True:
        try:
            taken.append(bytearray(size))
        except MemoryError:
            if size < 64:
                raise
            size //= 2


def flood() -> None:
    """A hundredth of what the trainer's fault prints."""
    print("\n".join(f"flood line {number}" for number in range(10_000)), flush=True)


def print_garbage() -> None:
    """Bytes of all kinds, terminal escapes, and a line of a megabyte."""
    os.write(1, bytes(range(256)) + b"\n\x1b[2J\x1b]0;title\x07\x1b[31m[bold red]\r\x9b1A\xe2\x80\xae\xff\xfe\x00\n")
    print("x" * 2**20, flush=True)


FAULTS: Mapping[str, Callable[[], None]] = {
    "raise": raise_in_colours,
    "config": find_mistakes,
    "hoard": hoard,
    "counted": die_counted,
    "limited": fill_own_limit,
    "flood": flood,
    "garbage": print_garbage,
}


# --- without a frame --------------------------------------------------------------------------------------------------


def live(mode: str) -> None:
    """Say that the rank is there, then do what MODE says: rank 1 fails, or all go on until somebody ends them."""
    from engine.runs.process import die_with_parent

    rank, logs = int(os.environ["RANK"]), Path(os.environ["BURST_RANK_LOGS"])
    log = logs / f"rank{rank:04d}.log"
    die_with_parent(signal.SIGKILL)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "polite":
        signal.signal(signal.SIGTERM, lambda *_: finish(log))
    if mode == "children":
        start_children()
    if mode == "listens":
        stacks = log.with_suffix(".stacks").open("a")
        faulthandler.register(signal.SIGUSR1, file=stacks)
        print(f"# rank {rank}, pid {os.getpid()}", file=stacks, flush=True)
    log.write_text(f"rank {rank} is there\n")
    if rank == 1 and mode == "exits":
        time.sleep(0.5)
        os._exit(7)
    if mode != "ok":
        time.sleep(FOREVER_S)


def finish(log: Path) -> None:
    """What a rank does at its step edge."""
    time.sleep(0.3)
    log.write_text("finished\n")
    os._exit(0)


def start_children() -> None:
    """A worker; a grandchild in a session of its own; and one that also lost the marks and its parent."""
    naked = {"PATH": os.environ["PATH"]}
    forget = f"import subprocess; subprocess.Popen(['sleep', '{FOREVER_S}'], start_new_session=True)"
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", forget], env=naked).wait()


def main(first: str) -> None:
    if not first.endswith("config.yaml"):
        live(first)
        return
    from engine.runs.folder import open_run
    from engine.training.rank.process import leave, run_rank

    while not Path(first).exists():  # ranks of a real run meet the first pod, which lays it, before they look for it
        time.sleep(0.01)
    folder = open_run(first)
    number = int(os.environ["RANK"])
    leave(run_rank(folder, lambda status: train(folder, os.environ["FAKE_MODE"], number, status)))


if __name__ == "__main__":
    main(*sys.argv[1:])
