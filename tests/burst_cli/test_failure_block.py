"""The line about memory, and the place, in the block that a failed run gets."""

from __future__ import annotations

from pathlib import Path

from burst_cli.failure_block import failure_block, memory_line
from cluster.failure import Failure
from engine.runs import RunFolder

GIB = 2**30
RUN = RunFolder(Path("/runs/tiny/20260101-000000-abcdef"))
MEMORY = {
    "where": "device",
    "device": "cuda:1",
    "peak_bytes": 75 * GIB,
    "peak_source": "CUDA caching allocator, peak of this step",
    "asked_bytes": 6 * GIB,
    "capacity_bytes": 80 * GIB,
    "predicted_peak_bytes": 78 * GIB,
}


def test_line_has_peak_capacity_request_and_prediction() -> None:
    assert memory_line(MEMORY) == (
        "cuda:1: peak 75 GiB of 80 GiB (CUDA caching allocator, peak of this step), 6 GiB more asked for, "
        "predicted peak 78 GiB"
    )


def test_what_is_not_known_is_left_out() -> None:
    unknown = dict.fromkeys(("asked_bytes", "capacity_bytes", "predicted_peak_bytes"))
    line = memory_line({**MEMORY, **unknown, "peak_bytes": None})
    assert line.startswith("cuda:1: peak ")
    assert not any(words in line for words in ("of 80", "asked", "predicted", "None"))


def test_block_has_place_memory_and_the_recorded_advice() -> None:
    failure = Failure("oom", "OutOfMemoryError", "full", 3, "node1", 7, "backward", memory=MEMORY, advice="Use less.")
    text = failure_block(RUN, failure).plain
    assert text.startswith("OOM tiny/20260101-000000-abcdef: rank 3 on node1, step 7, phase backward\n")
    assert "  memory: cuda:1: peak 75 GiB" in text
    assert text.endswith("what to do: Use less.")


def test_rank_that_was_killed_is_placed_after_the_last_step_that_is_known() -> None:
    failure = Failure("oom", "OutOfMemory", "full", 3, "node1", 7, "train", signal="SIGKILL")
    assert "after step 7" in failure_block(RUN, failure).plain
