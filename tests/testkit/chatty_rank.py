"""A command that writes numbered lines: `python -S chatty_rank.py FILES LINES PER_SECOND [END_S]`.

It writes into BURST_RANK_LOGS/rank<NNNN>.log, LINES lines into each of FILES files, PER_SECOND of them (0: as many as
go), whole lines with single writes, and then lives on for END_S seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

BATCH_S = 0.05


def line(number: int) -> bytes:
    """What a log is made of: 100 bytes, each line different."""
    return b"%09d the loss is %-74d ok\n" % (number, number * number)


def main(files: int, lines: int, per_second: float, end_s: float) -> None:
    folder = Path(os.environ["BURST_RANK_LOGS"])
    handles = [(folder / f"rank{rank:04}.log").open("ab", buffering=0) for rank in range(files)]
    begin, written = time.monotonic(), 0
    while written < lines:
        due = lines if not per_second else min(lines, int((time.monotonic() - begin) * per_second) + 1)
        due = min(due, written + 10_000)
        if due > written:
            text = b"".join(map(line, range(written, due)))
            for handle in handles:
                handle.write(text)
            written = due
        if per_second:
            time.sleep(BATCH_S)
    time.sleep(end_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
