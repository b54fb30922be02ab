"""faulthandler's output, read back: several dumps in a file, threads with names, texts that are cut anywhere."""

from __future__ import annotations

import faulthandler
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.hang_blame import Frame, main_thread, parse_stacks, waits_in

HANGS = Path(__file__).parent / "hangs"
DUMP = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/b/engine/parallel/collectives.py", line 14 in sum_over_ranks
  File "/b/engine/train.py", line 41 in <module>
"""
STACKS = json.loads((HANGS / "sleep_in_forward.json").read_text(encoding="utf-8"))[0]["stacks"]


OTHER = DUMP.replace("0x00007f000000000", "0x00007f111111111")
NAMED = DUMP.replace("0001 (most", "0001 [rank-report] (most").replace("0002 (most", "0002 [MainThread] (most")


@pytest.mark.parametrize(
    "earlier", ["", DUMP.replace("line 14 in sum", "line 99 in sum"), f"# rank 0, pid 7\n{OTHER}# rank 0, pid 8\n"]
)
@pytest.mark.parametrize("dump", [DUMP, NAMED])
def test_the_last_dump_becomes_threads_and_frames(earlier: str, dump: str) -> None:
    threads = parse_stacks(earlier + dump)
    assert [(thread.is_current, len(thread.frames)) for thread in threads] == [(False, 2), (True, 4)]
    assert threads[1].frames[2] == Frame("/b/engine/parallel/collectives.py", "14", "sum_over_ranks")
    assert str(threads[1].frames[0]) == "all_reduce (torch/distributed/distributed_c10d.py:3252)"
    assert waits_in(threads) == "all_reduce"


def test_the_main_thread_is_the_one_that_began_in_a_module_whoever_took_the_signal() -> None:
    other = DUMP.replace("Current thread", "Thread").replace("Thread 0x00007f0000000001", "Current thread 0x01")
    main = main_thread(parse_stacks(other))
    assert main is not None
    assert main.frames[-1].function == "<module>"


def test_a_call_inside_a_collective_of_our_own_is_no_wait() -> None:
    text = DUMP.replace(
        'torch/distributed/distributed_c10d.py", line 3252 in all_reduce', 'numpy/core.py", line 1 in f'
    )
    assert waits_in(parse_stacks(text.replace("torch/distributed/c10d_logger.py", "numpy/x.py"))) is None


def test_backward_on_a_gpu_waits_where_its_own_thread_does() -> None:
    text = """\
Thread 0x01 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 10 in reduce_scatter_single
  File "/x/torch/autograd/function.py", line 20 in apply

Current thread 0x02 (most recent call first):
  File "/x/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/b/engine/train.py", line 41 in <module>
"""
    assert waits_in(parse_stacks(text)) == "reduce_scatter_single"


def test_what_this_interpreter_writes_is_read(tmp_path: Path) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="a [name] (with) marks")
    thread.start()
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        faulthandler.dump_traceback(file, all_threads=True)
    release.set()
    thread.join()
    threads = parse_stacks((tmp_path / "stacks").read_text())
    main = main_thread(threads)
    assert main is not None
    assert main.is_current
    assert any(frame.function == "test_what_this_interpreter_writes_is_read" for frame in main.frames)
    assert sum(frame.function == "wait" for thread in threads for frame in thread.frames) >= 1


@given(st.integers(0, len(STACKS)), st.integers(0, len(STACKS)))
def test_a_text_cut_anywhere_is_read_as_far_as_it_goes(first: int, last: int) -> None:
    for thread in parse_stacks(STACKS[first:last]):
        assert all(frame.file for frame in thread.frames)


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    parse_stacks(text + DUMP)
    waits_in(parse_stacks(DUMP + text))
