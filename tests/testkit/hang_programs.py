"""Small programs whose ranks hang, each in the frame of a real rank: `python -m hang_programs RUN/config.yaml`.

Which one BURST_FAULT says, as the trainer's faults do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.runs.folder import RunFolder, open_run
from engine.training.rank.process import RankStatus, leave, run_rank

TIMEOUT = timedelta(minutes=10)


def other_collective(run: RunFolder, status: RankStatus) -> None:
    """Rank 1 enters a broadcast where the others sum."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1, 2], timeout=TIMEOUT, group_desc="gradients")
    for step in range(1, 4):
        status.step, status.phase = step, "backward"
        dist.all_reduce(torch.ones(8))
        if step == 3 and dist.get_rank() == 1:
            dist.broadcast(torch.ones(8), src=0, group=group)
        else:
            dist.all_reduce(torch.ones(8), group=group)


def other_order(run: RunFolder, status: RankStatus) -> None:
    """Two ranks use two groups in two orders."""
    import torch
    import torch.distributed as dist

    first, second = (dist.new_group([0, 1], timeout=TIMEOUT, group_desc=name) for name in ("first", "second"))
    status.step, status.phase = 1, "forward"
    dist.all_reduce(torch.ones(8))
    for group in (first, second) if dist.get_rank() == 0 else (second, first):
        dist.all_reduce(torch.ones(8), group=group)


def no_message(run: RunFolder, status: RankStatus) -> None:
    """In a ring of messages rank 2 of 4 goes to sleep instead of sending."""
    import torch
    import torch.distributed as dist

    from engine.attention.transport import DistributedTransport, Parcel, make_channel_groups
    from engine.planning.methods.topology import Topology
    from engine.planning.schedule.plan import Channel

    rank, size = dist.get_rank(), dist.get_world_size()
    channel = Channel.PAYLOAD_INNER
    groups = make_channel_groups([range(size)], rank, [channel], TIMEOUT)
    transport = DistributedTransport(groups, range(size), Topology(1, size), rank)
    transport.waits = status.waits
    for step in range(1, 100):
        status.step, status.phase = step, "forward"
        if step == 5 and rank == 2:
            time.sleep(3600)
        out, into = torch.ones(4), torch.zeros(4)
        transport.post(
            [
                Parcel(2 * step, "send", channel, (rank + 1) % size, (out,)),
                Parcel(2 * step + 1, "recv", channel, (rank - 1) % size, (into,)),
            ]
        )
        transport.wait([2 * step, 2 * step + 1])


def stuck_loader(run: RunFolder, status: RankStatus) -> None:
    """Rank 1 reads its batch from a pipe that nobody fills."""
    import torch
    import torch.distributed as dist

    for step in range(1, 100):
        status.step, status.phase = step, "load batch"
        if step == 4 and dist.get_rank() == 1:
            read_batch(run.path / "batch.fifo")
        status.phase = "count labels"
        dist.all_reduce(torch.ones(1))


def read_batch(path: Path) -> bytes:
    os.mkfifo(path)
    return path.read_bytes()


PROGRAMS: dict[str, Callable[[RunFolder, RankStatus], Any]] = {
    "other_collective": other_collective,
    "other_order": other_order,
    "no_message": no_message,
    "stuck_loader": stuck_loader,
}


def train(run: RunFolder, status: RankStatus) -> None:
    status.phase = "import torch"
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=TIMEOUT)
    PROGRAMS[os.environ["BURST_FAULT"]](run, status)


if __name__ == "__main__":
    folder = open_run(sys.argv[1])
    leave(run_rank(folder, lambda status: train(folder, status)))
