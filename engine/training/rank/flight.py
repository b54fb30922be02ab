"""What torch's flight recorder knows of this rank's collectives, cut down to what the analysis of a hang needs.

The recorder is on (TORCH_FR_BUFFER_SIZE, by default) and holds the collectives of gloo and NCCL and NCCL's messages.
Messages over gloo it does not see (torch 2.13): `WaitClock` says for which rank the attention waits.

A gloo collective stays "scheduled" and is `retired` when it is done; only NCCL's have been seen started. A collective
that is not retired need not block: it may have been started ahead of time. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine.parallel.waits import WaitClock

MAX_ENTRIES = 50
MAX_TENSORS = 4
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_record(waits: WaitClock) -> dict[str, Any]:
    """{waiting, groups, last_enqueued, last_completed, entries}: where this rank's communication stands.

    waiting         {what, peer, age_s} of a blocking wait, or null
    groups          name of a process group -> its global ranks
    last_enqueued   BACKEND:NAME -> number of the last collective that this rank has entered, from 1; last_completed:
                    that is done. A group of two backends numbers the collectives of each by themselves
    entries         the last collectives, oldest first: {group, desc, seq, op, state, p2p, sizes, created_ns}
    """
    current = waits.current
    waiting = None if current is None else {"what": current.what, "peer": current.peer, "age_s": current.age_s}
    torch = sys.modules.get("torch")
    if torch is None:
        return {"waiting": waiting, "groups": {}, **reduce_trace([])}
    return {"waiting": waiting, "groups": _group_ranks(), **reduce_trace(_entries(torch))}


def reduce_trace(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{last_enqueued, last_completed, entries} of a trace's entries, oldest first: the newest of all and of each group.

    Messages have numbers of their own and do not count as collectives.
    """
    enqueued: dict[str, int] = {}
    completed: dict[str, int] = {}
    newest: dict[str, int] = {}
    reduced = [_reduce_entry(entry) for entry in entries]
    for index, entry in enumerate(reduced):
        if entry["p2p"]:
            continue
        group, seq = f"{entry['op'].partition(':')[0]}:{entry['group']}", entry["seq"]
        newest[group] = index
        enqueued[group] = max(seq, enqueued.get(group, 0))
        if entry["state"] == "completed":
            completed[group] = max(seq, completed.get(group, 0))
    kept = sorted({*range(len(reduced) - MAX_ENTRIES, len(reduced)), *newest.values()})
    return {
        "last_enqueued": enqueued,
        "last_completed": completed,
        "entries": [reduced[index] for index in kept if index >= 0],
    }


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
        "created_ns": entry.get("time_created_ns"),
    }


def _entries(torch: Any) -> list[dict[str, Any]]:
    """All entries of all recorders of this process, oldest first."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        for entry in json.loads(dump()).get("entries", ()):
            found[(entry.get("time_created_ns"), entry.get("record_id"), entry.get("profiling_name"))] = entry
    return sorted(found.values(), key=lambda entry: entry.get("time_created_ns") or 0)


def _group_ranks() -> dict[str, list[int]]:
    """Name -> global ranks of the process groups that this rank is in."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    names, ranks = world.pg_names, world.pg_group_ranks
    return {str(names[group]): sorted(members) for group, members in list(ranks.items()) if group in names}
