"""How the node and its ranks do, every few seconds, in nodes/<node>/health.json."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from typing import Any, Optional

from cluster.supervise.node.container import Helpers
from cluster.supervise.node.control_group import meminfo_bytes, memory_limit_bytes
from cluster.supervise.node.family import Rank
from cluster.supervise.node.folder import Document, NodeFiles, now_text, write_json
from cluster.supervise.node.processes import cpu_seconds, read_entry, resident_bytes

INTERVAL_S = 5.0
_QUERY_S = 10.0
_STALE_S = 30.0  # what nvidia-smi said so long ago is no news
_MAX_GPUS = 64
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
        "load1": _load(),
        "cores": _cores(),
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
    for line in text.splitlines()[:_MAX_GPUS]:
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
                "throttle": fields[5][:40] if fields[5].startswith("0x") else None,
            }
        )
    return gpus


def _number(text: str) -> Optional[int]:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None


def _rank(rank: Rank) -> dict[str, Any]:
    entry = read_entry(rank.pid)
    is_same = entry is not None and entry.start == rank.start
    return {
        "pid": rank.pid,
        "state": entry.state if entry is not None and is_same else "gone",
        "rss_bytes": resident_bytes(rank.pid) if is_same else None,
        "cpu_s": cpu_seconds(rank.pid) if is_same else None,
    }


def _load() -> Optional[float]:
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _free_bytes(folder: str) -> Optional[int]:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
