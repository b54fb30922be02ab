"""How long training stands still for a checkpoint: saved at once, in the background, and by torch as it is.

The same sharded state is saved in turn by the same processes, on the CPU; seconds are of the slowest rank. Run it on a
quiet machine, with --target on the disk that counts:

    python -m benchmarks.bench_checkpoint --output benchmarks/results/checkpoint_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import at_least_1
from benchmarks.checkpoint.rank import CheckpointCell
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import RankSetup, Rounds
from engine.config.errors import BurstError

LARGEST_STALL = 0.1  # of a synchronous save


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 ok, 1 a rank failed, 2 usage. A stall that is too long is printed, and is no failure."""
    args = parse_arguments(argv)
    try:
        document = {"command": shlex.join(["python", "-m", "benchmarks.bench_checkpoint", *argv]), **run(args)}
    except BurstError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    show(document)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written: {args.output}")
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=at_least_1, default=400, help="size of the state over all ranks")
    parser.add_argument("--ranks", type=at_least_1, default=2)
    parser.add_argument("--repeats", type=at_least_1, default=5, help="saves of each kind, but one that does not count")
    parser.add_argument("--target", type=Path, default=None, help="a folder to save under; default: a temporary one")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of the started ranks wrote."""
    with tempfile.TemporaryDirectory(prefix="burst-bench-", dir=args.target) as target:
        cell = CheckpointCell(RankSetup(args.ranks), Rounds(args.repeats), args.mib, target)
        return measure_cell(cell, RankProgram("benchmarks.checkpoint.rank"))


def stall_share(document: dict[str, Any]) -> float:
    """Stall of a save in the background over that of a synchronous one, medians."""
    saves = document["saves"]
    return float(saves["background"]["stall"]["median_s"] / saves["synchronous"]["stall"]["median_s"])


def show(document: dict[str, Any]) -> None:
    """A table, and whether the promise held."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("save", "training stands (s)", "fastest", "slowest", "on the disk after (s)", "MiB/s"):
        table.add_column(title, justify="left" if title == "save" else "right")
    for name, timings in document["saves"].items():
        stall, whole = timings["stall"], timings["whole"]
        speed = document["bytes"] / 2**20 / whole["median_s"]
        figures = (stall["median_s"], stall["min_s"], stall["max_s"], whole["median_s"])
        table.add_row(name, *(f"{figure:.3f}" for figure in figures), f"{speed:,.0f}")
    console = Console()
    console.print(f"{document['bytes'] / 2**20:,.0f} MiB over {document['ranks']} ranks")
    console.print(table)
    share = stall_share(document)
    verdict = "held" if share <= LARGEST_STALL else "MISSED"
    console.print(f"{verdict}: a save in the background stalls training for {share:.1%} of a synchronous one (<= 10%)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
