"""Stands in for `engine.memory.predict_target`: what it answers is chosen by the seed of the configuration."""

from __future__ import annotations

import json
import sys
import time

import yaml

request = json.load(sys.stdin)
match yaml.safe_load(request["config"])["seed"]:
    case 1:
        print(json.dumps({"problems": ["attention=single is wrong"]}))
    case 2:
        print("first\nthe last word", file=sys.stderr)
        sys.exit(3)
    case 3:
        time.sleep(60)
    case _:
        ranks = request["nodes"] * request["local_ranks"]
        components = {"device": {"loss": 7}, "host": {}}
        figures = {"device_peak_bytes": ranks, "host_peak_bytes": 0, "needed_bytes": 9}
        print(json.dumps({**figures, "phase": "loss", "components": components}))
