"""What the nodes of a job wrote down about themselves, and the launch plan with these nodes in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from cluster.plan import LaunchPlan, NodePlan, with_files
from cluster.plan_record import plan_from_dict
from engine.runs.folder import RunFolder
from engine.runs.records import read_json_object, replace_json

GRANTED_FILE = "granted.json"
_MAX_BYTES = 1 << 20


def write_granted(run: RunFolder, node: NodePlan, token: str) -> None:
    """Leave the plan of a node in its folder. Raises OSError."""
    replace_json(node_folder(run, node.name) / GRANTED_FILE, {"token": token, "node": node.to_dict()})


def granted_plan(plan: LaunchPlan, run: RunFolder, token: str) -> LaunchPlan | None:
    """`plan` with the nodes that it got in the attempt `token`, its file launch.json alone; None until all are there.

    Raises PlanFileError when what they wrote makes no plan.
    """
    found = _read_all(run, token)
    if len(found) < len(plan.nodes):
        return None
    nodes = sorted(found, key=lambda node: str(node.get("node_rank")).zfill(9))
    return with_files(plan_from_dict({**plan.to_dict(), "nodes": nodes, "files": {}}))


def node_folder(run: RunFolder, name: str) -> Path:
    """nodes/<name> of the run folder."""
    return run.path / "nodes" / run.log_dir(name).name


def look_again(folder: Path) -> None:
    """Make a network file system ask its server: what is not there may have been remembered for a minute."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        next(entries, None)


def _read_all(run: RunFolder, token: str) -> list[dict[str, Any]]:
    """The nodes of this attempt, as they wrote themselves down."""
    look_again(run.path / "nodes")
    found = []
    for path in sorted((run.path / "nodes").glob(f"*/{GRANTED_FILE}")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = read_json_object(path) if path.stat().st_size <= _MAX_BYTES else None
            if document and document.get("token") == token and isinstance(document.get("node"), dict):
                found.append(document["node"])
    return found
