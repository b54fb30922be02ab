"""Flight records: what torch's recorder says, reduced; and that it says what the analysis of a hang relies on."""

from __future__ import annotations

import threading
from typing import Any

from testkit.ranks import Pools
from testkit.waiting import wait_for

from engine.distributed.waits import WaitClock
from engine.training.rank.flight import MAX_ENTRIES, flight_record, reduce_trace


def entry(group: str, seq: int, op: str = "gloo:all_reduce", **facts: Any) -> dict[str, Any]:
    return {
        "process_group": [group, f"desc {group}"],
        "collective_seq_id": seq,
        "profiling_name": op,
        "state": "scheduled",
        "retired": True,
        "input_sizes": [[4]],
        "time_created_ns": seq,
        **facts,
    }


def test_the_last_collective_of_every_group_is_in_the_record() -> None:
    rare = entry("rare", 1, retired=False, input_sizes=[[number] for number in range(5)])
    done = entry("done", 1, retired=False, state="completed")
    first, second, *last = reduce_trace([rare, done, *(entry("busy", seq) for seq in range(1, 200))])
    assert first == {
        **{"group": "rare", "desc": "desc rare", "seq": 1, "op": "gloo:all_reduce", "state": "scheduled", "p2p": False},
        "sizes": [[0], [1], [2], [3]],
    }
    assert second["group"] == "done"
    assert second["state"] == "completed"
    assert [each["seq"] for each in last] == list(range(200 - MAX_ENTRIES, 200))
    assert {each["state"] for each in last} == {"completed"}


def test_messages_count_apart_from_collectives() -> None:
    """And entries of an unknown form do no harm."""
    messages = [entry("a", 0, "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=seq) for seq in range(1, 100)]
    trace = [{}, {"process_group": []}, entry("a", 4, "nccl:all_gather"), entry("a", 3), *messages]
    nothing, *kept = reduce_trace(trace)
    assert [(each["op"], each["p2p"], each["seq"]) for each in (nothing, *kept[:2])] == [
        *(("", False, 0), ("nccl:all_gather", False, 4), ("gloo:all_reduce", False, 3))
    ]
    assert [(each["p2p"], each["seq"]) for each in kept[2:]] == [(True, seq) for seq in range(100 - MAX_ENTRIES, 100)]


def last_of_test(record: dict[str, Any]) -> dict[str, Any]:
    """The last collective of the group of this call."""
    found: dict[str, Any] = [each for each in record["entries"] if each["desc"] == "test group"][-1]
    return found


def recorded() -> dict[str, Any]:
    """The record of this rank while rank 1 is the only one that has not entered a collective."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1, 2], group_desc="test group")
    dist.all_reduce(torch.ones(3), group=group)
    late = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=group))
    if dist.get_rank() != 1:
        late.start()
    # The thread is on its way; a collective counts as done a moment after whoever called it goes on.
    awaited = (1, "completed") if dist.get_rank() == 1 else (2, "scheduled")

    def look() -> dict[str, Any] | None:
        record = flight_record(WaitClock())
        last = last_of_test(record)
        return record if (last["seq"], last["state"]) == awaited else None

    record = wait_for(look)
    assert record is not None
    dist.barrier()  # of another group: all have their records
    if dist.get_rank() == 1:
        late.start()
    late.join()
    return record


def test_a_collective_waiting_for_one_rank_is_in_the_records_of_the_others_only(ranks: Pools) -> None:
    records = ranks(3).run(recorded)
    found = [last_of_test(record) for record in records]
    assert [(each["seq"], each["state"]) for each in found] == [(2, "scheduled"), (1, "completed"), (2, "scheduled")]
    assert [each["op"] for each in found] == ["gloo:all_reduce"] * 3
    assert [record["groups"][each["group"]] for record, each in zip(records, found, strict=True)] == [[0, 1, 2]] * 3
