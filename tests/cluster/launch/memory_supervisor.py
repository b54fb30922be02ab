"""A supervisor that looks at another machine's memory: `python memory_supervisor.py PROC < spec.json`."""

from __future__ import annotations

import json
import sys

from cluster.agent.folder import NodeFiles, make_folder
from cluster.agent.memory import MemoryWatch
from cluster.agent.messages import parse_spec
from cluster.agent.supervisor import Supervisor

if __name__ == "__main__":
    spec = parse_spec(json.load(sys.stdin))
    files = NodeFiles(spec.folder, spec.node)
    for folder in (files.state_dir, files.log_dir):
        make_folder(folder)
    Supervisor(spec, MemoryWatch(proc=sys.argv[1])).run()
