"""Reads torch's flight recorder of this rank's collectives and reduces it to what the analysis of a hang needs.

The recorder is on by default (TORCH_FR_BUFFER_SIZE) and has the collectives of gloo and NCCL and the point-to-point
operations of NCCL. It lacks those of gloo (torch 2.13); `WaitClock` records for which rank attention waits.

A gloo collective stays "scheduled" and is `retired` when it is complete; only those of NCCL become "started". One that
is not retired need not block: it may have been started early. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine.distributed.waits import WaitClock

MAX_ENTRIES = 50
MAX_TENSORS = 4
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_record(waits: WaitClock) -> dict[str, Any]:
    """Return the state of this rank's communication, {waiting, groups, entries}.

    waiting   {what, peer} of a blocking wait, or None
    groups    name of a process group -> its global ranks
    entries   the last collectives, oldest first: {group, desc, seq, op, state, p2p, sizes}
    """
    current = waits.current
    waiting = None if current is None else {"what": current.what, "peer": current.peer}
    torch = sys.modules.get("torch")
    if torch is None:
        return {"waiting": waiting, "groups": {}, "entries": []}
    return {"waiting": waiting, "groups": _group_ranks(), "entries": reduce_trace(_entries(torch))}


def reduce_trace(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the last MAX_ENTRIES entries and the last of each group and backend, oldest first.

    Point-to-point operations are numbered separately and are not collectives of a group. A group with two backends
    numbers the collectives of each separately.
    """
    reduced = [_reduce_entry(entry) for entry in entries]
    newest = {
        (entry["op"].partition(":")[0], entry["group"]): index
        for index, entry in enumerate(reduced)
        if not entry["p2p"]
    }
    indices = sorted({*range(len(reduced) - MAX_ENTRIES, len(reduced)), *newest.values()})
    return [reduced[index] for index in indices if index >= 0]


def _reduce_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    name, description = (*entry.get("process_group", ()), "", "")[:2]
    is_message = bool(entry.get("is_p2p"))
    is_done = bool(entry.get("retired")) or entry.get("state") == "completed"
    return {
        "group": str(name),
        "desc": str(description),
        "seq": int(entry.get("p2p_seq_id" if is_message else "collective_seq_id") or 0),
        "op": str(entry.get("profiling_name", "")),
        "state": "completed" if is_done else str(entry.get("state", "")),
        "p2p": is_message,
        "sizes": list(entry.get("input_sizes") or ())[:MAX_TENSORS],
    }


def _entries(torch: Any) -> list[dict[str, Any]]:
    """Return the entries of all recorders of this process, oldest first."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dumps = [dump for name in _DUMPS if (dump := getattr(c10d, name, None)) is not None]
    entries = [entry for dump in dumps for entry in json.loads(dump()).get("entries", ())]
    # Both dumps may contain the same entry.
    unique = {
        (item.get("time_created_ns"), item.get("record_id"), item.get("profiling_name")): item for item in entries
    }
    return sorted(unique.values(), key=lambda entry: entry.get("time_created_ns") or 0)


def _group_ranks() -> dict[str, list[int]]:
    """Return the global ranks of this rank's process groups, by name."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    names, ranks = world.pg_names, world.pg_group_ranks
    return {str(names[group]): sorted(members) for group, members in list(ranks.items()) if group in names}
