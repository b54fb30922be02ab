"""The kernel log since boot, as far as the drivers of GPUs and adapters wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cluster.remote_text import one_line
from cluster.survey.section import NodeProbe, Question, UnreadableError

SECTION = "kernel.log"
MAX_LINE = 2000  # characters; the patterns of those who read lines take time in the square of it
_ALLOW = "let this user read the kernel log (group adm or systemd-journal, or sysctl kernel.dmesg_restrict=0)"

# What the drivers of GPUs and adapters wrote since boot. The journal comes first, for the kernel's own buffer forgets.
# A log without any line is no log: its reader may not see it.
#
# Lines of NVIDIA's drivers come one per kind and device with how often it came, `seen`: a flood of one hides no other.
# Those of adapters come as they are, the last 2000, `line`. `log` comes last.
KERNEL_LOG = Question(
    "kernel.log",
    20,
    r"""
pick() {
    awk -v reader="$1" '
        BEGIN { code = 1 }
        # A pipe forgets the exit code of the reader, and then no permission looks like no trouble.
        /^@@ended [0-9]+$/ { code = $2; next }
        /^(-- |Hint: |No journal files)/ || /^ *$/ { next }
        { lines++ }
        /Linux version [0-9]/ { boot = 1 }
        /mlx[45]|infiniband|PCIe bandwidth/ { kept[found++ % 2000] = $0 }
        /NVRM|nvidia-nvswitch|fallen off the bus/ {
            kind = $0
            if (match($0, /S?Xid \([^)]*\): *[0-9]+/)) kind = substr($0, RSTART, RLENGTH)
            else if (kinds[""]++ >= 200) next
            else { sub(/^.*(NVRM|nvidia-nvswitch)/, "", kind); gsub(/[0-9]+/, "", kind) }
            if (!(kind in count)) order[++total] = kind
            count[kind]++
            last[kind] = $0
        }
        END {
            if (code != 0 || lines == 0) { print reader ": exit code " code ", " lines + 0 " lines"; exit 1 }
            for (i = 1; i <= total; i++) printf "seen\t%s\t%s\n", count[order[i]], last[order[i]]
            for (i = (found > 2000 ? found - 2000 : 0); i < found; i++) printf "line\t%s\n", kept[i % 2000]
            printf "log\t%s\t%s\t%s\n", reader, lines, boot ? "since boot" : "cut"
        }'
}
uptime=
[ -r "$root/proc/uptime" ] && read -r uptime rest <"$root/proc/uptime"
printf 'uptime\t%s\n' "$uptime"
if [ -n "$root" ]; then
    { cat "$root"/var/log/kernel-*.log 2>&1; printf '\n@@ended %s\n' "$?"; } | pick log
    exit
fi
if command -v journalctl >/dev/null; then
    { journalctl -k -b -q --no-pager -o short-monotonic 2>&1; printf '\n@@ended %s\n' "$?"; } | pick journalctl && exit
fi
{ dmesg 2>&1; printf '\n@@ended %s\n' "$?"; } | pick dmesg && exit
dmesg 2>&1 >/dev/null
exit 1
""",
)


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
        elif kind == "log" and len(words) == 3 and words[1].isdigit() and words[2] in ("since boot", "cut"):
            log.reader, log.total, log.reaches_boot = one_line(words[0]), int(words[1]), words[2] == "since boot"
    if log.total == 0:
        said = section.output.strip().splitlines()[-1:]
        raise UnreadableError("the kernel log cannot be read", said[0][:200] if said else section.trouble(), _ALLOW)
    return log
