"""A program that writes logs, in the place of ranks: python log_writer.py FILES LINES PER_SECOND

LINES lines into the logs of FILES ranks below BURST_RANK_LOGS, PER_SECOND of them (0: as many as go).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

BATCH_S = 0.05


def main(files: str, lines: str, per_second: str) -> None:
    folder, rate, count = Path(os.environ["BURST_RANK_LOGS"]), float(per_second), int(lines)
    handles = [(folder / f"rank{rank:04}.log").open("ab", buffering=0) for rank in range(int(files))]
    begin, written = time.monotonic(), 0
    while written < count:
        due = count if not rate else min(count, int((time.monotonic() - begin) * rate) + 1)
        due = min(due, written + 10_000)
        if due > written:
            text = b"".join(map(log_line, range(written, due)))
            for handle in handles:
                handle.write(text)
            written = due
        if rate:
            time.sleep(BATCH_S)


def log_line(number: int) -> bytes:
    """What a log is made of: 100 bytes, each line different."""
    return b"%09d the loss is %-74d ok\n" % (number, number * number)


if __name__ == "__main__":
    main(*sys.argv[1:])
