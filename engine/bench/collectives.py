"""The target of torchrun for `burst check-nodes --collectives`: python -m engine.bench.collectives RUN/config.yaml"""

from __future__ import annotations

from engine.config.settings import load_config
from engine.runs.folder import RunFolder
from engine.train import main
from engine.training.rank.process import RankStatus


def measure(run: RunFolder, status: RankStatus) -> None:
    """Run the measurement on this rank."""
    config = load_config(run.path / "config.yaml")
    status.phase = "import torch"
    from engine.bench.collective_times import measure_collectives  # here, so that a failing import is this rank's error

    measure_collectives(config, run, status)


if __name__ == "__main__":
    main(measure)
