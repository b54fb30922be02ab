"""The kernel log since boot, as far as the drivers of GPUs and adapters wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cluster.remote_text import one_line
from cluster.survey.section import NodeProbe, UnreadableError

SECTION = "kernel.log"
MAX_LINE = 2000  # characters; the patterns of those who read lines take time in the square of it
_ALLOW = "let this user read the kernel log (group adm or systemd-journal, or sysctl kernel.dmesg_restrict=0)"


@dataclass
class KernelLog:
    """reader: journalctl or dmesg. total: all lines. reaches_boot: whether nothing since boot has been forgotten.

    counted: of NVIDIA's drivers, how often a kind of line came and the last one. lines: of adapters' drivers, in order.
    uptime_s: None when the node did not tell.
    """

    reader: str = ""
    total: int = 0
    reaches_boot: bool = False
    counted: list[tuple[int, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    uptime_s: float | None = None


def read_kernel_log(probe: NodeProbe) -> KernelLog:
    """Raises UnreadableError: no permission, no log, a broken answer."""
    section, log = probe.section(SECTION), KernelLog()
    for whole in section.output.splitlines() if section.ok else ():
        line = whole[:MAX_LINE]
        kind, *words = line.split("\t", {"seen": 2, "line": 1}.get(line[:4], 3))
        if kind == "seen" and len(words) == 2 and words[0].isdigit():
            log.counted.append((int(words[0]), words[1]))
        elif kind == "line" and words:
            log.lines.append(one_line(words[0], 300))
        elif kind == "uptime" and words and re.fullmatch(r"\d{1,12}(\.\d{1,6})?", words[0]):
            log.uptime_s = float(words[0])
        elif kind == "log" and len(words) == 3 and words[1].isdigit():
            log.reader, log.total, log.reaches_boot = one_line(words[0], 20), int(words[1]), words[2] == "since boot"
    if log.total == 0:
        said = section.output.strip().splitlines()[-1:]
        raise UnreadableError("the kernel log cannot be read", said[0][:200] if said else section.trouble(), _ALLOW)
    return log
