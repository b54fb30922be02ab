"""How the node and its ranks do, every few seconds, and what every rank is doing, when that is asked for.

    nodes/<node>/health.json       of load, memory, disk, GPUs and ranks
    nodes/<node>/stacks.json       the request {nonce}
    logs/<node>/flight.request     the nonce, which ranks look for
    logs/<node>/rank<NNNN>.stacks  where a rank appends its stacks;  rank<NNNN>.flight.json names the nonce
    nodes/<node>/stacks_done.json  {nonce, ranks: {"<rank>": {pid, state, answered}}}, once all that can answer did

A rank that writes no stacks within SIGNAL_S is stuck in native code that holds its interpreter, and is sent SIGUSR1:
its signal handler needs no interpreter. No other rank is, for the handler may crash a process whose threads run.
SIGUSR1 kills a process that does not listen. So only a rank is signalled whose .stacks file names its process, in the
line "# rank N, pid P" with the number that the rank itself knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

from cluster.agent.folder import (
    LOG_BYTES,
    Document,
    NodeFiles,
    now_text,
    read_json,
    rotate_logs,
    write_json,
    write_text,
)
from cluster.agent.messages import SLOWDOWNS
from cluster.agent.processes import Helpers, Rank, inner_pids, send_signal
from engine.runs.process import meminfo_bytes, usable_bytes

INTERVAL_S = 5.0
_QUERY_S = 10.0
_STALE_S = 30.0  # what nvidia-smi said so long ago is no news
_FIGURES = {
    "index": "index",
    "utilization": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "temperature_c": "temperature.gpu",
    "sm_clock_mhz": "clocks.sm",
}
# The driver renamed the field at 535.54.03.
THROTTLES = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


class Health:
    """Writes health.json and rotates logs from threads of its own; nvidia-smi has one, because it may hang for ever.

    ranks: those that live, kept up by whoever knows; a new list every time. log_bytes: see `rotate_logs`.
    """

    def __init__(self, files: NodeFiles, helpers: Helpers, log_bytes: int = LOG_BYTES) -> None:
        self.ranks: list[Rank] = []
        self._log_bytes = log_bytes
        self._files, self._helpers = files, helpers
        self._seen: tuple[float, list[Document] | None] = (0.0, None)
        self._over = threading.Event()

    def start(self) -> None:
        """Begin."""
        for work in (self._work, self._look):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Write no more."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError, ValueError):  # a full disk, or a line that nobody foresaw
                seen_at, gpus = self._seen
                is_fresh = time.monotonic() < seen_at + _STALE_S
                document = read_health(self._files.folder, self.ranks, gpus if is_fresh else None)
                if not self._over.is_set():
                    write_json(self._files.health, document)
            with contextlib.suppress(OSError):
                rotate_logs(self._files.log_dir, self._log_bytes)
            self._over.wait(INTERVAL_S)

    def _look(self) -> None:
        throttles = list(THROTTLES)
        while shutil.which("nvidia-smi") is not None and not self._over.is_set():
            self._seen = (time.monotonic(), read_gpus(self._helpers, throttles))
            self._over.wait(INTERVAL_S)


def read_health(folder: str, ranks: list[Rank], gpus: list[Document] | None) -> Document:
    """The content of health.json; null is what could not be seen."""
    total, available = meminfo_bytes("MemTotal"), meminfo_bytes("MemAvailable")
    free_bytes = None
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(folder).free
    return {
        "at": now_text(),
        "load1": round(os.getloadavg()[0], 2),
        "cores": len(os.sched_getaffinity(0)),
        "memory_used_bytes": None if total is None or available is None else total - available,
        "memory_limit_bytes": usable_bytes(),
        "disk_free_bytes": free_bytes,
        "ranks": {str(rank.rank): _rank(rank) for rank in ranks},
        "gpus": gpus,
    }


def _rank(rank: Rank) -> Document:
    entry = rank.entry()
    if entry is None:
        return {"pid": rank.pid, "state": "gone", "rss_bytes": None, "cpu_s": None}
    return {"pid": rank.pid, "state": entry.state, "rss_bytes": entry.resident_bytes, "cpu_s": entry.cpu_s}


def read_gpus(helpers: Helpers, throttles: list[str]) -> list[Document] | None:
    """One object per GPU, as nvidia-smi says; None when it is not there or does not answer.

    throttles: names of a field, of which those that the driver does not know are taken out.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        for name in list(throttles):
            fields = ",".join([*_FIGURES.values(), name])
            done = helpers.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], _QUERY_S)
            if done.returncode == 0:
                throttles[:] = [name]
                return parse_gpus(done.stdout.decode("utf-8", "replace"))
    return None


def parse_gpus(text: str) -> list[Document]:
    """The rows of the query; what is no number ("[N/A]") is None."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [
        {**{name: _number(field) for name, field in zip(_FIGURES, row)}, "throttle": _slowdowns(row[-1])}
        for row in rows
        if len(row) == len(_FIGURES) + 1 and row[0].isdigit()
    ]


def _slowdowns(mask: str) -> str | None:
    active = int(mask, 16) if re.fullmatch("0x[0-9a-fA-F]{1,16}", mask) else 0
    return ", ".join(name for bit, name in SLOWDOWNS.items() if active & bit) or None


def _number(text: str) -> int | None:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None


SIGNAL_S = 1.5  # ranks look for the request five times a second
ANSWER_S = 3.0
_MAX_STACKS_BYTES = 4 << 20
_CANNOT_ANSWER = ("T", "t", "D", "gone")


class Stacks:
    """The requests of one run; `turn` is called often and never waits."""

    def __init__(self, files: NodeFiles) -> None:
        self._files = files
        self._stamp: Any = None
        self._nonce, self._requested_at = "", 0.0
        self._is_signalled = False
        self._asked: dict[Rank, int | None] = {}  # the length of its .stacks file then; None: it does not listen

    def turn(self, stamp: Any, ranks: list[Rank]) -> None:
        """Begin or end a request. `stamp`: of stacks.json, as of now; `ranks`: those that are to be asked."""
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            nonce = str((read_json(self._files.stacks) or {}).get("nonce", ""))
            if nonce and nonce != self._nonce:
                self._ask(nonce, ranks)
        elif self._asked:
            waited_s = time.monotonic() - self._requested_at
            if waited_s > SIGNAL_S and not self._is_signalled:
                self._signal()
            if waited_s > ANSWER_S or self._is_answered():
                self._answer()

    def _ask(self, nonce: str, ranks: list[Rank]) -> None:
        self._nonce, self._requested_at, self._is_signalled = nonce, time.monotonic(), False
        # Measured before the request is there: ranks may answer immediately.
        lengths = {rank: self._length(rank) if self._listens(rank) else None for rank in ranks}
        with contextlib.suppress(OSError):
            write_text(self._files.flight_request, nonce + "\n")
        self._asked = lengths
        if not ranks:
            self._answer()

    def _signal(self) -> None:
        """Have the ranks that listen but have not answered dump their stacks from their signal handler."""
        self._is_signalled = True
        for rank, length in self._asked.items():
            # A stopped rank would dump when it continues, long after this request.
            if length is not None and rank.state not in ("T", "t") and not self._has_stacks(rank):
                send_signal(rank.pid, rank.start, signal.SIGUSR1)

    def _is_answered(self) -> bool:
        return all(
            rank.state in _CANNOT_ANSWER or (self._has_stacks(rank) and self._has_flight(rank)) for rank in self._asked
        )

    def _answer(self) -> None:
        ranks = {
            str(rank.rank): {"pid": rank.pid, "state": rank.state, "answered": self._has_stacks(rank)}
            for rank in self._asked
        }
        with contextlib.suppress(OSError):  # a full disk: the next turn tries again, until then nobody is told
            write_json(self._files.stacks_done, {"nonce": self._nonce, "ranks": ranks})
            self._asked = {}

    def _has_stacks(self, rank: Rank) -> bool:
        before = self._asked[rank]
        return before is not None and self._length(rank) > before

    def _has_flight(self, rank: Rank) -> bool:
        return (read_json(self._path(rank, "flight.json")) or {}).get("nonce") == self._nonce

    def _listens(self, rank: Rank) -> bool:
        try:
            with open(self._path(rank, "stacks"), "rb") as file:
                lines = file.read(_MAX_STACKS_BYTES).splitlines()
        except OSError:
            return False
        return any(f"# rank {rank.rank}, pid {pid}".encode("ascii") in lines for pid in inner_pids(rank.pid))

    def _length(self, rank: Rank) -> int:
        try:
            return os.stat(self._path(rank, "stacks")).st_size
        except OSError:
            return 0

    def _path(self, rank: Rank, suffix: str) -> str:
        return os.path.join(self._files.log_dir, f"rank{rank.rank:04d}.{suffix}")
