"""How the node and its ranks do, every few seconds, and what every rank is doing, when that is asked for.

    nodes/<node>/health.json       of load, memory, disk, GPUs and ranks
    nodes/<node>/stacks.json       the request {nonce}
    logs/<node>/flight.request     the nonce, which ranks look for;  rank<NNNN>.flight.json names it in the answer
    logs/<node>/rank<NNNN>.stacks  where faulthandler appends
    nodes/<node>/stacks_done.json  {nonce, ranks: {"<rank>": {pid, state, answered}}}, once all that can answer did

SIGUSR1 kills a process that does not listen. So only a rank is signalled whose .stacks file names its process, in the
line "# rank N, pid P" with the number that the rank itself knows.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import Any, Optional

from cluster.agent.folder import Document, NodeFiles, now_text, read_json, write_json, write_text
from cluster.agent.memory import meminfo_bytes, memory_limit_bytes
from cluster.agent.messages import SLOWDOWNS
from cluster.agent.processes import Entry, Helpers, Rank, inner_pids, read_entry, send_signal

INTERVAL_S = 5.0
_QUERY_S = 10.0
_STALE_S = 30.0  # what nvidia-smi said so long ago is no news
_QUERY = "index,utilization.gpu,memory.used,temperature.gpu,clocks.sm,{}"
# The driver renamed the field at 535.54.03.
_THROTTLE = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


class Health:
    """Writes health.json from threads of its own; nvidia-smi has one for itself, because it may hang for ever.

    ranks: those that live, kept up by whoever knows; a new list every time.
    """

    def __init__(self, files: NodeFiles, helpers: Helpers) -> None:
        self.ranks: list[Rank] = []
        self._files, self._gpus = files, Gpus(helpers)
        self._seen: tuple[float, Optional[list[Document]]] = (0.0, None)
        self._over = threading.Event()

    def start(self) -> None:
        """Begin."""
        for work in (self._work, self._look):
            thread = threading.Thread(target=work, name="health")
            thread.daemon = True
            thread.start()

    def close(self) -> None:
        """Write no more."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.is_set():
            begin = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # a full disk, or a line that nobody foresaw
                seen_at, gpus = self._seen
                is_fresh = begin < seen_at + _STALE_S
                document = read_health(self._files.folder, self.ranks, gpus if is_fresh else None)
                if not self._over.is_set():
                    write_json(self._files.health, document)
            self._over.wait(INTERVAL_S)

    def _look(self) -> None:
        while not self._over.is_set():
            gpus = self._gpus.read()
            self._seen = (time.monotonic(), gpus)
            if gpus is None and not self._gpus.are_there:
                return
            self._over.wait(INTERVAL_S)


def read_health(folder: str, ranks: list[Rank], gpus: Optional[list[Document]]) -> Document:
    """The content of health.json; null is what could not be seen."""
    total, available = meminfo_bytes("MemTotal"), meminfo_bytes("MemAvailable")
    return {
        "at": now_text(),
        "load1": round(os.getloadavg()[0], 2),
        "cores": len(os.sched_getaffinity(0)),
        "memory_used_bytes": None if total is None or available is None else total - available,
        "memory_limit_bytes": memory_limit_bytes(),
        "disk_free_bytes": _free_bytes(folder),
        "ranks": {str(rank.rank): _rank(rank) for rank in ranks},
        "gpus": gpus,
    }


class Gpus:
    """What nvidia-smi says of every GPU."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._throttle = list(_THROTTLE)
        self.are_there = shutil.which("nvidia-smi") is not None

    def read(self) -> Optional[list[Document]]:
        """One object per GPU; None when there is no nvidia-smi, or it does not answer."""
        if not self.are_there:
            return None
        for name in list(self._throttle):
            command = ["nvidia-smi", "--query-gpu=" + _QUERY.format(name), "--format=csv,noheader,nounits"]
            try:
                done = self._helpers.run(command, _QUERY_S)
            except (OSError, subprocess.TimeoutExpired):
                return None
            if done.returncode == 0:
                self._throttle = [name]
                return parse_gpus(done.stdout.decode("utf-8", "replace"))
        return None


def parse_gpus(text: str) -> list[Document]:
    """The rows of the query; what is no number ("[N/A]") is None."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].isdigit():
            continue
        index, utilization, used, temperature, clock = (_number(field) for field in fields[:5])
        gpus.append(
            {
                "index": index,
                "utilization": utilization,
                "memory_used_mib": used,
                "temperature_c": temperature,
                "sm_clock_mhz": clock,
                "throttle": _slowdowns(fields[5]),
            }
        )
    return gpus


def _slowdowns(mask: str) -> Optional[str]:
    active = int(mask, 16) if re.fullmatch("0x[0-9a-fA-F]{1,16}", mask) else 0
    return ", ".join(name for bit, name in SLOWDOWNS.items() if active & bit) or None


def _number(text: str) -> Optional[int]:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None


def _rank(rank: Rank) -> dict[str, Any]:
    entry = _entry(rank)
    return {
        "pid": rank.pid,
        "state": "gone" if entry is None else entry.state,
        "rss_bytes": None if entry is None else entry.resident_bytes,
        "cpu_s": None if entry is None else entry.cpu_s,
    }


def _free_bytes(folder: str) -> Optional[int]:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


ANSWER_S = 3.0  # ranks look for the request every half second
_MAX_STACKS_BYTES = 4 << 20
_CANNOT_ANSWER = ("T", "t", "D", "gone")


class Stacks:
    """The requests of one run; `turn` is called often and never waits."""

    def __init__(self, files: NodeFiles) -> None:
        self._files = files
        self._stamp: Any = None
        self._nonce = ""
        self._deadline = 0.0
        self._asked: dict[int, tuple[Rank, Optional[int]]] = {}  # and the length of its .stacks file then

    def turn(self, stamp: Any, ranks: list[Rank]) -> None:
        """Begin or end a request. `stamp`: of stacks.json, as of now; `ranks`: those that are to be asked."""
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            nonce = str((read_json(self._files.stacks) or {}).get("nonce", ""))
            if nonce and nonce != self._nonce:
                self._ask(nonce, ranks)
        elif self._asked and (time.monotonic() > self._deadline or self._is_answered()):
            self._answer()

    def _ask(self, nonce: str, ranks: list[Rank]) -> None:
        self._nonce, self._deadline = nonce, time.monotonic() + ANSWER_S
        self._asked = {}
        with contextlib.suppress(OSError):
            write_text(self._files.flight_request, nonce + "\n")
        for rank in ranks:
            listens = self._listens(rank)
            self._asked[rank.rank] = (rank, self._length(rank) if listens else None)
            if listens:
                send_signal(rank.pid, rank.start, signal.SIGUSR1)
        if not ranks:
            self._answer()

    def _is_answered(self) -> bool:
        return all(
            _state(rank) in _CANNOT_ANSWER or (self._has_stacks(rank, before) and self._has_flight(rank))
            for rank, before in self._asked.values()
        )

    def _answer(self) -> None:
        ranks = {
            str(number): {"pid": rank.pid, "state": _state(rank), "answered": self._has_stacks(rank, before)}
            for number, (rank, before) in sorted(self._asked.items())
        }
        document: Document = {"nonce": self._nonce, "ranks": ranks}
        with contextlib.suppress(OSError):  # a full disk: the next turn tries again, until then nobody is told
            write_json(self._files.stacks_done, document)
            self._asked = {}

    def _has_stacks(self, rank: Rank, before: Optional[int]) -> bool:
        return before is not None and self._length(rank) > before

    def _has_flight(self, rank: Rank) -> bool:
        found = read_json(self._path(rank, "flight.json"))
        return found is not None and found.get("nonce") == self._nonce

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


def _state(rank: Rank) -> str:
    entry = _entry(rank)
    return "gone" if entry is None else entry.state


def _entry(rank: Rank) -> Optional[Entry]:
    """What is known of its process now; None when its number is nobody's or another's."""
    entry = read_entry(rank.pid)
    return entry if entry is not None and entry.start == rank.start else None
