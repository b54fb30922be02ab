"""The target of torchrun: python -m torch.distributed.run --nproc-per-node N -m engine.train RUN/config.yaml

Reads the run folder's config.yaml, trains, and leaves metrics, summary and errors in the run folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from engine.config.errors import BurstError
from engine.config.settings import load_config
from engine.runs.folder import RunFolder, open_run
from engine.runs.process import prefer_expandable_segments
from engine.training.rank.process import RankStatus, leave, run_rank


def train(run: RunFolder, status: RankStatus) -> None:
    """Everything this rank does."""
    config = load_config(run.path / "config.yaml")
    status.phase = "import torch"
    from engine.training.trainer import run_training  # here, so that a failing import of torch is this rank's error

    run_training(config, run, status)


def main(work: Callable[[RunFolder, RankStatus], None] = train) -> None:
    """Does `work` on the run that the only argument names, and ends the process with its exit code."""
    if len(sys.argv) != 2:
        print("usage: python -m engine.train RUN/config.yaml", file=sys.stderr)
        sys.exit(2)
    try:
        run = open_run(sys.argv[1])
    except BurstError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    prefer_expandable_segments(os.environ)
    exit_code = run_rank(run, lambda status: work(run, status))
    leave(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
