"""What one GPU does with this engine, within a budget of seconds; `make gpu` runs it after the GPU tests.

Parts: overlap (a message beside a tile), tiles (kernels beside published figures), blocked (a ring's work on one device
against one kernel), elementwise, offload, loss, steps (training steps of a Llama-8B shape, memory against its
prediction), parity (several ranks on one device), in this order. Results are written after every measurement:
gpu_DEVICE_YYYYMM.json and .md, with --only with the parts' names added. What fails is a row with its error; the exit
code is 1 when a part gave nothing but failures.

    python -m benchmarks.bench_gpu
    python -m benchmarks.bench_gpu --device cpu --size small --budget-s 60 --output-dir /tmp/gpu
    python -m benchmarks.bench_gpu --only tiles,steps:1048576 --budget-s 520
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.session import Request, run_session
from engine.config.errors import BurstError

RESULTS = Path(__file__).resolve().parent / "results"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: a dry run for a CPU")
    parser.add_argument("--budget-s", type=float, default=420.0, metavar="SECONDS", help="divided between the parts")
    parser.add_argument(
        "--only",
        default="",
        metavar="PART[:TEXT],...",
        help="these parts; with TEXT those of its measurements whose label has it",
    )
    parser.add_argument("--output-dir", type=Path, default=RESULTS, metavar="FOLDER")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes; the exit code: 0 ok, 1 a part failed, 2 usage."""
    arguments = parse_arguments(argv)
    request = Request(
        device=arguments.device,
        size=arguments.size,
        budget_s=arguments.budget_s,
        only=tuple(filter(None, arguments.only.split(","))),
        output_dir=arguments.output_dir,
        command=shlex.join(["python", *sys.orig_argv[1:]]),
    )
    try:
        return run_session(request)
    except BurstError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
