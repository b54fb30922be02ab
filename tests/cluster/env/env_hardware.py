"""This machine with the hardware of a rehearsal node: a tree before /sys and a nvidia-smi that comes first in PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.env.live import LIVE
from cluster.env.plan import FACT_QUESTIONS
from cluster.survey.facts import survey_here
from cluster.survey.section import NodeProbe
from cluster.testbed.hardware.files import hardware_files


def furnish(
    folder: Path, monkeypatch: pytest.MonkeyPatch, profile: str, *, node: int = 3, faults: tuple[str, ...] = ()
) -> Path:
    """Make this machine look like node `node` of `profile` to a probe; the tree that stands before /sys and /etc."""
    for name, file in hardware_files(profile, f"node{node}", node, faults).items():
        file.write(folder / name)
    (folder / "home").mkdir()
    (folder / "root" / "etc").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("BURST_PROBE_ROOT", str(folder / "root"))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder / "home"))
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "TORCH_", "OMP_"))]:
        monkeypatch.delenv(name)
    return folder / "root"


def probe(*groups: str) -> NodeProbe:
    """The answer of the very script that nodes get, of these groups; none: of all that facts are read from."""
    questions = (*FACT_QUESTIONS, LIVE) if groups else FACT_QUESTIONS
    return survey_here(one for one in questions if not groups or one.name.partition(".")[0] in groups)
