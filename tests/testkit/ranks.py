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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
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
    "engine.predict.replay",
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


class _Rank:
    """A worker as its pool sees it: the process, the pipe to it, and the log that it writes."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self._name, self._log = rank, f"rank {rank} of {world_size}", folder / f"rank{rank}.log"
        self._log.touch()
        self._known_bytes = 0  # of the log, before this call
        context = fork_server()
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_worker, args=(rank, world_size, there, str(self._log)), daemon=True)
        self.process.start()
        there.close()

    def ask(self, value: Any) -> None:
        self._known_bytes = self.log_bytes
        _send(self.pipe, value)

    @property
    def log_bytes(self) -> int:
        return self._log.stat().st_size

    def fate(self, reply: _Reply | None, timeout_s: float) -> tuple[int, int, str]:
        """What became of it, to be sorted: ranks that raised come first, then those that died, then those that hung."""
        if reply is not None:
            order, what = 0, f"raised\n{reply.error}"
        elif self.process.exitcode is not None:
            order, what = 1, f"died with exit code {self.process.exitcode}"
        else:
            order, what = 2, f"had not answered (limit {timeout_s:g} s, {GRACE_S:g} s after another rank's failure)"
        output = self._log.read_text(errors="replace")[self._known_bytes :][-TAIL_CHARS:]
        return order, self.rank, f"{self._name} {what}" + (f"\noutput:\n{output}" if output.strip() else "")


class RankPool:
    """`world_size` processes in one gloo group on this machine; starts at the first `run`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Results of `function(*args, **kwargs)` in order of rank; every rank calls it once, at the same time."""
        call = _Call(function.__module__, function.__qualname__, args, kwargs, list(sys.path))
        try:
            if not self._ranks or not all(rank.process.is_alive() for rank in self._ranks):
                self.close()
                self._start()
            for rank in self._ranks:
                rank.ask(call)
            replies = _collect(self._ranks, call.name, timeout_s)
        except BaseException:  # an interrupt or the test's own timeout: late replies must not meet the next call
            self.close()
            raise
        if any(reply.threads > MAX_THREADS for reply in replies):
            self.close()
        return [reply.value for reply in replies]

    def close(self) -> None:
        """Kills every worker at once; the pool may be used again and then starts anew."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks, self._folder = [], None

    def _start(self) -> None:
        self._folder, what = Path(tempfile.mkdtemp(prefix="ranks-")), "start of the pool"
        for rank in range(self.world_size):
            self._ranks.append(_Rank(rank, self.world_size, self._folder))
        # Rank 0 opens the store on a free port and says which; so no port can be taken in between.
        (store,) = _collect(self._ranks[:1], what, START_TIMEOUT_S)
        for rank in self._ranks[1:]:
            rank.ask(store.value)
        _collect(self._ranks, what, START_TIMEOUT_S)


def _collect(ranks: Sequence[_Rank], what: str, timeout_s: float) -> list[_Reply]:
    """The reply of every rank. Raises RankFailedError when one reports an error, dies or does not answer in time."""
    replies: dict[_Rank, _Reply] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + timeout_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            with contextlib.suppress(EOFError, ConnectionResetError):
                replies[rank] = _receive(ready)
            if rank not in replies or replies[rank].error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    bad = [rank for rank in ranks if rank not in replies or replies[rank].error is not None]
    if bad:
        _dump_stacks([rank for rank in bad if rank not in replies])
        fates = sorted(rank.fate(replies.get(rank), timeout_s) for rank in bad)
        raise RankFailedError(fates[0][1], f"{what}: " + "\n--- ".join(text for _, _, text in fates))
    return [replies[rank] for rank in ranks]


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    """Asks ranks that hang for their Python stacks, which faulthandler writes into their logs.

    Returns once each has written, or has died: a rank whose pipe is closed may take a moment to be known as dead.
    """
    before = {rank: rank.log_bytes for rank in ranks}
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it died just now
                os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    for rank in ranks:
        while rank.process.is_alive() and rank.log_bytes == before[rank] and time.monotonic() < deadline:
            rank.process.join(0.05)
    for rank in ranks:
        rank.process.join(0.3)  # to the last line


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
        reply = _guarded(_execute, call)
        _send(pipe, reply)
        gc.collect()


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
