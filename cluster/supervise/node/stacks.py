"""What every rank is doing, asked of the ranks themselves: Python stacks by SIGUSR1, flight records by a file.

    nodes/<node>/stacks.json       the request {nonce}
    logs/<node>/flight.request     the nonce, which ranks look for;  rank<NNNN>.flight.json names it in the answer
    logs/<node>/rank<NNNN>.stacks  where faulthandler appends
    nodes/<node>/stacks_done.json  {nonce, ranks: {"<rank>": {pid, state, answered}}}, once all that can answer did

SIGUSR1 kills a process that does not listen. So only a rank is signalled whose .stacks file names its process, in the
line "# rank N, pid P" with the number that the rank itself knows.
"""

import contextlib
import os
import signal
import time
from typing import Any, Optional

from cluster.supervise.node.family import Rank
from cluster.supervise.node.folder import Document, NodeFiles, read_json, write_json, write_text
from cluster.supervise.node.processes import inner_pids, read_entry, send_signal

ANSWER_S = 3.0  # ranks look for the request every half second
_MAX_NONCE = 128
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
            nonce = str((read_json(self._files.stacks) or {}).get("nonce", ""))[:_MAX_NONCE]
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
    entry = read_entry(rank.pid)
    return entry.state if entry is not None and entry.start == rank.start else "gone"
