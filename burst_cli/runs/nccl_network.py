"""Which network NCCL took in a run: a warning where the plan names RDMA ports and NCCL fell back to sockets."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path

from burst_cli.render import clean, fold_names
from burst_cli.runs.read import read_facts
from cluster.checks.nccl_log import sockets_line
from engine.runs.folder import RunFolder

_READ_BYTES = 1 << 20  # of a log, from its beginning: NCCL names its network when it starts
_LOGS = 64  # of a node: one per process that uses NCCL


def socket_fallbacks(run: RunFolder) -> list[dict[str, str]]:
    """{node, said} of every node whose plan names RDMA ports but whose NCCL took sockets in this attempt, and said so.

    Nodes with no NCCL log yet are left out, and so is a run on one node, where nothing goes over a network.
    """
    nodes = read_facts(run).nodes
    since = 0.0
    with contextlib.suppress(ValueError):
        since = datetime.fromisoformat(str(run.read_state().get("started_at"))).timestamp()
    planned = [node.name for node in nodes if node.rdma_ports] if len(nodes) > 1 else []
    return [{"node": name, "said": line} for name in planned if (line := _node_line(run.log_dir(name), since))]


def fallback_text(fallbacks: list[dict[str, str]]) -> str | None:
    """The warning for people; None where nothing fell back."""
    if not fallbacks:
        return None
    nodes, said = clean(fold_names([row["node"] for row in fallbacks])), clean(fallbacks[0]["said"])
    return (
        f"NCCL fell back to sockets on {nodes}, though the plan names RDMA ports (NCCL_IB_HCA): messages between nodes "
        f"are many times slower. It said: {said}. See `burst check-nodes --only ib` and `burst env check`."
    )


def _node_line(folder: Path, since: float) -> str | None:
    for path in sorted(folder.glob("nccl.*.log"))[-_LOGS:]:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < since:
                continue  # of an earlier attempt
            with path.open("rb") as file:
                line = sockets_line(file.read(_READ_BYTES).decode(errors="replace"))
            if line is not None:
                return line
    return None
