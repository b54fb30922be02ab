"""What is on one node, as checks and environment see it: asked in one go, of a node or of this machine, with memory and
time bounded whatever comes back; read when it is first asked for.

What the frame protects against. Output of tools holds words of strangers: kernel log lines, names of processes, of
files, of network interfaces. They cannot know the fence, 128 random bits that live in one shell variable for one probe,
so nothing that they print begins or ends a section. On top of that an answer is believed only where its frame is exact:
a section that begins twice, ends without beginning, or is open when another begins counts as CUT_OFF, so that lines put
in between make a section unknown, never good.

What no frame can protect against: root on the node runs the probe and may invent the whole answer. It can lie about its
own node, and about nothing else: each node has its own connection, fence and answer.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from cluster.errors import SshError, SshFailure
from cluster.remote_text import clean_text, one_line
from cluster.ssh.connection import Connection, RemoteProcess
from cluster.ssh.hosts import is_host_name
from cluster.survey.drivers import (
    LSPCI,
    SMI,
    Gpu,
    GpuAddress,
    PciDevices,
    SmiFailure,
    SmiLog,
    SmiTrouble,
    read_pci_devices,
    read_smi,
)
from cluster.survey.network import (
    CARRIERS,
    LINKS,
    Carriers,
    InterfaceChoice,
    Network,
    explain_interface,
    read_carriers,
    read_network,
)
from cluster.survey.rdma import GPUDIRECT, PORTS, Adapters, GpuDirect, parse_adapters, parse_gpudirect
from cluster.survey.section import FIND_PYTHON, NodeProbe, Question, Section, SectionState, UnreadableError
from engine.config.cluster import ClusterConfig

ANSWER_BYTES = 4 << 20
DEFAULT_TIMEOUT_S = 60.0
_CLOCK_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_CLOCK = re.compile(rb"\s*(\d{1,11})(\.\d{1,9})?")
_END_WAIT_S = 2.0


def survey_node(
    connection: Connection,
    questions: Iterable[Question],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> NodeProbe:
    """The answer of a node to `questions` in about `timeout_s`. settings: variables that their scripts read.

    Raises SshError while nothing has been asked yet; after that, whatever came until the node fell silent, broke off or
    sent too much is the answer, `trouble` says so, and what is missing in it is CUT_OFF or MISSING.
    """
    deadline = time.monotonic() + timeout_s
    offset_s, error_s = _read_clock(connection, min(timeout_s, _CLOCK_TIMEOUT_S))
    fence = new_delimiter()
    given = {} if connection.host.python is None else {"BURST_PYTHON": connection.host.python}
    script = build_script(questions, fence, {**settings, **given})
    process = connection.start(["sh", "-s"])
    try:
        answer, trouble = _converse(process, script, fence, deadline, timeout_s)
    finally:
        process.close()
    return NodeProbe(connection.host.name, read_sections(answer, fence), offset_s, error_s, trouble)


def survey_here(
    questions: Iterable[Question],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> NodeProbe:
    """The answer of this machine to `questions`, named after it."""
    name = socket.gethostname()
    fence = new_delimiter()
    trouble = ""
    # Files, not pipes: what hangs in the kernel may hold a pipe open for ever. A session of its own, so that all of it
    # can be ended; what runs under `timeout` ends by its own limit.
    with tempfile.TemporaryFile() as script, tempfile.TemporaryFile() as output:
        script.write(build_script(questions, fence, settings))
        script.seek(0)
        command = ["sh", "-s"]
        with subprocess.Popen(command, stdin=script, stdout=output, stderr=output, start_new_session=True) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                trouble = _late(timeout_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        answer = output.read(ANSWER_BYTES)
    if not trouble and not is_complete(answer, fence):
        trouble = f"the shell ended with exit code {process.returncode} before the answer was complete"
    return NodeProbe(name if is_host_name(name) else "localhost", read_sections(answer, fence), trouble=trouble)


def _read_clock(connection: Connection, timeout_s: float) -> tuple[float | None, float]:
    """(offset, by how much that may be wrong) by a command that does next to nothing.

    busybox tells whole seconds only.
    """
    sent_at, begin = time.time(), time.monotonic()
    result = connection.run(["date", "+%s.%N"], timeout_s=timeout_s)
    round_trip = time.monotonic() - begin
    found = _CLOCK.match(result.stdout) if result.exit_code == 0 else None
    if found is None:
        return None, 0.0
    fraction = found.group(2)
    # Whole seconds are cut, not rounded: the middle of that second is the best guess.
    told = float(found.group(1)) + (float(fraction) if fraction else 0.5)
    error = round_trip / 2 + (0.0 if fraction else 0.5)
    return told - (sent_at + round_trip / 2), error


def _converse(
    process: RemoteProcess, script: bytes, fence: str, deadline: float, timeout_s: float
) -> tuple[bytes, str]:
    """(what the script printed, what is wrong with it in words)."""
    process.feed(script)
    answer = bytearray()
    while not is_complete(answer, fence):
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(answer), _late(timeout_s)
        try:
            data = process.read(_READ_BYTES, left)
        except SshError as error:
            late = error.kind is SshFailure.COMMAND_TIMEOUT
            return bytes(answer), _late(timeout_s) if late else error.detail
        if not data:
            return bytes(answer), _why_ended(process, bytes(answer), fence)
        answer += data
        if len(answer) > ANSWER_BYTES:
            return bytes(answer[:ANSWER_BYTES]), f"the answer is longer than {ANSWER_BYTES >> 20} MiB; the rest is lost"
    return bytes(answer), ""


def _late(timeout_s: float) -> str:
    return f"the answer was not complete within {timeout_s:.3g} s"


def _why_ended(process: RemoteProcess, answer: bytes, fence: str) -> str:
    """Why the answer is at its end without being complete."""
    try:
        result = process.wait(_END_WAIT_S)
    except SshError as error:
        return f"the answer broke off: {error.detail}"
    said = one_line(result.stderr) or ("" if fence.encode() in answer else one_line(answer))
    code = "a signal" if result.exit_code is None else f"exit code {result.exit_code}"
    return f"the shell of the node ended with {code} before the answer was complete{f': {said}' if said else ''}"


SECTION_BYTES = 1 << 20
_TIMED_OUT_CODES = (124, 137, 143)  # of timeout(1): its own, ended by KILL, ended by TERM (busybox)
_MARK = re.compile(rb"(begin|end) ([a-z0-9_.-]{1,64})(?: (\d{1,3}))?")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_HEAD = r"""
# The head of every probe. $fence is set before it: a word that no output can guess. It is never exported and never an
# argument of a process, so that only this shell knows it.
# BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in what is read: a rehearsal node has a tree of its own.
LC_ALL=C
export LC_ALL
root=${BURST_PROBE_ROOT:-}
export root
PATH=$PATH:/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin
export PATH

# What ignores TERM is killed. A process stuck in the kernel (state D) cannot be, and timeout waits for it for ever: the
# outer one then kills the waiting one, and the probe goes on.
limited() { timeout -s KILL $(($1 + 5)) timeout -k 2 "$1" sh -s; }

# Programs are run by python3; by $BURST_PYTHON where that is missing or too old.
if [ -n "${BURST_PYTHON:-}" ]; then
    python3=$(limited 10 <<'END'
FIND_PYTHON
find_python "$BURST_PYTHON" && printf %s "$python"
END
    )
    export python3
fi

# section NAME SECONDS AFTER <<'END' ... END    runs the lines below in a shell of their own, with a time limit.
late=
section() {
    case " $late " in *" $3 "*) return 0 ;; esac
    printf '\n%s begin %s\n' "$fence" "$1"
    limited "$2" 2>&1
    code=$?
    case $code in 124 | 137 | 143) late="$late $1" ;; esac
    printf '\n%s end %s %s\n' "$fence" "$1" "$code"
}
""".replace("FIND_PYTHON", FIND_PYTHON)


def new_delimiter() -> str:
    """A word that begins every line which cuts the answer; nothing a node prints can contain it by chance or intent."""
    return f"@@{secrets.token_hex(16)}"


def build_script(
    questions: Iterable[Question], fence: str, settings: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """The script for `sh -s`: exported `settings`, the head, every question once, and a last line: nothing more comes.

    Raises ValueError for a setting that is no name of a variable, or whose value holds NUL.
    """
    for name, value in settings.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise ValueError(f"not a variable of a shell: {name!r}")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    asked = {question.name: question for question in questions}.values()
    sections = [f"section {one.name} {one.limit_s} {one.after or '-'} <<'END'\n{one.script}\nEND" for one in asked]
    tail = "printf '\\n%s done\\n' \"$fence\"\n"
    return "\n".join([f"fence='{fence}'", *exports, _HEAD, *sections, tail]).encode()


def is_complete(answer: bytes | bytearray, fence: str) -> bool:
    """Whether the script's last line has been answered; a process left behind may hold the stream open for ever."""
    return answer[-2 * len(fence) :].rstrip().endswith(f"\n{fence} done".encode())


def read_sections(answer: bytes, fence: str) -> Mapping[str, Section]:
    """The sections of an answer, by name. One whose frame is not exact is CUT_OFF, and so is one that is too long."""
    lines = [*re.finditer(rb"^" + fence.encode() + rb"(?: ([^\n]*))?$", answer, re.MULTILINE)]
    marks = [_MARK.fullmatch(line[1] or b"") for line in lines]
    ends = [*(line.start() for line in lines[1:]), len(answer)]
    sections: dict[str, Section] = {}
    for line, end, before, mark, after in zip(lines, ends, [None, *marks], marks, [*marks[1:], None], strict=False):
        if mark is None:
            continue
        name = mark[2].decode()
        if mark[1] == b"begin" and mark[3] is None and name not in sections:
            sections[name] = _section(name, answer[line.end() + 1 : end], after if _closes(mark, after) else None)
        elif not _closes(before, mark):
            sections[name] = Section(name, state=SectionState.CUT_OFF)
    return sections


def _closes(begin: re.Match[bytes] | None, end: re.Match[bytes] | None) -> bool:
    if begin is None or end is None or begin[2] != end[2]:
        return False
    return (begin[1], end[1]) == (b"begin", b"end") and begin[3] is None and end[3] is not None


def _section(name: str, text: bytes, end: re.Match[bytes] | None) -> Section:
    section = Section(name, clean_text(text[:SECTION_BYTES]).strip("\n"), state=SectionState.CUT_OFF)
    if end is None or len(text) > SECTION_BYTES:
        return section
    if int(end[3]) in _TIMED_OUT_CODES:
        return replace(section, state=SectionState.TIMED_OUT)
    return replace(section, state=SectionState.ENDED, exit_code=int(end[3]))


# --- facts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node; what cannot be read raises UnreadableError where it is asked for."""

    probe: NodeProbe
    config: ClusterConfig

    @property
    def node(self) -> str:
        """Its name."""
        return self.probe.node

    @property
    def in_containers(self) -> bool:
        """Whether ranks run in containers."""
        return self.config.container.runtime == "docker"

    def section(self, question: Question) -> Section:
        """What came of one question."""
        return self.probe.section(question.name)

    @cached_property
    def adapters(self) -> Adapters:
        """InfiniBand and RoCE."""
        return parse_adapters(self.section(PORTS))

    @cached_property
    def gpudirect(self) -> GpuDirect:
        """Whether adapters reach GPU memory."""
        return parse_gpudirect(self.section(GPUDIRECT))

    @property
    def reaches_gpus(self) -> bool | None:
        """Whether adapters can read GPU memory themselves; None: not known."""
        try:
            return self.gpudirect.works
        except UnreadableError:
            return None

    @cached_property
    def carriers(self) -> Carriers:
        """Which interfaces lead to storage, and its cores."""
        return read_carriers(self.section(CARRIERS))

    @cached_property
    def network(self) -> Network:
        """Every network interface."""
        return read_network(self.section(LINKS))

    @cached_property
    def interface(self) -> InterfaceChoice:
        """The interface that nodes talk over."""
        return explain_interface(self.network.interfaces, self.config.interface)

    @cached_property
    def smi(self) -> SmiLog | SmiTrouble:
        """What nvidia-smi says, or why it says nothing."""
        return read_smi(self.section(SMI))

    @cached_property
    def smi_log(self) -> SmiLog:
        """What nvidia-smi says."""
        if isinstance(self.smi, SmiLog):
            return self.smi
        raise UnreadableError(f"nvidia-smi: {self.smi.failure.value}", remedy="see gpu.nvidia_smi")

    @cached_property
    def pci(self) -> PciDevices | None:
        """The devices of NVIDIA that sysfs lists; None if unreadable."""
        return read_pci_devices(self.section(LSPCI))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that nvidia-smi lists; none while it does not answer."""
        return self.smi.gpus if isinstance(self.smi, SmiLog) else ()

    @property
    def has_no_gpus(self) -> bool:
        """Whether it has none, and none is expected: sysfs was read and lists none, no tool claims one."""
        if self.pci is None or self.pci.gpus or self.config.expected.gpus:
            return False
        if isinstance(self.smi, SmiLog):
            return not self.smi.gpus and self.smi.look("attached_gpus") == "0"
        # Without a PCI bus to look at, a tool that is installed and fails may be hiding GPUs. A driver that runs and
        # finds no device (NO_DEVICES) has lost those it was loaded for.
        absent = {SmiFailure.NOT_INSTALLED, SmiFailure.NO_DRIVER}
        return self.smi.failure in (absent if self.pci.total else {SmiFailure.NOT_INSTALLED})

    def device(self, address: str) -> str:
        """`GPU 3` for a PCI address that nvidia-smi or sysfs lists, else the address."""
        index = next((gpu.index for gpu in self.gpu_addresses if gpu.pci_path[-1] == address), None)
        return address if index is None else f"GPU {index}"

    @cached_property
    def gpu_addresses(self) -> tuple[GpuAddress, ...]:
        """Where the GPUs sit, by index: in the order of nvidia-smi, or of the PCI bus while it does not answer."""
        places = {gpu.pci_path[-1]: gpu for gpu in self.pci.gpus} if self.pci is not None else {}
        told = [replace(places.get(gpu.address, GpuAddress(0, (gpu.address,))), index=gpu.index) for gpu in self.gpus]
        return tuple(told or places.values())
