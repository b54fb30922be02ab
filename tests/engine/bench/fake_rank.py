"""Stands in for a rank: says its place, then does what FAKE_MODE asks. It needs no torch and starts at once."""

from __future__ import annotations

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
Path(os.environ.get("FAKE_PIDS", str(folder)), f"pid{rank}").write_text(str(os.getpid()))
if mode == "fail" and rank == 1:
    print(*(f"the pressure fell {time}\udcff" for time in range(20)), sep="\n")
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "fail" and rank == 2:
    time.sleep(0.5)
    sys.exit("rank 1 is silent")
if mode in ("fail", "hang"):
    time.sleep(600)
(folder / f"place{rank}.json").write_text(json.dumps(place))
if rank == 0:
    (folder / RESULT_FILE).write_text(json.dumps({"results": ["measured"]}))
