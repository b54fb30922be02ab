"""The kernel log since boot, as far as the drivers of GPUs and adapters complained in it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.survey.section import Section, UnreadableError, python_question

RECENT_S = 86400.0
_ALLOW = "let this user read the kernel log (group adm or systemd-journal, or sysctl kernel.dmesg_restrict=0)"

# The journal comes first, for the kernel's own buffer forgets. A log without any line is no log: its reader may not see
# it. Of every kind of line by a device there is one row, how often it came and the last one: a flood of one hides no
# other. Links come up in several tries while a node boots, and what adapters said within a day is a kind of its own.
KERNEL_LOG = python_question(
    "kernel.log",
    20,
    f"recent = {RECENT_S}\n"
    r"""
import subprocess

xid = re.compile(r"S?Xid \([^)]*\): *\d+")
wanted = re.compile(r"\bS?Xid\b|fallen off the bus")
adapter = re.compile(
    r"^(?:\[ *(\d+)\.\d+\])?.*?(mlx[45]_core [0-9a-f:.]+).*?((link down|cable (?:unplugged|error))|"
    r"health compromised|fatal error|firmware internal error|device is in error)",
    re.I,
)
uptime = float((tell(root / "proc/uptime") or "0").split()[0])
ways = [["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic"], ["dmesg"]]
if (root / "var/log").is_dir() and root != pathlib.Path("/"):
    ways = [["cat", *map(str, root.glob("var/log/kernel-*.log"))]]
seen, said = {}, []
for words in ways:
    total, boot = 0, False
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError:
        continue
    for raw in process.stdout:
        line = raw.decode(errors="replace").strip()[:1000]  # patterns take time in the square of it
        if not line or re.match("-- |Hint: |No journal files", line):
            continue
        total, last, boot = total + 1, line, boot or re.search(r"Linux version \d", line) is not None
        found = adapter.match(line)
        at = float(found and found[1] or "inf")
        if found is not None and (at > 600 or not found[4]):
            kind = found[2] + found[3].lower() + ("" if uptime - at < recent else " before")
        elif wanted.search(line):
            kind = (xid.search(line) or [re.sub(r"\d+", "", line)])[0]
        else:
            continue
        if kind in seen or len(seen) < 500:
            seen[kind] = [seen.get(kind, [0])[0] + 1, line]
    if process.wait() == 0 and total:
        break
    said += [last] if total else []
    seen = {}
else:
    sys.exit("\n".join(said) or "no log")
print(json.dumps({"reader": words[0], "total": total, "boot": boot, "uptime": uptime, "seen": list(seen.values())}))
""",
)


@dataclass(frozen=True)
class KernelLog:
    """reader: journalctl or dmesg. total: all lines. boot: whether nothing since boot has been forgotten.

    seen: how often a kind of complaint came, and its last line. uptime: of the node, in seconds.
    """

    reader: str
    total: int
    boot: bool
    uptime: float
    seen: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        if self.total <= 0:
            raise ValueError("no line")


def read_kernel_log(section: Section) -> KernelLog:
    """Raises UnreadableError: no permission, no log, a broken answer."""
    try:
        return section.read(KernelLog)
    except UnreadableError as error:
        raise UnreadableError("the kernel log cannot be read", error.evidence or str(error), _ALLOW) from None
