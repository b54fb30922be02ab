"""Pools of worker processes that run a test's function as ranks of a gloo process group.

Importing torch costs seconds, so workers are forked from one server process that has imported it and has no threads;
they serve many calls: `Pools(...)` keeps one `RankPool` per world size and `pool.run(function, *args)` calls `function`
on every rank at once. The function must be importable (module level); arguments and results travel through pipes. A
rank that raises, dies or hangs ends the call with `RankFailedError`, which carries that rank's traceback and output;
the pool is then killed and the next call starts a fresh one. So is a pool whose workers hold many threads: process
groups of device meshes cannot be ended, and hundreds of them make every call several times slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

# Ends of waiting for what hangs, on a machine that others may slow down tenfold: no test is meant to come near them.
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 300.0
GROUP_TIMEOUT_S = 120.0
STACKS_TIMEOUT_S = 30.0
GRACE_S = 1.0  # how long the other ranks may still report after one failed
MAX_THREADS = 45  # of one worker; a gloo group holds about three, one of which wakes up a hundred times a second
# Whatever takes long to import; torch imports its compiler when a run with FSDP takes its first step.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "engine.training.trainer",
    "engine.planning.time.replay",
    "pytest",
)
MAX_WORKERS = 7  # of all pools together; the pool used least recently is closed first
TAIL_CHARS = 3000


class RankFailedError(AssertionError):
    """A rank raised, died or hung; `rank` is the first such rank, the text has its traceback and its output."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


@dataclass(frozen=True)
class _Call:
    """One function to run: named, not pickled, so that the worker imports the very module of the test."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sys_path: list[str]
    test: str  # as pytest names it in PYTEST_CURRENT_TEST


@dataclass(frozen=True)
class _Reply:
    """What one rank reports: a value, or the traceback of its error."""

    value: Any = None
    error: str | None = None
    threads: int = 0  # of the rank, after the call


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())  # noqa: S301 - bytes of our own child or parent, never of a file


def _send(pipe: Connection, value: Any) -> None:
    # Plain pickle instead of Connection.send: torch would register shared memory whose owner may be killed.
    pipe.send_bytes(pickle.dumps(value))


class RankPool:
    """`world_size` processes in one gloo group on this machine; starts at the first `run`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Results of `function(*args, **kwargs)` in order of rank; every rank calls it once, at the same time."""
        if not self._alive():
            self.close()
            self._start()
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        call = _Call(function.__module__, function.__qualname__, args, kwargs, list(sys.path), test)
        offsets = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        try:
            for pipe in self._pipes:
                _send(pipe, call)
            replies = self._collect(timeout_s)
        except BaseException:  # an interrupt or the test's own timeout: late replies must not meet the next call
            self.close()
            raise
        if all(reply is not None and reply.error is None for reply in replies):
            if any(reply is not None and reply.threads > MAX_THREADS for reply in replies):
                self.close()
            return [reply.value for reply in replies if reply is not None]
        failure = self._failure(call.name, replies, offsets, timeout_s)
        self.close()
        raise failure

    def close(self) -> None:
        """Kills every worker at once; the pool may be used again and then starts anew."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{rank}.log"

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = fork_server()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            self._log(rank).touch()
            process = context.Process(
                target=_worker, args=(rank, self.world_size, there, str(self._log(rank))), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        # Rank 0 opens the store on a free port and says which; so no port can be taken in between.
        replies = self._collect(START_TIMEOUT_S, ranks=[0])
        if replies[0] is not None and replies[0].error is None:
            for pipe in self._pipes[1:]:
                _send(pipe, replies[0].value)
            replies = self._collect(START_TIMEOUT_S)
        if any(reply is None or reply.error is not None for reply in replies):
            failure = self._failure("start of the pool", replies, [0] * self.world_size, START_TIMEOUT_S)
            self.close()
            raise failure

    def _collect(self, timeout_s: float, ranks: Sequence[int] | None = None) -> list[_Reply | None]:
        """One reply per rank; None for a rank that died or did not answer in time."""
        replies: list[_Reply | None] = [None] * self.world_size
        waiting = {self._pipes[rank]: rank for rank in (range(self.world_size) if ranks is None else ranks)}
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    replies[rank] = _receive(ready)
                reply = replies[rank]
                if reply is None or reply.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _failure(
        self, name: str, replies: list[_Reply | None], offsets: list[int], timeout_s: float
    ) -> RankFailedError:
        """The failure to raise: ranks that raised come first, then those that died, then those that hung."""
        self._dump_stacks([rank for rank, reply in enumerate(replies) if reply is None])
        blocks: list[tuple[int, int, str]] = []
        for rank, reply in enumerate(replies):
            if reply is not None and reply.error is None:
                continue
            process = self._processes[rank]
            if reply is not None:
                order, what = 0, f"raised\n{reply.error}"
            elif process.exitcode is not None:
                order, what = 1, f"died with exit code {process.exitcode}"
            else:
                order, what = 2, f"had not answered (limit {timeout_s:g} s, {GRACE_S:g} s after another rank's failure)"
            output = self._log(rank).read_text(errors="replace")[offsets[rank] :][-TAIL_CHARS:]
            text = f"rank {rank} of {self.world_size} {what}" + (f"\noutput:\n{output}" if output.strip() else "")
            blocks.append((order, rank, text))
        blocks.sort()
        return RankFailedError(blocks[0][1], f"{name}: " + "\n--- ".join(text for _, _, text in blocks))

    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        """Asks ranks that hang for their Python stacks, which faulthandler writes into their logs.

        Returns once each has written, or has died: a rank whose pipe is closed may take a moment to be known as dead.
        """
        before = {rank: self._log(rank).stat().st_size for rank in ranks}
        for rank in ranks:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it died just now
                    os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        for rank, size in before.items():
            process = self._processes[rank]
            while process.is_alive() and self._log(rank).stat().st_size == size and time.monotonic() < deadline:
                process.join(0.05)
        for rank in ranks:
            self._processes[rank].join(0.3)  # to the last line


class Pools:
    """`pools(world_size)` is the pool of that size; idle ones are kept up to MAX_WORKERS processes in all."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.pop(world_size, None) or RankPool(world_size)
        while self._pools and world_size + sum(self._pools) > MAX_WORKERS:
            self._pools.pop(next(iter(self._pools))).close()
        self._pools[world_size] = pool  # last in the dict = used last
        return pool

    def close(self) -> None:
        """Ends every worker of every pool."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def fork_server() -> ForkServerContext:
    """Starts workers from a process that imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _worker(rank: int, world_size: int, pipe: Connection, log: str) -> None:
    """Life of one rank: joins the group, then answers calls until the parent closes the pipe."""
    _redirect_output(log)
    tempfile.tempdir = None  # read TMPDIR anew: what a killed rank leaves goes with the pool's folder
    os.environ.update(
        TMPDIR=str(Path(log).parent),
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    _send(pipe, _guarded(_join_group, rank, world_size, pipe))
    while True:
        try:
            call = _receive(pipe)
        except (EOFError, ConnectionResetError, KeyboardInterrupt):
            os._exit(0)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # again: the frame of a rank takes the signal
        with _lines_belong_to(call.test):
            reply = _guarded(_execute, call)
        _send(pipe, reply)
        gc.collect()


@contextlib.contextmanager
def _lines_belong_to(test: str) -> Iterator[None]:
    """Where lines are recorded (`make mutants`): for this test, and at once, as workers end by being killed."""
    coverage = sys.modules.get("coverage")
    recorder = coverage and coverage.Coverage.current()
    if recorder:
        recorder.switch_context(test)
    yield
    if recorder:
        recorder.save()


def _guarded(function: Callable[..., Any], *args: Any) -> _Reply:
    try:
        reply = _Reply(value=function(*args))
        pickle.dumps(reply)  # a result that cannot travel is an error of this rank, with its traceback
    except BaseException as error:  # what it is comes first: whoever shows the text may cut its end
        summary = "".join(traceback.format_exception_only(error))
        return _Reply(error=f"{summary}{traceback.format_exc()}")
    return dataclasses.replace(reply, threads=len(list(Path("/proc/self/task").iterdir())))


def _redirect_output(log: str) -> None:
    """Sends stdout and stderr (also of C++ code) to `log`; SIGUSR1 writes all Python stacks there."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then kills this process
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _join_group(rank: int, world_size: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False)
        _send(pipe, _Reply(value=store.port))
    else:
        store = TCPStore("127.0.0.1", _receive(pipe), world_size, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _execute(call: _Call) -> Any:
    import torch

    sys.path[:] = call.sys_path
    function: Any = importlib.import_module(call.module)
    for part in call.name.split("."):
        function = getattr(function, part)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # GPU machines come with torch versions of their own, whose warnings are not this code's.
        warnings.simplefilter("default" if torch.cuda.is_available() else "error")
        result = function(*call.args, **call.kwargs)
    _destroy_subgroups()  # not after an error: messages in flight may hold it up, and the pool is killed anyway
    return result


def _destroy_subgroups() -> None:
    """Ends the process groups that a call made, each of which holds threads and sockets.

    Those of device meshes stay: DTensor's caches may hand an equal, older mesh to a later call.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)
