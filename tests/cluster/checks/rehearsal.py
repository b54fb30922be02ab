"""A rehearsal node in a folder: its fake GPUs and adapters, asked by the real probe script in a real shell."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from testkit.check_fakes import Groups, ask_here, changed_section

from cluster.checks.finding import Finding
from cluster.survey.section import NodeProbe
from cluster.testbed.hardware.files import hardware_files
from engine.config.cluster import ClusterConfig, ExpectedHardware

GPU, IB = Groups("gpu"), Groups("ib")


def write_files(folder: Path, profile: str, *faults: str, number: int = 1) -> Path:
    """The files of the testbed's node of that number below `folder`; the root of its tree."""
    (folder / "root").mkdir(exist_ok=True)
    for name, file in hardware_files(profile, f"node{number}", number, faults).items():
        file.write(folder / name)
    return folder / "root"


def ask(folder: Path, *, shell: tuple[str, ...] = ("sh",), tools: Path | str = "", limit_s: int = 45) -> NodeProbe:
    """The answer of the node in `folder`. limit_s: of nvidia-smi and of the ports."""
    asked = {one.name: one for one in (*GPU.questions, *IB.questions)}
    questions = [replace(one, limit_s=min(limit_s, one.limit_s)) for one in asked.values()]
    path, settings = f"{folder / 'bin'}:{tools}".strip(":"), {"BURST_SMI_PAUSE_S": "0"}
    return ask_here(
        questions, folder, tools=path, shell=shell, settings=settings, BURST_PROBE_ROOT=str(folder / "root")
    )


def rehearse(folder: Path, profile: str, *faults: str, number: int = 1, limit_s: int = 45) -> NodeProbe:
    """The answer of a node with that hardware and those faults."""
    write_files(folder, profile, *faults, number=number)
    return ask(folder, limit_s=limit_s)


@functools.cache
def healthy(profile: str = "h100x8") -> NodeProbe:
    """The answer of a node without faults; asked once."""
    with tempfile.TemporaryDirectory() as folder:
        return rehearse(Path(folder), profile)


def check(probe: NodeProbe, *groups: Groups, **expected: Any) -> list[Finding]:
    """The findings of the groups (none: of gpu), with `expected` hardware."""
    config = ClusterConfig(expected=ExpectedHardware(**expected))
    return [finding for group in groups or (GPU,) for finding in group.check(probe, config)]


def with_text(probe: NodeProbe, name: str, old: str, new: str, count: int = 1) -> NodeProbe:
    """`probe` where `old` in one section says `new`, at the first `count` places. `old` must be there."""
    text = probe.section(name).output
    assert old in text, f"{name} does not hold {old!r}"
    return changed_section(probe, name, output=text.replace(old, new, count))


def fixture_text(name: str) -> str:
    """A recorded form, from fixtures."""
    return (Path(__file__).parent / "fixtures" / name).read_text()


def program(folder: Path, name: str, body: str, *, head: str = "/bin/sh") -> None:
    """A program of the node in `folder`."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{head}\n{body}\n")
    path.chmod(0o755)
