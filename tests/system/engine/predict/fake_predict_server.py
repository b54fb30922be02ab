"""Stands in for `engine.training.fake_run.memory`: what it answers is chosen by the sequence length of the request."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

for number, line in enumerate(sys.stdin, start=1):
    request = json.loads(line)
    match request["config"]["train"]["seq_len"]:
        case 1:
            answer = {"problems": ["attention=single is wrong"]}
        case 2:
            print("first\nthe last word", file=sys.stderr)
            sys.exit(3)
        case 3:
            time.sleep(60)
        case 4 if not Path(os.environ["ENDED_BEFORE"]).exists():
            Path(os.environ["ENDED_BEFORE"]).touch()
            sys.exit(0)
        case _:
            answer = {
                "device": "cpu",
                "world_size": request["world"]["nodes"] * request["world"]["local_ranks"],
                "rank": number,
                "device_peak_bytes": os.getpid(),
                "host_peak_bytes": 0,
                "phase": os.environ["PYTHONPATH"].split(os.pathsep)[0],
                "components": {"device": {"loss": 7}, "host": {}},
                "phase_peaks": {},
                "reserve_bytes": 5,
                "seconds": 0.0,
            }
    print(json.dumps(answer), flush=True)
