"""Attention of this project against ring-flash-attn and yunchang: same ranks, inputs, kernel and rounds; causal.

    pip install --no-deps --target .cache/peers -r benchmarks/peers/requirements.txt
    python -m benchmarks.bench_peers --seq-lens 4096,8192 --output benchmarks/results/peers_HARDWARE_YYYYMM.json

The packages run their own, unchanged code over gloo; where they call flash-attn they get the CPU kernel that our tiles
use (`benchmarks/peers/shim`). Errors are relative to float64 attention over the same rounded inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_1
from benchmarks.peers.methods import COUNTERPARTS, PEERS
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import AttentionCell, HeadShape, RankSetup, Rounds, check_points
from engine.config.errors import BurstError, ConfigError
from engine.planning.methods.presets import PRESETS

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent / ".cache" / "peers"
ERRORS = ("out", "dq", "dk", "dv")
SAME_ERROR = 0.98  # a peer's error above this share of ours is called the same


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 ok, 1 a rank failed, 2 usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", default="4096")
    parser.add_argument("--ranks", type=at_least_1, default=4)
    parser.add_argument("--nodes", type=at_least_1, default=1, help="nodes that our presets take the ranks to lie on")
    parser.add_argument("--heads", type=at_least_1, default=8)
    parser.add_argument("--kv-heads", type=at_least_1, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=at_least_1, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--ours", default=None, help="presets as for burst bench; default: all, and what peers do")
    parser.add_argument("--peers", default=",".join(PEERS), help="default: all")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="folder of the installed packages")
    parser.add_argument("--rank-command", default="", help="as for burst bench")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    args = parser.parse_args(argv)
    try:
        document = compare(args)
    except BurstError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written: {args.output}")
    return 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every length, print as it comes, and return the whole document."""
    ours = args.ours.split(",") if args.ours else list(dict.fromkeys([*PRESETS, *COUNTERPARTS.values()]))
    peers = args.peers.split(",")
    check_points(ours, ["causal"])
    if unknown := set(peers) - set(PEERS):
        raise ConfigError(f"--peers: unknown {', '.join(sorted(unknown))}; legal: {', '.join(PEERS)}")
    use_packages(args.packages)
    setup = RankSetup(args.ranks, args.nodes)
    shape = HeadShape(args.heads, args.kv_heads, args.head_dim)
    rounds = Rounds(args.repeats, args.warmup)
    document: dict[str, Any] = {
        "benchmark": "peers",
        "environment": {"command": shlex.join(sys.orig_argv[1:])},
        "settings": {**dataclasses.asdict(setup), **dataclasses.asdict(shape), **dataclasses.asdict(rounds)},
        "requirements": (HERE / "peers/requirements.txt").read_text(encoding="utf-8").splitlines()[2:],
        "results": [],
        "skipped": [],
    }
    program = RankProgram("benchmarks.peers.rank", tuple(shlex.split(args.rank_command)))
    for length in map(int, args.seq_lens.split(",")):
        cell = AttentionCell(tuple(ours), "causal", length, setup, shape, rounds)
        legal, skipped = cell.legal_variants()
        result = measure_cell(dataclasses.replace(cell, variants=(*legal, *peers)), program)
        document["environment"] |= result["environment"]
        document["results"] += result["results"]
        reasons = skipped | result["skipped"]
        document["skipped"] += [{"variant": name, "seq_len": length, "reason": text} for name, text in reasons.items()]
        print_cell(length, result["results"], reasons)
    return document


def use_packages(folder: Path) -> None:
    """Put the packages and the stand-ins for what they import on the path of the ranks."""
    if not (folder / "ring_flash_attn").is_dir() or not (folder / "yunchang").is_dir():
        install = f"pip install --no-deps --target {folder} -r benchmarks/peers/requirements.txt"
        raise ConfigError(f"the compared packages are not in {folder}; install them: {install}")
    paths = [str(HERE / "peers" / "shim"), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def print_cell(length: int, rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    """A line per method, fastest first, then where a peer wins."""
    best = min(row["total"]["median_s"] for row in rows if not row["peer"])
    print(f"\n{length:,} tokens; time relative to the fastest of ours; errors x 1e-3")
    width = max(len(row["variant"]) for row in rows)
    print(f"{'':>{width}}  {'seconds':>22}  {'time':>6}  " + "  ".join(f"{name:>5}" for name in ERRORS))
    for row in sorted(rows, key=lambda row: row["total"]["median_s"]):
        total = row["total"]
        spread = f"{total['median_s']:.3f} ({total['min_s']:.3f}..{total['max_s']:.3f})"
        errors = "  ".join(f"{1e3 * row['relative_error'][name]:5.2f}" for name in ERRORS)
        print(f"{row['variant']:>{width}}  {spread:>22}  {total['median_s'] / best:5.2f}x  {errors}")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for line in same_methods(rows):
        print(line)
    print("\n".join(peer_wins(rows)) or "no peer is faster or more exact than the best of ours")


def same_methods(rows: list[dict[str, Any]]) -> list[str]:
    """Every peer's time over that of the same method of ours, where both were measured."""
    medians = {row["variant"]: row["total"]["median_s"] for row in rows}
    return [
        f"{peer} takes {medians[peer] / medians[ours]:.2f}x the time of {ours}"
        for peer, ours in COUNTERPARTS.items()
        if peer in medians and ours in medians
    ]


def peer_wins(rows: list[dict[str, Any]]) -> list[str]:
    """Sentences on every peer that is faster than all of ours, or clearly more exact than the most exact of ours."""
    ours, peers = ([row for row in rows if row["peer"] is kind] for kind in (False, True))
    best = min(ours, key=lambda row: row["total"]["median_s"])
    lines = [
        f"{row['variant']} is faster than {best['variant']}: "
        f"{row['total']['median_s'] / best['total']['median_s']:.2f}x its time"
        + (", their spreads overlap" if row["total"]["max_s"] > best["total"]["min_s"] else "")
        for row in peers
        if row["total"]["median_s"] < best["total"]["median_s"]
    ]
    for name in ERRORS:
        least = min(row["relative_error"][name] for row in ours)
        lines += [
            f"{row['variant']} has the smaller error in {name}: {row['relative_error'][name]:.2e} against {least:.2e}"
            for row in peers
            if row["relative_error"][name] < SAME_ERROR * least
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
