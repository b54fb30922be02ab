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

from engine.distributed.waits import WaitClock

MAX_ENTRIES = 50
MAX_TENSORS = 4
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_record(waits: WaitClock) -> dict[str, Any]:
    """{waiting, groups, entries}: where this rank's communication stands.

    waiting   {what, peer} of a blocking wait, or null
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
    """A trace's newest entries of all and of each group, oldest first.

    Messages have numbers of their own and do not count as collectives. A group of two backends numbers the collectives
    of each by themselves.
    """
    reduced = [_reduce_entry(entry) for entry in entries]
    newest = {
        (entry["op"].partition(":")[0], entry["group"]): index
        for index, entry in enumerate(reduced)
        if not entry["p2p"]
    }
    kept = sorted({*range(len(reduced) - MAX_ENTRIES, len(reduced)), *newest.values()})
    return [reduced[index] for index in kept if index >= 0]


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
    """All entries of all recorders of this process, oldest first."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dumps = [dump for name in _DUMPS if (dump := getattr(c10d, name, None)) is not None]
    entries = [entry for dump in dumps for entry in json.loads(dump()).get("entries", ())]
    found = {(one.get("time_created_ns"), one.get("record_id"), one.get("profiling_name")): one for one in entries}
    return sorted(found.values(), key=lambda entry: entry.get("time_created_ns") or 0)


def _group_ranks() -> dict[str, list[int]]:
    """Name -> global ranks of the process groups that this rank is in."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    names, ranks = world.pg_names, world.pg_group_ranks
    return {str(names[group]): sorted(members) for group, members in list(ranks.items()) if group in names}
