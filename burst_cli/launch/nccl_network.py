"""Whether NCCL took the network that a run's plan names: RDMA adapters, or, without a word, sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from burst_cli.figures import clean, fold_names
from burst_cli.runs.read import read_facts
from cluster.env.nccl_log import sockets_line
from engine.runs.folder import RunFolder

_READ_BYTES = 1 << 20  # of a log, from its beginning: NCCL names its network when it starts
_LOGS = 64  # of a node: one per process that uses NCCL


def socket_fallbacks(run: RunFolder) -> dict[str, str]:
    """Nodes whose plan names RDMA ports but whose NCCL took sockets in this attempt, each with the line that says so.

    Nodes with no NCCL log yet are left out, and so is a run on one node, where nothing goes over a network.
    """
    nodes = read_facts(run).nodes
    if len(nodes) < 2:
        return {}
    since = _started_at(run)
    planned = (node.name for node in nodes if node.rdma_ports)
    return {name: line for name in planned if (line := _node_line(run.log_dir(name), since))}


def fallback_text(fallbacks: Mapping[str, str]) -> str | None:
    """The warning for people; None where nothing fell back."""
    if not fallbacks:
        return None
    said = clean(next(iter(fallbacks.values())))
    return (
        f"NCCL fell back to sockets on {clean(fold_names(list(fallbacks)))}, though the plan names RDMA ports "
        f"(NCCL_IB_HCA): messages between nodes are many times slower. It said: {said}. "
        "See `burst check-nodes --only ib` and `burst env check`."
    )


def fallback_rows(fallbacks: Mapping[str, str]) -> list[dict[str, Any]]:
    """The same for --json."""
    return [{"node": node, "said": line} for node, line in fallbacks.items()]


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


def _started_at(run: RunFolder) -> float:
    try:
        return datetime.fromisoformat(str(run.read_state().get("started_at"))).timestamp()
    except ValueError:
        return 0.0
