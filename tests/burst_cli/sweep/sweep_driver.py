"""A sweep of fake launches in a process of its own: python sweep_driver.py RUNS_DIR CELLS."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burst_cli.runs.sweeps import SweepFolder
from burst_cli.sweep.plan import Cell, SweepPlan
from burst_cli.sweep.request import SweepRequest
from burst_cli.sweep.runner import Lane, SweepRunner
from burst_cli.sweep.sweeping import open_sweep
from cluster.control.attempt import StopRequests
from engine.config.settings import RunConfig

FAKE = (sys.executable, str(Path(__file__).parent / "fake_sweep_launch.py"))


class Quiet:
    """Tells nobody."""

    def tick(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


def plan_of(count: int, modes: Mapping[int, str] = {}) -> SweepPlan:
    """`count` cells; cell number k behaves as `modes` says."""
    cells = tuple(
        Cell(f"cell{k:02d}", (f"number={k}", f"mode={modes.get(k, 'ok')}"), {"number": str(k)}, RunConfig(exp="fake"))
        for k in range(count)
    )
    return SweepPlan("fake-0", (), cells)


def runner_of(folder: SweepFolder, stop: Any, lanes: int = 1, view: Any = None, **typed: Any) -> SweepRunner:
    """What launches the cells of `folder`: the stand-in."""
    request, names = SweepRequest(runs_dir=folder.path.parents[1], **typed), [f"lane {k}" for k in range(lanes)]
    return SweepRunner(folder, request, tuple(map(Lane, names)), view or Quiet(), stop, FAKE)


def main() -> int:
    folder, _ = open_sweep(Path(sys.argv[1]), plan_of(int(sys.argv[2])))
    stop = StopRequests()
    with stop.listening():
        cells = runner_of(folder, stop, lanes=2).run()
    return 0 if all(cell["state"] == "completed" for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
