"""What is installed on a node for ranks: Python and its packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checks.finding import Check, Finding
from cluster.checks.group import CheckGroup, known
from cluster.remote_text import plain_path
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Question, fill
from engine.config.cluster import ClusterConfig

VERSIONS = "host.versions"
OLDEST_PYTHON = (3, 11)  # of ranks
OLDEST_NODE_PYTHON = (3, 9)  # of what supervises them

SOFTWARE = Question(
    "host.software",
    15,
    r"""
python=${BURST_PYTHON:-python3}
case $python in "~/"*) python=$HOME/${python#"~/"} ;; esac
command -v "$python" >/dev/null 2>&1 || { echo null; exit 0; }
# The versions are in the packages' metadata: importing torch would take seconds.
"$python" - <<'PYTHON' 2>/dev/null
import json, os, sys
from importlib.metadata import distributions, version
from importlib.util import find_spec

def tell(name):
    # None: not there; "": there, and does not say.
    try:
        return version(name)
    except Exception:
        return "" if find_spec(name) else None

names = (os.environ.get("BURST_MODULES") or "torch").split()
packages = (one.metadata["Name"] or "" for one in distributions())
nccl = [name for name in packages if name.lower().replace("_", "-").startswith("nvidia-nccl-cu")]
told = {"python": "%d.%d.%d" % sys.version_info[:3], "executable": sys.executable}
print(json.dumps(dict(told, modules={name: tell(name) for name in names}, nccl=version(nccl[0]) if nccl else None)))
PYTHON
""",
)


@dataclass(frozen=True)
class Software:
    """The Python of the ranks. modules: version by name, "" if it does not say; None: not installed. nccl: of the
    package that PyTorch wheels bring."""

    python: str
    executable: str
    modules: Mapping[str, str | None]
    nccl: str | None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", self.python):
            raise ValueError("no version of Python")

    @property
    def version(self) -> tuple[int, ...]:
        """(3, 11, 2)."""
        return tuple(map(int, self.python.split(".")))


def read_software(facts: NodeFacts) -> Software | None:
    """None where there is no such Python. Raises UnreadableError."""

    def take(told: Any) -> Software | None:
        if told is None:
            return None
        software: Software = fill(Software, {**told, "executable": plain_path(told["executable"])})
        return software

    return facts.section(SOFTWARE).read(take)


def check_python(check: Check, facts: NodeFacts) -> list[Finding]:
    """Python on the node can run ranks, is new enough and has what they import; where they run in containers, it is
    new enough for what supervises them."""
    software, name = read_software(facts), facts.config.python or "python3"
    oldest = ".".join(map(str, OLDEST_NODE_PYTHON if facts.in_containers else OLDEST_PYTHON))
    remedy = "set cluster.python to one, or use cluster.container.runtime=docker"
    check = check.expecting(f"Python {oldest} or newer")
    if facts.in_containers:
        remedy = f"install Python {oldest} or newer as python3: it supervises ranks"
    if software is None:
        return [check.fail(f"cannot run {name}", remedy)]
    text = f"{software.executable} is Python {software.python}"
    if software.version < OLDEST_NODE_PYTHON:
        return [check.fail(text, remedy)]
    if facts.in_containers:
        return [check.ok(software.python)]
    if software.version < OLDEST_PYTHON:
        return [check.warn(text, remedy)]
    missing = ", ".join(name for name, version in software.modules.items() if version is None)
    if missing:
        remedy = "install it there, or set cluster.python to one that has it"
        return [check.expecting("").warn(f"{software.executable} has no {missing}", remedy)]
    return [check.ok(software.python)]


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have alike: where ranks run in containers, nothing of Python, for the image has its own."""
    software = None if facts.in_containers else known(read_software, facts)
    return {} if software is None else {VERSIONS: _versions(software)}


def _versions(software: Software) -> str:
    """`Python 3.11, torch 2.13.0, NCCL 2.29.3`; the last figure of Python's version harms nobody."""
    found = {"torch": software.modules.get("torch"), "NCCL": software.nccl}
    said = (f"{name} {version}" for name, version in found.items() if version)
    return ", ".join((f"Python {software.version[0]}.{software.version[1]}", *said))


def _settings(config: ClusterConfig) -> Mapping[str, str | None]:
    return {"BURST_PYTHON": config.python if config.container.runtime == "bare" else None}


GROUP = CheckGroup(
    "host",
    (check_python,),
    questions=(SOFTWARE,),
    settings=_settings,
    traits=_traits,
    compared={VERSIONS: "Ranks run with the same on all nodes: Python, PyTorch and NCCL, or the image."},
)
