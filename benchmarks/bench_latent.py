"""Multi-head latent attention whose latents travel, against the same with expanded keys and values (Linux, root).

    python -m benchmarks.bench_latent --output benchmarks/results/latent_HARDWARE_YYYYMM.json

One sequence over 2 nodes x 4 ranks, whose rails are shaped (`benchmarks.rig`): forward and backward, in turns, the
gradient of the expanding weight included. Heads are those of MiniCPM3-4B, latents of 288 numbers. A CPU computes
slowly: packed documents of 1,024 tokens, each divided over all ranks, leave so few pairs that the network decides.
Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least_1
from benchmarks.latent_rank import LatentCell
from benchmarks.rig.__main__ import RigError, check_machine, ensure, tear_down
from benchmarks.rig.network import NODE_INTERFACE, Rig, namespace
from engine.bench.measure import environment
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import RankSetup, Rounds
from engine.config.errors import BurstError
from engine.config.schema import to_plain


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 ok, 1 a rank failed, 2 this machine cannot carry the rig."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="ring")
    parser.add_argument("--seq-len", type=at_least_1, default=16384)
    parser.add_argument("--document-tokens", type=int, default=1024, help="0: one causal sequence")
    parser.add_argument("--heads", type=at_least_1, default=16)
    parser.add_argument("--rate", type=at_least_1, default=200, help="Mbit/s of every rank's rail, each way")
    parser.add_argument("--repeats", type=at_least_1, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    args = parser.parse_args(argv)
    try:
        document = compare(args)
    except (RigError, BurstError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, RigError) else error.exit_code
    _print(document["forms"])
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written: {args.output}")
    return 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Cell, environment and figures of both forms; the rig is gone afterwards."""
    check_machine()
    rig = ensure(Rig(nodes=2, local_ranks=4, rate_mbit=args.rate))
    cell = LatentCell(
        preset=args.preset,
        seq_len=args.seq_len,
        document_tokens=args.document_tokens,
        num_heads=args.heads,
        nope_dim=64,
        rope_dim=32,
        v_dim=64,
        rank=256,
        setup=RankSetup(rig.ranks, rig.nodes),
        rounds=Rounds(args.repeats, args.warmup),
    )
    os.environ["GLOO_SOCKET_IFNAME"] = NODE_INTERFACE
    try:
        forms = measure_cell(cell, RankProgram("benchmarks.latent_rank", ("ip", "netns", "exec", namespace("{rank}"))))
    finally:
        tear_down()
    facts = environment(torch.device("cpu"))
    return {"cell": to_plain(cell), "rate_mbit": args.rate, "environment": facts, "forms": forms}


def _print(forms: dict[str, Any]) -> None:
    print(f"{'':10}{'forward':>10}{'backward':>10}{'total':>10}{'sent forward':>16}{'backward':>12}")
    for form, row in forms.items():
        seconds = "".join(f"{row[name]['median_s']:>8.2f} s" for name in ("forward", "backward", "total"))
        sent = row["sent_bytes_all_ranks"]
        print(f"{form:10}{seconds}{sent['forward'] / 1e6:>13.0f} MB{sent['backward'] / 1e6:>9.0f} MB")
    expanded, latent = (forms[form]["total"]["median_s"] for form in ("expanded", "latent"))
    print(f"latents: {expanded / latent:.2f} times as fast")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
