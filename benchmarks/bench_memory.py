"""Memory policies side by side on local ranks: step time, peak tensors, bytes kept, attention computed again.

Every policy trains the same model on the same tokens in the same processes; steps are interleaved, so that what else
the machine does meets all policies alike. Peak and kept bytes are counted exactly on one more step that is not timed.
Attention's time in recomputation is that inside the kernel. Run it on a quiet machine:

    python -m benchmarks.bench_memory --output benchmarks/results/memory_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_1
from benchmarks.memory.cell import MemoryCell
from benchmarks.memory.report import claims, complete_rows, loss_spread, markdown
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import RankSetup, Rounds
from engine.config.errors import BurstError
from engine.config.schema import to_plain
from engine.config.settings import ModelConfig

POLICIES = "none,full,seq_fraction:saved_fraction=0.5,attn_out,attn_out_every:every_layers=4"


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 ok, 1 a rank failed, 2 usage. A promise that did not hold is printed, and is no failure."""
    args = parse_arguments(argv)
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


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", default="4096,8192,16384")
    parser.add_argument("--policies", default=POLICIES, help="points of the configuration group memory")
    parser.add_argument("--preset", default="burst", help="a point of attention, as for burst bench")
    parser.add_argument("--ranks", type=at_least_1, default=4)
    parser.add_argument("--nodes", type=at_least_1, default=1, help="nodes that the ranks are taken to lie on")
    parser.add_argument("--threads", type=at_least_1, default=1, help="threads of every rank")
    parser.add_argument("--layers", type=at_least_1, default=4)
    parser.add_argument("--heads", type=at_least_1, default=4, help="query heads; the width is heads * head-dim")
    parser.add_argument("--kv-heads", type=at_least_1, default=None, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab-size", type=at_least_1, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=at_least_1, default=5, help="timed steps of each policy")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each policy before that")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every length, print as it comes, and return the whole document."""
    cells = [build_cell(args, int(length)) for length in args.seq_lens.split(",")]
    for cell in cells:
        for policy in cell.policies:
            cell.run_config(policy)  # every mistake is found before anything is measured
    document: dict[str, Any] = {
        "benchmark": "memory",
        "environment": {"command": shlex.join(sys.orig_argv[1:])},
        "settings": settings(cells[0]),
        "results": [],
    }
    for cell in cells:
        result = measure_cell(cell, RankProgram("benchmarks.memory.rank"))
        document["environment"] |= result["environment"]
        rows = complete_rows(result["results"], cell, result["local_tokens"])
        document["results"] += rows
        print(f"\n{markdown(rows)}\n\nlosses of the same step differ by at most {loss_spread(rows):.2e}", flush=True)
    document["claims"] = [dataclasses.asdict(claim) for claim in claims(document["results"])]
    for claim in document["claims"]:
        verdict = "held" if claim["met"] else "MISSED"
        print(f"{verdict}: {claim['seq_len']:,} tokens, {claim['policy']}: {claim['claim']}: {claim['measured']:.4g}")
    return document


def build_cell(args: argparse.Namespace, seq_len: int) -> MemoryCell:
    """What the arguments ask for at one length."""
    width = args.heads * args.head_dim
    model = ModelConfig(
        name="bench",
        vocab_size=args.vocab_size,
        hidden_size=width,
        ffn_hidden_size=-(-width * 8 // 3 // 64) * 64,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads or args.heads,
        head_dim=args.head_dim,
    )
    return MemoryCell(
        tuple(args.policies.split(",")),
        seq_len,
        model,
        preset=args.preset,
        dtype=args.dtype,
        setup=RankSetup(args.ranks, args.nodes, args.threads),
        rounds=Rounds(args.repeats, args.warmup),
    )


def settings(cell: MemoryCell) -> dict[str, Any]:
    """What all lengths share, as plain values."""
    return {name: value for name, value in to_plain(cell).items() if name != "seq_len"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
