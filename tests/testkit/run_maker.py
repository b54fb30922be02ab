"""Run folders made by hand, as a launch and its nodes leave them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.runs.files import replace_json
from engine.runs.folder import RunFolder, create_run


def make_run(
    root: Path,
    name: str = "tiny/20260101-000000-aaaaaa",
    *,
    state: str = "running",
    nodes: Mapping[str, int] | None = None,
    steps: int = 0,
    **facts: Any,
) -> RunFolder:
    """A run in `state` with `nodes` (name -> ranks) in its plan and so many steps of 200 done."""
    run = create_run(root / name, {"launch.json": json.dumps(plan_document(nodes or {"tb1": 2}))})
    path = {"planned": (), "starting": ("starting",), "running": ("starting", "running")}
    for word in path.get(state, ("starting", "running", state)):
        run.transition(word)
    if facts:
        run.record(**facts)
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, "loss": 4.0 / step, "step_time_s": 2.0, "tokens_per_s": 512.0, "mfu": 0.25})
    return run


def plan_document(nodes: Mapping[str, int]) -> dict[str, Any]:
    """As much of launch.json as is shown."""
    entries, first = [], 0
    for name, ranks in nodes.items():
        entries.append({"name": name, "first_rank": first, "local_ranks": ranks})
        first += ranks
    config = {"train": {"steps": 200, "seq_len": 4096}, "attention": {"preset": "ring"}}
    return {"format": 1, "launcher": "ssh", "world_size": first, "nodes": entries, "config": config}


def write_log(run: RunFolder, node: str, rank: int, text: str | bytes) -> Path:
    """The log of a rank."""
    path = run.log_path(node, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def plan_adapters(run: RunFolder, **changes: str) -> None:
    """Let the plan of every node name RDMA ports for NCCL."""
    document = json.loads((run.path / "launch.json").read_text())
    for entry in document["nodes"]:
        entry["environment"] = {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", **changes}
    replace_json(run.path / "launch.json", document)


def write_node(run: RunFolder, node: str, **files: Mapping[str, Any]) -> None:
    """Files of nodes/<node>/: supervisor, health, outcome."""
    folder = run.path / "nodes" / node
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in files.items():
        replace_json(folder / f"{name}.json", document)


def health(**changes: Any) -> dict[str, Any]:
    """What a node that is well writes."""
    ranks = {"0": {"pid": 10, "state": "R"}, "1": {"pid": 11, "state": "S"}}
    memory = {"memory_used_bytes": 2**30, "memory_limit_bytes": 4 * 2**30, "disk_free_bytes": 2**40}
    gpu = {"index": 0, "utilization": 97, "temperature_c": 60, "throttle": None}
    return {"load1": 1.5, "cores": 4, **memory, "ranks": ranks, "gpus": [gpu], **changes}


def forget_process(run: RunFolder) -> None:
    """As after the launcher was killed: run.json names a process that is gone."""
    run.record(pid=2**22 + 1, pid_start="1")
