"""A Gated DeltaNet layer over ranks: states passed between spans against an all-to-all over heads.

    python -m benchmarks.rig bench linear --seq-len 16384          2 nodes x 4 ranks, one rail of 200 Mbit/s per rank
    python -m benchmarks.bench_linear --ranks 4

Both use the same chunk rule, inputs and messages, take turns, and are timed forward and backward on the slowest rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import at_least_1
from benchmarks.linear.rank import HEADS, STATES, LinearCell
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import RankSetup, Rounds
from engine.config.errors import BurstError


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 ok, 1 a rank failed, 2 usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=at_least_1, default=16384)
    parser.add_argument("--ranks", type=at_least_1, default=8)
    parser.add_argument("--nodes", type=at_least_1, default=1)
    parser.add_argument("--heads", type=at_least_1, default=8, help="a multiple of the ranks, for the all-to-all")
    parser.add_argument("--key-dim", type=at_least_1, default=64)
    parser.add_argument("--value-dim", type=at_least_1, default=64)
    parser.add_argument("--layout", default="contiguous", help="of the states' way")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of q, k and v")
    parser.add_argument("--repeats", type=at_least_1, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rank-command", default="", help="as for burst bench")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    args = parser.parse_args(argv)
    if args.heads % args.ranks or args.seq_len % args.ranks:
        parser.error(f"--heads {args.heads} and --seq-len {args.seq_len}: expected multiples of --ranks {args.ranks}")
    try:
        setup, rounds = RankSetup(args.ranks, args.nodes), Rounds(args.repeats, args.warmup)
        shape = (args.heads, args.key_dim, args.value_dim, args.layout, args.dtype)
        cell = LinearCell(setup, args.seq_len, *shape, rounds)
        result = measure_cell(cell, RankProgram("benchmarks.linear.rank", tuple(shlex.split(args.rank_command))))
    except BurstError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    result["environment"]["command"] = shlex.join(sys.orig_argv[1:])
    document = {"benchmark": "linear", "settings": dataclasses.asdict(cell), **result}
    print_table(document)
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written: {args.output}")
    return 0


def print_table(document: dict) -> None:
    """A line for each way, and how much faster the states are."""
    medians = {}
    for row in document["results"]:
        total = row["total"]
        medians[row["variant"]] = total["median_s"]
        print(
            f"{row['variant']:>22}  {total['median_s']:.3f} s ({total['min_s']:.3f}..{total['max_s']:.3f})  "
            f"{row['intra_bytes'] / 2**20:7.2f} MiB inside a node, {row['inter_bytes'] / 2**20:7.2f} MiB between"
        )
    print(f"states are {medians[HEADS] / medians[STATES]:.2f}x as fast")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
