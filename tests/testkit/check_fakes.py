"""Nodes that answer a probe as a test wants it, and groups of checks that read these answers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.checks.check import Check, CheckGroup, Finding, Verdict
from cluster.ssh.hosts import Host
from cluster.survey.facts import NodeFacts, build_script, is_complete, new_delimiter, read_sections
from cluster.survey.section import NodeProbe, Question, Section, SectionState
from testkit.connections import AT_HAND, FakeConnection, FakeProcess
from testkit.needs import require
from testkit.waiting import wait_for

Answer = Callable[[str], Iterator[bytes]]  # from the fence of the probe to what arrives, piece by piece


def ask_here(
    questions: Iterable[Question],
    folder: Path,
    *,
    tools: Path | str = "",
    shell: Sequence[str] = ("sh",),
    settings: Mapping[str, str] = MappingProxyType({}),
    **environment: str,
) -> NodeProbe:
    """The answer of this machine in `folder`, with `tools` first in PATH and nothing else of our environment."""
    path = ":".join(map(str, filter(None, (tools, AT_HAND, os.environ["PATH"]))))
    program = installed(shell[0], path)
    fence = new_delimiter()
    # Not a pipe: what a killed section leaves behind would hold it open.
    with tempfile.TemporaryFile() as output:
        subprocess.run(
            [program, *shell[1:], "-s"],
            input=build_script(questions, fence, settings),
            stdout=output,
            cwd=folder,
            env={"PATH": path, "HOME": str(folder), **environment},
            timeout=200,
            check=True,
        )
        output.seek(0)
        answer = output.read()
    assert is_complete(answer, fence)
    return NodeProbe("node1", read_sections(answer, fence))


def installed(tool: str, path: str) -> str:
    """Where the tool is; without it the test is skipped."""
    require(tool)
    return str(shutil.which(tool, path=path))


def ended(name: str, output: str, code: int = 0) -> Section:
    """A section that ran to its end."""
    return Section(name, output.strip("\n"), code, SectionState.ENDED)


def changed_section(probe: NodeProbe, name: str, **changes: Any) -> NodeProbe:
    """`probe` with one section changed, or added."""
    return replace(probe, sections={**probe.sections, name: replace(probe.section(name), **changes)})


def bad(findings: Iterable[Finding]) -> list[tuple[str, str | None, Verdict]]:
    """(check, device, severity) of all that is neither OK nor skipped."""
    return [(finding.check, finding.device, finding.severity) for finding in findings if not finding.severity.is_fine]


def told(findings: Iterable[Finding], *, whole: bool = False) -> list[str]:
    """The same in words: `FAIL gpu.ecc (GPU 2): 2 errors; expected: 0`. whole: what is fine, too."""
    return [
        f"{found.severity} {found.check}{f' ({found.device})' if found.device else ''}: {found.observed}"
        f"{f'; expected: {found.expected}' if found.expected else ''}"
        for found in findings
        if whole or not found.severity.is_fine
    ]


def only(findings: Iterable[Finding], check: str) -> Finding:
    """The only finding of a check."""
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def frame(fence: str, name: str, output: str = "", code: int = 0) -> bytes:
    """One section as an honest node answers it."""
    return f"\n{fence} begin {name}\n{output}\n{fence} end {name} {code}\n".encode()


def done(fence: str) -> bytes:
    """The last line of an honest answer."""
    return f"\n{fence} done\n".encode()


def answer(sections: Mapping[str, str | tuple[str, int]], delay_s: float = 0.0) -> Answer:
    """A complete answer with these outputs, or (output, exit code)."""

    def tell(fence: str) -> Iterator[bytes]:
        time.sleep(delay_s)
        for name, told in sections.items():
            output, code = (told, 0) if isinstance(told, str) else told
            yield frame(fence, name, output, code)
        yield done(fence)

    return tell


SILENCE = b"(nothing comes for ever)"
GONE = b"(the connection breaks)"


class SurveyedNode(FakeConnection):
    """A node that is reached. `tell` is given the fence of a script. clock: what `date +%s.%N` prints; None: the time.

    exit_code and stderr are those of the script; scripts: all that came.
    """

    def __init__(
        self, host: Host, tell: Answer, *, clock: bytes | None = None, ahead_s: float = 0.0, **end: Any
    ) -> None:
        super().__init__(host, lambda argv: FakeProcess(host.name, self._serve, **end if argv[0] == "sh" else {}))
        self._tell, self._clock, self._ahead_s = tell, clock, ahead_s
        self.scripts: list[str] = []

    def _serve(self, line: socket.socket) -> None:
        script = b"".join(iter(lambda: line.recv(1 << 16), b"")).decode()
        if self.commands[-1][0] == "date":
            line.sendall(f"{time.time() + self._ahead_s:.9f}\n".encode() if self._clock is None else self._clock)
            return
        self.scripts.append(script)
        found = re.search(r"fence='(@@[0-9a-f]{32})'", script)
        assert found
        for piece in self._tell(found[1]):
            if piece is GONE:
                self.cut()
            elif piece is SILENCE:
                wait_for(lambda: self.processes[-1].is_cut)
            else:
                line.sendall(piece)


@dataclass
class FakeFleet:
    """`connect` for check_nodes: nodes by name, each an answer or the error that connecting ends with."""

    nodes: Mapping[str, Answer | Exception]
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    connections: dict[str, SurveyedNode] = field(default_factory=dict)

    @property
    def hosts(self) -> list[Host]:
        return [Host(name, "192.0.2.1") for name in self.nodes]

    def connect(self, host: Host) -> SurveyedNode:
        node = self.nodes[host.name]
        if isinstance(node, Exception):
            raise node
        self.connections[host.name] = SurveyedNode(host, node, ahead_s=self.ahead_s.get(host.name, 0.0))
        return self.connections[host.name]


def check_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """`ok` is OK, `warn` and `fail` what they say, and anything that did not end properly UNKNOWN."""
    section = facts.probe.section("host.disk")
    if not section.ok:
        return [check.unknown(section.trouble())]
    severities = {"ok": Verdict.OK, "warn": Verdict.WARN, "fail": Verdict.FAIL}
    return [check.finding(severities.get(section.output, Verdict.UNKNOWN), section.output)]


FAKE_GROUP = CheckGroup("host", (check_disk,))
GROUPS = (FAKE_GROUP,)
HEALTHY = answer({"host.disk": "ok"})


def with_part(document: Any, path: Sequence[int], value: Any) -> Any:
    """`document` with something in it, found by `path`, replaced by `value`."""
    if not path or not isinstance(document, dict | list) or not document:
        return value
    keys = list(document) if isinstance(document, dict) else range(len(document))
    key, copy = keys[path[0] % len(keys)], document.copy()
    copy[key] = with_part(document[key], path[1:], value)
    return copy
