"""What is installed on a node for ranks: Python, its packages, NCCL settings that lie around."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checks.finding import Check, Finding
from cluster.checks.group import AbsentError, CheckGroup, known
from cluster.env.live import HARMLESS, LIVE, live_sources
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Question, UnreadableError
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
python=${BURST_PYTHON:-python3}
case $python in "~/"*) python=$HOME/${python#"~/"} ;; esac
command -v "$python" >/dev/null 2>&1 || { echo null; exit 0; }
# The versions are in the packages' metadata: importing torch would take seconds.
"$python" - <<'PYTHON' 2>/dev/null
import json, sys
try:
    from importlib.metadata import distributions
    found = {}
    for one in distributions():
        name = (one.metadata["Name"] or "").lower().replace("_", "-")
        if name == "torch" or name.startswith("nvidia-nccl-cu"):
            found.setdefault(name, one.version)
except Exception:
    found = None
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "packages": found}))
PYTHON
""",
)


@dataclass(frozen=True)
class Software:
    """Versions on the node itself. python: None when there is none. packages: None when Python cannot list them."""

    python: str | None = None
    packages: Mapping[str, str] | None = None

    @property
    def torch(self) -> str | None:
        """Version of PyTorch; None when there is none."""
        return (self.packages or {}).get("torch")

    @property
    def nccl(self) -> str | None:
        """Version of the NCCL package that PyTorch wheels bring; None when there is none."""
        return next((found for name, found in sorted((self.packages or {}).items()) if name != "torch"), None)


def read_software(facts: NodeFacts) -> Software:
    """Raises UnreadableError."""

    def take(told: Any) -> Software:
        if told is None:
            return Software()
        python, packages = told["python"], told["packages"]
        if re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", python) is None:
            raise ValueError("no version of Python")
        found = None if packages is None else {name: str(version) for name, version in packages.items()}
        return Software(python, found)

    return facts.section(SOFTWARE).read(take)


def check_python(check: Check, facts: NodeFacts) -> list[Finding]:
    """Python on the node is new enough for ranks; where they run in containers, for their supervisor."""
    software = read_software(facts)
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
    torch = _software_of_ranks(facts).torch
    if torch is None:
        text = f"{facts.config.python or 'python3'}, the Python of the ranks, has no PyTorch"
        return [check.warn(text, "install burst there, or name another by cluster.python")]
    return [check.ok(torch)]


def check_nccl(check: Check, facts: NodeFacts) -> list[Finding]:
    """NCCL has the same version everywhere; different ones do not talk to each other."""
    nccl = _software_of_ranks(facts).nccl
    return [check.ok(nccl) if nccl else check.skip("not a package of its own")]


def _software_of_ranks(facts: NodeFacts) -> Software:
    """Software with packages. Raises UnreadableError, and AbsentError where the node has nothing to do with it."""
    software = read_software(facts)
    if facts.in_containers:
        raise AbsentError("ranks use that of the image")
    if software.python is None:
        raise AbsentError("no python3")
    if software.packages is None:
        raise UnreadableError(f"Python {software.python} cannot list its packages")
    return software


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
    """(place, name, value) of every setting of NCCL. Raises UnreadableError."""
    return [
        (source.place, name, value)
        for source in facts.section(LIVE).read(live_sources)
        for name, value in sorted(source.values.items())
        if not source.is_process and name.startswith("NCCL_") and name not in HARMLESS
    ]


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have alike: where ranks run in containers, nothing of Python, for the image has its own."""
    software = Software() if facts.in_containers else known(read_software, facts) or Software()
    return {
        "host.python": software.python,
        "host.torch": software.torch,
        "host.nccl": software.nccl,
        "host.nccl_conf": known(nccl_trait, facts),
    }


def _settings(config: ClusterConfig) -> Mapping[str, str | None]:
    return {"BURST_PYTHON": config.python if config.container.runtime == "bare" else None}


GROUP = CheckGroup(
    "host",
    (check_python, check_torch, check_nccl, check_nccl_conf),
    questions=(SOFTWARE, LIVE),
    settings=_settings,
    traits=_traits,
)
