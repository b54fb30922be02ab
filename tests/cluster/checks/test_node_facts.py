"""This machine as a launch finds it: its GPUs, its Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from socket import gethostname

import pytest
from testkit import ROOT, write_program

from cluster.launch.local import probe_local_node, visible_gpus
from cluster.plan import MachineFacts

TWO = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n"
MIG = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n"


@pytest.mark.parametrize(
    ("listing", "variable", "count"),
    [
        ("", None, 0),
        ("No devices were found\n", None, 0),
        (TWO, None, 2),
        (MIG, None, 1),
        (TWO, "1", 1),
        (TWO, "0,1", 2),
        (TWO, "", 0),
        (TWO, "-1", 0),
        (TWO, "0,-1,1", 1),
        (TWO, "0,1,2,3", 2),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_use(listing: str, variable: str | None, count: int) -> None:
    assert visible_gpus(listing, {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}) == count


@pytest.mark.parametrize(("script", "gpus"), [(f"printf '{TWO}'", 2), (f"printf '{TWO}'; exit 9", 0), ("exit 127", 0)])
def test_probe_counts_gpus_only_when_the_tool_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: int
) -> None:
    write_program(tmp_path / "bin/nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (probe_local_node().gpus, probe_local_node().has_chosen_gpus) == (gpus, False)


def test_probe_tells_where_the_ranks_find_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/mine:{ROOT}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    place = (sys.executable, str(Path.cwd()), f"{ROOT}:/mine")
    assert probe_local_node() == MachineFacts(gethostname(), len(os.sched_getaffinity(0)), 0, *place, True)
