"""What `burst launch` does after composition, with fake ranks.

python launch_driver.py RUNS_DIR [--real] [--json] [--plain] [--detach] [--broken]
--real: torchrun itself instead of its stand-in.
--broken: with a Python that is not there.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from testkit.fake_plan import fake_plan

from burst_cli.launch.launching import run_plan
from burst_cli.options import OutputOptions
from cluster.control.link import LaunchTiming
from cluster.plan import with_files
from engine.config.cluster import ClusterConfig
from engine.config.settings import DataConfig, RunConfig, TrainConfig
from engine.runs.folder import new_run_path


def launch(runs_dir: Path, *flags: str) -> int:
    """The exit code of a launch into a new run folder below `runs_dir`."""
    corpus = runs_dir.parent / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("to be or not to be\n" * 500)
    data = DataConfig(
        format="text", paths=(str(corpus),), prepared_dir=str(runs_dir.parent / "prepared"), validation_fraction=0.2
    )
    cluster = ClusterConfig(ranks_per_node=2)
    config = RunConfig(data=data, train=TrainConfig(steps=5, seq_len=64), cluster=cluster)
    path = new_run_path(runs_dir, "tiny")
    plan = fake_plan(path, config, real="--real" in flags)
    if "--broken" in flags:
        argv = ("/no/such/python", *plan.nodes[0].argv[1:])
        plan = with_files(dataclasses.replace(plan, nodes=(dataclasses.replace(plan.nodes[0], argv=argv),)))
    timing = LaunchTiming(poll_s=0.02, stop_grace_s=0.7, failure_grace_s=0.5, evidence_s=0.2)
    options = OutputOptions("--detach" in flags, "--plain" in flags, "--json" in flags)
    return run_plan(plan, ["exp=tiny"], options, timing)


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1]), *sys.argv[2:]))
