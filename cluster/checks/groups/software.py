"""What is installed on a node for ranks: Python, its packages, NCCL settings that lie around."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.checks.finding import Check, Finding
from cluster.checks.group import CheckGroup, known
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.lines import Answer
from cluster.survey.section import Question
from engine.config.cluster import ClusterConfig

OLDEST_PYTHON = (3, 11)  # of ranks
OLDEST_NODE_PYTHON = (3, 9)  # of what supervises them
# Left behind after debugging, each of these makes a run slow without a word.
CRIPPLING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_IGNORE_NET_MISMATCH": "1",
    "NCCL_DEBUG": "TRACE",
}

SOFTWARE = Question(
    "host.software",
    15,
    r"""
printf 'runtime %s\n' "${BURST_RUNTIME:-bare}"
python=${BURST_PYTHON:-python3}
case $python in "~/"*) python=$HOME/${python#"~/"} ;; esac
if command -v "$python" >/dev/null 2>&1; then
    # The versions are in the packages' metadata: importing torch would take seconds.
    "$python" - <<'PYTHON' 2>/dev/null || echo 'failed python'
import sys
print("python %d.%d.%d" % sys.version_info[:3], flush=True)
from importlib.metadata import distributions
found = {}
for one in distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-")
    if name == "torch" or name.startswith("nvidia-nccl-cu"):
        found.setdefault(name, one.version)
for name in sorted(found):
    print("package %s %s" % (name, found[name]))
print("packages read")
PYTHON
else
    echo 'absent python'
fi
exit 0
""",
)

NCCL_SETTINGS = Question(
    "host.nccl",
    5,
    r"""
# Nothing but NCCL_* is read out: other variables and lines may hold secrets.
show() {
    if [ ! -e "$2" ]; then printf 'absent %s\n' "$1"; return; fi
    [ -r "$2" ] || { printf 'unreadable %s\n' "$1"; return; }
    while read -r line || [ -n "$line" ]; do
        case $line in NCCL_*=*) printf '%s %.300s\n' "$1" "$line" ;; esac
    done <"$2"
}
file=$root/etc/nccl.conf
[ -e "$file" ] || file=/etc/nccl.conf
show system "$file"
show user "${NCCL_CONF_FILE:-${HOME:-/}/.nccl.conf}"
env | while read -r line; do
    case $line in NCCL_*=*) printf 'session %.300s\n' "$line" ;; esac
done
echo end
""",
)


@dataclass(frozen=True)
class Software:
    """Versions on the node itself. python: None when there is none. is_listed: whether its packages are known."""

    python: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    is_listed: bool = False

    @property
    def nccl(self) -> str | None:
        """Version of the NCCL package that PyTorch wheels bring; None when there is none."""
        return next((found for name, found in sorted(self.packages.items()) if name != "torch"), None)


def read_software(answer: Answer) -> Software:
    """From `host.software`."""
    answer.value("runtime")
    if "python" in answer.values("absent"):
        return Software()
    python = answer.value("python")
    if re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", python) is None:
        raise answer.unreadable("no version of Python")
    is_listed = "read" in answer.values("packages")
    return Software(python, answer.pairs("package") if is_listed else {}, is_listed)


def own_software(facts: NodeFacts) -> Software:
    """What all nodes must have alike: nothing where ranks run in containers, and the image's versions count."""
    answer = facts.answer(SOFTWARE)
    return Software() if answer.value("runtime") == "docker" else read_software(answer)


def check_python(check: Check, facts: NodeFacts) -> list[Finding]:
    """Python on the node is new enough for ranks; where they run in containers, for their supervisor."""
    software = read_software(facts.answer(SOFTWARE))
    oldest = ".".join(map(str, OLDEST_NODE_PYTHON if facts.in_containers else OLDEST_PYTHON))
    bare = ", or set cluster.container.runtime=docker"
    remedy = f"install Python {oldest} or newer{' as python3: it supervises ranks' if facts.in_containers else bare}"
    if software.python is None:
        return [check.fail("no python3", remedy)]
    version = tuple(int(part) for part in software.python.split(".")[:2])
    if version < OLDEST_NODE_PYTHON:
        return [check.fail(f"{software.python} is older than {oldest}", remedy)]
    if version < OLDEST_PYTHON and not facts.in_containers:
        return [check.warn(f"{software.python} is older than {oldest}", remedy)]
    return [check.ok(software.python)]


def check_torch(check: Check, facts: NodeFacts) -> list[Finding]:
    """PyTorch is installed in the same version everywhere, where ranks run without a container."""
    software = read_software(facts.answer(SOFTWARE))
    other = _not_looked_for(check, facts, software)
    if other is not None:
        return [other]
    if "torch" not in software.packages:
        text = f"{facts.config.python or 'python3'}, the Python of the ranks, has no PyTorch"
        return [check.warn(text, "install burst there, or name another by cluster.python")]
    return [check.ok(software.packages["torch"])]


def check_nccl(check: Check, facts: NodeFacts) -> list[Finding]:
    """NCCL has the same version everywhere; different ones do not talk to each other."""
    software = read_software(facts.answer(SOFTWARE))
    found = check.ok(software.nccl) if software.nccl else check.skip("not a package of its own")
    return [_not_looked_for(check, facts, software) or found]


def _not_looked_for(check: Check, facts: NodeFacts, software: Software) -> Finding | None:
    if facts.in_containers:
        return check.skip("ranks use that of the image")
    if software.python is None:
        return check.skip("no python3")
    return None if software.is_listed else check.unknown(f"Python {software.python} cannot list its packages")


def check_nccl_conf(check: Check, facts: NodeFacts) -> list[Finding]:
    """NCCL settings that lie around on the node: /etc/nccl.conf, ~/.nccl.conf, the session."""
    named = _read_settings(facts)
    check = check.expecting("nothing that switches a fast path off")
    if not named:
        return [check.ok("no NCCL_* is set")]
    text = ", ".join(f"{name}={one_line(value, 60)} ({place})" for place, name, value in named)
    bad = sorted({name for _, name, value in named if CRIPPLING.get(name) == value.strip()})
    return [check.warn(text, f"remove {', '.join(bad)}, or know why it is there") if bad else check.ok(text)]


def nccl_trait(facts: NodeFacts) -> str:
    """All settings as one text, for comparing nodes."""
    return ", ".join(f"{place}: {name}={value}" for place, name, value in _read_settings(facts)) or "none"


def _read_settings(facts: NodeFacts) -> list[tuple[str, str, str]]:
    """(place, name, value) of every NCCL_*. Raises UnreadableError."""
    answer = facts.answer(NCCL_SETTINGS)
    hidden = answer.values("unreadable")
    if answer.last != "end" or hidden:
        files = " and the ".join(hidden)
        raise answer.unreadable(f"no permission to read the {files} file" if hidden else "it stops midway")
    places = {"system": "/etc/nccl.conf", "user": "~/.nccl.conf", "session": "session"}
    told = {key: dict(line.partition("=")[::2] for line in answer.values(key)) for key in places}
    return [(place, name, value) for key, place in places.items() for name, value in sorted(told[key].items())]


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    return {
        "host.python": known(lambda facts: own_software(facts).python, facts),
        "host.torch": known(lambda facts: own_software(facts).packages.get("torch"), facts),
        "host.nccl": known(lambda facts: own_software(facts).nccl, facts),
        "host.nccl_conf": known(nccl_trait, facts),
    }


def _settings(config: ClusterConfig) -> Mapping[str, str | None]:
    runtime = config.container.runtime
    return {"BURST_RUNTIME": runtime, "BURST_PYTHON": config.python if runtime == "bare" else None}


GROUP = CheckGroup(
    "host",
    (check_python, check_torch, check_nccl, check_nccl_conf),
    questions=(SOFTWARE, NCCL_SETTINGS),
    settings=_settings,
    traits=_traits,
)
