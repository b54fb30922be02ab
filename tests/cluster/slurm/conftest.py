"""Launches on a Slurm of this machine."""

from __future__ import annotations

import pytest
from slurm_rig import SlurmBench


@pytest.fixture
def bench(slurm_testbed, tmp_path, monkeypatch):
    """Launches on the shared testbed, which is idle again afterwards."""
    bench = SlurmBench(slurm_testbed, tmp_path)
    monkeypatch.setenv("SLURM_CONF", bench.environment["SLURM_CONF"])
    yield bench
    for job in bench.client("squeue", "-h", "-o", "%A").split():
        bench.client("scancel", job)
    bench.wait_idle()
