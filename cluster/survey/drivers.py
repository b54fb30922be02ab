"""What drivers say of GPUs and adapters: the kernel log since boot, `nvidia-smi -q -x`, the PCI bus.

Fields of nvidia-smi keep their paths in the XML: who judges one names it, over driver generations. There are three
reasons for a missing value, see `Unavailable`: a field that this GPU lacks, one that the driver left out, and one
that the driver could not read. Only the first is harmless.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cluster.remote_text import one_line
from cluster.survey.rdma import lanes, pci_path
from cluster.survey.section import NotApplicableError, Section, SectionState, UnreadableError, python_question

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
fatal = re.compile(r"(?<![\w-])fatal\b", re.I)  # one that is not must not hide one that is
wanted = re.compile(r"\bS?Xid\b|fallen off the bus|NV_ERR_RESET_REQUIRED|RmInitAdapter failed|rm_init_adapter.*failed")
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
            kind = xid.search(line)
            place_of = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", line, re.I)
            other = (place_of[0] if place_of else "") + re.sub(r"\d+", "", line)
            kind = kind[0] + str(bool(fatal.search(line))) if kind else other
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


# --- nvidia-smi and the PCI bus ---------------------------------------------------------------------------------------


T = TypeVar("T", str, float)

MAX_GPUS = 256

_ADDRESS = re.compile(r"(?<![0-9A-Fa-f])([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-7]))?")
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?:x| MiB| W| MHz| C)?")
_NOT_SUPPORTED = re.compile(
    r"\[?(N/A|Not Supported|Not Available|Requested functionality has been deprecated)\]?|", re.I
)
_BROKEN = re.compile(
    r"ERR!|\[?Unknown Error\]?|\[?GPU is lost\]?|\[?GPU requires reset\]?|\[?Reset required\]?|\[?Timeout\]?"
    r"|\[?Insufficient Permissions\]?|\[?Insufficient power\]?",
    re.IGNORECASE,
)

# All PCI devices are counted, so that "no NVIDIA device" and "no sysfs" stay two things.
LSPCI = python_question(
    "gpu.lspci",
    10,
    r"""
told = {"total": 0, "devices": []}
for device in root.glob("sys/bus/pci/devices/*"):
    vendor = tell(device / "vendor")
    told["total"] += bool(vendor)
    if vendor == "0x10de":
        slot = tell(device.resolve().parent / "max_link_width")  # of the bridge above it
        fields = [tell(device / "class"), tell(device / "numa_node"), place(device), slot]
        told["devices"].append([device.name, *fields])
print(json.dumps(told))
""",
)

# What an idle GPU may hold for its driver, without any process: 0 to 22 MiB were seen, by model and driver. A CUDA
# context takes more than this.
IDLE_MEMORY_MIB = 100

# What uses a GPU at the first look may be about to end: then a second one counts. Behind the answer stands who owns the
# processes on GPUs; one that /proc does not show belongs to another PID namespace. The table of supported clocks is
# most of the answer and says nothing about health. Without persistence mode every call sets up each GPU anew: eight of
# them can take 20 seconds.
SMI = python_question(
    "gpu.smi",
    45,
    f"idle_mib = {IDLE_MEMORY_MIB}\n"
    r"""
import pwd, shutil, subprocess


def look():
    asked = subprocess.run(["nvidia-smi", "-q", "-x"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = asked.stdout.decode(errors="replace")
    return re.sub(r"<(supported_clocks|accounted_processes)>.*?</\1>", "", text, flags=re.DOTALL), asked.returncode


if shutil.which("nvidia-smi") is None:
    sys.exit(127)
text, code = look()
used = re.findall(r"<fb_memory_usage>.*?<used>(\d+) MiB", text, re.DOTALL)
if "<pid>" in text or any(int(mib) > idle_mib for mib in used):
    time.sleep(float(os.environ.get("BURST_SMI_PAUSE_S") or 2))
    text, code = look()
print(text)
for pid in sorted(set(re.findall(r"<pid>(\d{1,10})</pid>", text))):
    folder = root / "proc" / pid
    try:
        # The command, in brackets, may hold blanks and brackets itself; the start is the 20th word after it.
        start = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        since = float(tell(root / "proc/uptime").split()[0]) - start / os.sysconf("SC_CLK_TCK")
        print("owner %s %s %d" % (pid, pwd.getpwuid(folder.stat().st_uid).pw_name, since))
    except (OSError, LookupError, ValueError):
        pass
sys.exit(code)
""",
)


class Unavailable(enum.Enum):
    """Why there is no value."""

    NOT_SUPPORTED = "N/A"
    MISSING = "not in the answer"
    UNREADABLE = "unreadable"


class SmiFailure(enum.Enum):
    """The different ways in which nvidia-smi does not answer; each has its own remedy."""

    NOT_INSTALLED = "not installed"
    NO_ANSWER = "no answer"  # it hangs, or was not asked because it hung before
    GPU_LOST = "a GPU is lost"
    NO_DRIVER = "no driver"
    NO_DEVICES = "no devices"
    FAILED = "no whole answer"


@dataclass(frozen=True)
class SmiTrouble:
    """Why there is nothing to read. address: of the lost GPU, `0000:1b:00.0`. evidence: the line that says so."""

    failure: SmiFailure
    evidence: str
    address: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU. kind: C compute, G graphics, or both."""

    pid: int
    kind: str
    name: str


@dataclass(frozen=True)
class Fields:
    """An element of the answer and what lies below it; paths are those of the XML, separated by slashes."""

    element: Element

    def look(self, *paths: str) -> str | Unavailable:
        """The text at the first of `paths` that is in the answer at all: names change with the driver."""
        return next((word for word in map(self._word, paths) if word is not Unavailable.MISSING), Unavailable.MISSING)

    def word(self, *paths: str) -> str:
        """Like `look`. Raises NotApplicableError for what this GPU does not have, else UnreadableError."""
        return needed(self.look(*paths))

    def number(self, *paths: str) -> float:
        """The same as a number, in the unit that belongs there: `81559 MiB`, `16x`."""
        return needed(_as_number(self.look(*paths)))

    def total(self, *paths: str) -> float:
        """The sum of what is there of `paths`. Raises where one cannot be read or none is there."""
        found = [_as_number(self._word(path)) for path in paths]
        known = [value for value in found if not isinstance(value, Unavailable)]
        gap = next(
            (gap for gap in (Unavailable.UNREADABLE, Unavailable.NOT_SUPPORTED) if gap in found), Unavailable.MISSING
        )
        return needed(sum(known) if known and gap is not Unavailable.UNREADABLE else gap)

    def _word(self, path: str) -> str | Unavailable:
        """The text at `path`; `N/A` of a parent holds for its children, too."""
        found = self.element.find(path)
        if found is None:
            parent, _, _ = path.rpartition("/")
            outer = self._word(parent) if parent else Unavailable.MISSING
            return outer if outer in (Unavailable.NOT_SUPPORTED, Unavailable.UNREADABLE) else Unavailable.MISSING
        text = one_line(found.text or "")
        if not text and len(found):
            return Unavailable.MISSING
        if _NOT_SUPPORTED.fullmatch(text):
            return Unavailable.NOT_SUPPORTED
        return Unavailable.UNREADABLE if _BROKEN.fullmatch(text) else text


@dataclass(frozen=True)
class Gpu(Fields):
    """One GPU. index: as nvidia-smi counts. address: `0000:1b:00.0`."""

    index: int
    address: str

    @property
    def device(self) -> str:
        """`GPU 3`."""
        return f"GPU {self.index}"

    @property
    def processes(self) -> tuple[GpuProcess, ...]:
        """The processes on it. Raises UnreadableError."""
        parent = self.element.find("processes")
        if parent is None or (not len(parent) and (parent.text or "").strip()):
            raise UnreadableError("its processes are not told")
        return tuple(_process(Fields(info)) for info in parent.findall("process_info"))

    def broken(self) -> Iterator[str]:
        """Every field that says an error instead of a value, as `name: what it said`."""
        for element in self.element.iter():
            text = (element.text or "").strip()
            # People choose the names of processes.
            if element.tag != "process_name" and text and _BROKEN.fullmatch(text):
                yield f"{element.tag}: {one_line(text)}"


@dataclass(frozen=True)
class SmiLog(Fields):
    """One answer. notes: what was printed around the XML."""

    notes: tuple[str, ...] = ()

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, in the order of nvidia-smi."""
        named = ((element, element.get("id", "")) for element in self.element.findall("gpu"))
        return tuple(
            Gpu(element, index, normal_address(name) or one_line(name)) for index, (element, name) in enumerate(named)
        )


def read_smi(section: Section) -> SmiLog | SmiTrouble:
    """The answer in `section`, or why there is none that may be believed."""
    text, silent = section.output, (SectionState.TIMED_OUT, SectionState.MISSING)
    if section.tool_missing:
        return SmiTrouble(SmiFailure.NOT_INSTALLED, "nvidia-smi, or the python3 to ask it, is not there")
    if section.state in silent:
        return SmiTrouble(SmiFailure.NO_ANSWER, section.trouble())
    begin, end = _DOCUMENT.search(text), text.rfind(_CLOSING) + len(_CLOSING)
    try:
        if not section.ok or begin is None or end < len(_CLOSING):
            raise ValueError(f"{section.trouble() or 'no whole XML'}: {one_line(text[-200:])}")
        root = parse_xml(text[begin.start() : end])
        if root.tag != "nvidia_smi_log" or len(root.findall("gpu")) > MAX_GPUS:
            raise ValueError(f"element {one_line(root.tag)} with {len(root.findall('gpu'))} GPUs")
    except ValueError as error:
        return _message(text) or SmiTrouble(SmiFailure.FAILED, one_line(str(error)))
    around = f"{text[: begin.start()]}\n{text[end:]}"
    return SmiLog(root, tuple(one_line(line) for line in around.splitlines() if line.strip()))


def parse_xml(text: str) -> Element:
    """The root element. Raises ValueError for what is no XML, or declares entities of its own."""
    # Of the real tool comes one plain line `<!DOCTYPE nvidia_smi_log SYSTEM "...">`.
    upper = text.upper()
    document_type = upper.partition("<!DOCTYPE")[2].partition(">")[0]
    if "<!ENTITY" in upper or upper.count("<!DOCTYPE") > 1 or "[" in document_type:
        raise ValueError("the XML declares entities, which nvidia-smi never does")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from error


def normal_address(text: str) -> str | None:
    """The first PCI address in `text` as sysfs spells it, `0000:1b:00.0`; None without one."""
    found = _ADDRESS.search(text)
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{domain[-4:]}:{bus}:{device}.{function or '0'}".lower()


_DOCUMENT = re.compile(r"<\?xml|<nvidia_smi_log>")
_CLOSING = "</nvidia_smi_log>"
_MESSAGES = (
    (SmiFailure.GPU_LOST, re.compile(r"unable to determine the device handle|GPU is lost|fallen off the bus", re.I)),
    (SmiFailure.NO_DRIVER, re.compile(r"couldn't communicate with the NVIDIA driver|driver is not loaded", re.I)),
    (SmiFailure.NO_DEVICES, re.compile(r"no devices were found", re.I)),
)


def _message(text: str) -> SmiTrouble | None:
    """The known complaint in `text`, if any."""
    for failure, pattern in _MESSAGES:
        for line in text.splitlines():
            if pattern.search(line):
                return SmiTrouble(failure, one_line(line), normal_address(line))
    return None


def _process(info: Fields) -> GpuProcess:
    pid, kind, name = _as_number(info.look("pid")), info.look("type"), info.look("process_name")
    return GpuProcess(
        0 if isinstance(pid, Unavailable) else int(pid),
        "?" if isinstance(kind, Unavailable) else kind,
        "?" if isinstance(name, Unavailable) else name,
    )


def _as_number(word: str | Unavailable) -> float | Unavailable:
    if isinstance(word, Unavailable):
        return word
    found = _NUMBER.fullmatch(word)
    return float(found[1]) if found else Unavailable.UNREADABLE


def needed(value: T | Unavailable) -> T:
    """The value. Raises NotApplicableError for what this GPU does not have, UnreadableError for any other gap."""
    if value is Unavailable.NOT_SUPPORTED:
        raise NotApplicableError("not supported by this GPU")
    if isinstance(value, Unavailable):
        raise UnreadableError(value.value, remedy="compare with `nvidia-smi -q` on the node")
    return value


@dataclass(frozen=True)
class GpuAddress:
    """Where a GPU sits: `index` as nvidia-smi counts, which is in the order of addresses; `pci_path` as in HcaPort.

    slot_width: how many lanes the bridge above it has at most; None where the kernel does not tell.
    """

    index: int
    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
    slot_width: int | None = None


@dataclass(frozen=True)
class PciDevices:
    """What sysfs lists. total: PCI devices of all vendors; 0 means that there is no PCI bus to look at. nvswitches: how
    many this machine can see; a virtual machine may see none and still use them."""

    total: int
    gpus: tuple[GpuAddress, ...]
    nvswitches: int


def read_pci_devices(section: Section) -> PciDevices | None:
    """The devices in `section`; None when it did not end properly or makes no sense."""

    def take(told: Any) -> PciDevices:
        devices = ((str(address), int(kind, 16) >> 8, *others) for address, kind, *others in told["devices"])
        rows = sorted(devices)
        # A GPU's audio and USB functions are devices of their own; NVSwitches are bridges of class "other".
        gpus = [row for row in rows if row[1] in (0x0300, 0x0302)]
        if None in [normal_address(row[0]) for row in rows]:
            raise ValueError("no address")
        places = (
            GpuAddress(index, pci_path(path) or (address,), int(numa) if numa.isdecimal() else None, lanes(slot))
            for index, (address, _, numa, path, slot) in enumerate(gpus)
        )
        return PciDevices(int(told["total"]), tuple(places), sum(row[1] == 0x0680 for row in rows))

    try:
        return section.read(take)
    except UnreadableError:
        return None
