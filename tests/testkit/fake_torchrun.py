"""A stand-in for torchrun without torch: `python fake_torchrun.py RANKS MODULE ARGUMENT`.

FAKE_FIRST_RANK is the rank of the first of them, FAKE_POLL_S how often it looks after them (torchrun: 0.1 s). Like
torchrun it gives every rank a session of its own, stops the others when one fails, says which one failed first, passes
SIGTERM on, and leaves its ranks behind when it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> int:
    count, module, argument = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ranks = [start(rank, module, argument) for rank in range(count)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(stop(ranks)))
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return 0
        for rank, code in enumerate(codes):
            if code:
                stop(ranks)
                print(f"failed (exitcode: {code}) local_rank: {rank} (pid: {ranks[rank].pid}) of binary", flush=True)
                return 1
        time.sleep(float(os.environ.get("FAKE_POLL_S", "0.02")))


def start(rank: int, module: str, argument: str) -> subprocess.Popen[bytes]:
    number = int(os.environ.get("FAKE_FIRST_RANK", "0")) + rank
    environment = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "fake"}
    return subprocess.Popen([sys.executable, "-m", module, argument], env=environment, start_new_session=True)


def stop(ranks: list[subprocess.Popen[bytes]]) -> int:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        rank.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
