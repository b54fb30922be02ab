"""What an earlier attempt of the same run left in a node's run folder goes to attempts/<N>/.

nodes/<node>/*                        whole, but for the lock
logs/<node>/rank<NNNN>.*.json         errors, states and flight records; logs are continued, not moved
metrics.jsonl events.jsonl summary.json   of the node with rank 0: several nodes may share one folder
"""

import contextlib
import os
from collections.abc import Iterator

from cluster.supervise.node.folder import NodeFiles, make_folder
from cluster.supervise.node.spec import Spec

_RECORDS = ("metrics.jsonl", "events.jsonl", "summary.json")


def put_aside(spec: Spec) -> None:
    """Make room for another attempt of `spec`'s run. Raises OSError."""
    files = NodeFiles(spec.folder, spec.node)
    target = _free_place(files)
    for source, name in _left_files(files, spec.node_rank == 0):
        path = os.path.join(target, name)
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            os.replace(source, path)


def _left_files(files: NodeFiles, is_lead: bool) -> Iterator[tuple[str, str]]:
    """Path and name below attempts/<N> of everything to move."""
    for name in sorted(os.listdir(files.state_dir)):
        path = os.path.join(files.state_dir, name)
        if path != files.lock and os.path.isfile(path):
            yield path, os.path.join("nodes", files.name, name)
    for name in sorted(os.listdir(files.log_dir)):
        if name.startswith("rank") and name.endswith(".json"):
            yield os.path.join(files.log_dir, name), name
    for name in _RECORDS:
        path = os.path.join(files.folder, name)
        if is_lead and os.path.isfile(path):
            yield path, name


def _free_place(files: NodeFiles) -> str:
    """The first attempts/<N> in which this node has nothing yet."""
    number = 1
    while True:
        place = os.path.join(files.folder, "attempts", str(number))
        if not os.path.isdir(os.path.join(place, "nodes", files.name)):
            return place
        number += 1
