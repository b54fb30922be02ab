"""A rehearsal node in a folder: its fake GPUs, asked by the real probe script in a real shell."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from testkit.check_fakes import Groups
from testkit.local_connection import AT_HAND

from cluster.checks.finding import Finding, Verdict
from cluster.survey.nvidia_smi import SMI
from cluster.survey.script import build_script, new_fence, read_sections
from cluster.survey.section import NodeProbe, Section, SectionState
from cluster.testbed.hardware.files import hardware_files
from engine.config.cluster import ClusterConfig, ExpectedHardware

GROUP = Groups("gpu")

NODE = "node1"


def write_files(folder: Path, profile: str, faults: tuple[str, ...] = (), node: str = NODE) -> None:
    """The files of a node's GPUs below `folder`."""
    for name, file in hardware_files(profile, node, 1, faults).items():
        file.write(folder / name)


def ask(folder: Path, *, shell: tuple[str, ...] = ("sh",), pause_s: int = 0, limit_s: int = 30) -> NodeProbe:
    """The answer of the node in `folder` to the probe of the group gpu."""
    fence = new_fence()
    questions = [replace(one, limit_s=limit_s) if one is SMI else one for one in GROUP.questions]
    script = build_script(questions, fence, {"BURST_SMI_PAUSE_S": str(pause_s)})
    root = folder / "root"
    root.mkdir(exist_ok=True)
    environment = {
        "PATH": f"{folder / 'bin'}:{AT_HAND}:{os.environ['PATH']}",
        "BURST_PROBE_ROOT": str(root),
    }
    answer = subprocess.run([*shell, "-s"], input=script, capture_output=True, env=environment, timeout=200)
    return NodeProbe(NODE, read_sections(answer.stdout, fence))


def rehearse(folder: Path, profile: str, *faults: str, pause_s: int = 0, limit_s: int = 30) -> NodeProbe:
    """The answer of a node with that hardware and those faults."""
    write_files(folder, profile, faults)
    return ask(folder, pause_s=pause_s, limit_s=limit_s)


def check(probe: NodeProbe, **expected: object) -> list[Finding]:
    """The findings of the group, with `expected` hardware."""
    return GROUP.check(probe, ClusterConfig(expected=ExpectedHardware(**expected)))  # type: ignore[arg-type]


def bad(findings: list[Finding], *severities: Verdict) -> set[tuple[str, str | None, Verdict]]:
    """(check, device, severity) of what is neither OK nor SKIP, or of the `severities` asked for."""
    wanted = severities or (Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL)
    return {(found.check, found.device, found.severity) for found in findings if found.severity in wanted}


def only(findings: list[Finding], name: str) -> Finding:
    """The one finding of that check."""
    (found,) = [finding for finding in findings if finding.check == name]
    return found


def with_section(probe: NodeProbe, name: str, **changes: object) -> NodeProbe:
    """`probe` with one section changed."""
    sections: Mapping[str, Section] = {**probe.sections, name: replace(probe.section(name), **changes)}  # type: ignore[arg-type]
    return replace(probe, sections=sections)


def with_text(probe: NodeProbe, name: str, old: str, new: str, count: int = 1) -> NodeProbe:
    """`probe` where `old` in one section says `new`, at the first `count` places. `old` must be there."""
    text = probe.section(name).output
    assert old in text, f"{name} does not hold {old!r}"
    return with_section(probe, name, output=text.replace(old, new, count))


@functools.cache
def healthy(profile: str = "h100x8") -> NodeProbe:
    """The answer of a node without faults; asked once."""
    with tempfile.TemporaryDirectory() as folder:
        return rehearse(Path(folder), profile)


def fixture_text(name: str) -> str:
    """A recorded form, from fixtures."""
    return (Path(__file__).parent / "fixtures" / name).read_text()


def ended(output: str, exit_code: int = 0, name: str = "gpu.smi") -> Section:
    """A section that ran to its end."""
    return Section(name, output.strip("\n"), exit_code, SectionState.ENDED)
