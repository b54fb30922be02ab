"""Stands in for a rank: says its place, then does what FAKE_MODE asks. It needs no torch and starts at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from engine.bench.spec import RESULT_FILE

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
mode = os.environ.get("FAKE_MODE", "")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
place = [os.environ[name] for name in (*names, "PYTHONFAULTHANDLER", "PYTHONPATH")]
place += [str(os.getsid(0) == os.getpid())]
pids = Path(os.environ.get("FAKE_PIDS", str(folder)))
(pids / f"pid{rank}").write_text(str(os.getpid()))


def has_ended(other: int) -> bool:
    """Whether that rank was there, and its starter has taken notice of its end."""
    with contextlib.suppress(FileNotFoundError):
        pid = (pids / f"pid{other}").read_text()
        return pid != "" and not Path("/proc", pid).exists()
    return False


if mode == "fail" and rank == 1:
    print(*(f"the pressure fell {time}\udcff" for time in range(20)), sep="\n")
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "fail" and rank == 2:
    while not has_ended(1):
        time.sleep(0.05)
    sys.exit("rank 1 is silent")
if mode in ("fail", "hang"):
    time.sleep(600)
(folder / f"place{rank}.json").write_text(json.dumps(place))
if rank == 0:
    (folder / RESULT_FILE).write_text(json.dumps({"results": ["measured"]}))
