"""A stand-in for torchrun that starts at once and is called like it.

FAKE_POLL_S is how often it looks after its ranks (torchrun: 0.1 s). Like torchrun it reads PET_* where arguments say
nothing, gives every rank a session of its own, stops the others when one fails, says which one failed first, passes
SIGTERM on, and leaves its ranks behind when it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> int:
    words = sys.argv[1 : sys.argv.index("-m")]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    count, node = (
        int(options.get(f"--{name}") or os.environ.get(f"PET_{name.replace('-', '_').upper()}", "0"))
        for name in ("nproc-per-node", "node-rank")
    )
    first = node * count
    ranks = [start(first + number, number, sys.argv[len(words) + 1 :]) for number in range(count)]
    signal.signal(signal.SIGTERM, leave)
    try:
        return watch(ranks)
    except SystemExit:
        return stop(ranks)


def leave(*_: object) -> None:
    """Out of whatever holds a lock, once: SIGTERM may come twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def watch(ranks: list[subprocess.Popen[bytes]]) -> int:
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


def start(rank: int, local_rank: int, command: list[str]) -> subprocess.Popen[bytes]:
    more = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "TORCHELASTIC_RUN_ID": "fake"}
    return subprocess.Popen([sys.executable, *command], env={**os.environ, **more}, start_new_session=True)


def stop(ranks: list[subprocess.Popen[bytes]]) -> int:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        rank.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
