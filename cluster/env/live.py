"""Compare the variables that are set on a node with the planned ones. Pure: sections of a probe in, differences out.

Only variables of the families below are read and shown: an environment also holds secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.env.plan import NodeEnvironment, is_mounted
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.survey.section import NodeProbe, UnreadableError, python_question
from engine.config.cluster import ContainerConfig

SESSION = "login"  # what a command over ssh inherits; of this machine: what burst itself inherited
_OURS = re.compile(r"(NCCL|GLOO|TORCH)_[A-Za-z0-9_]{1,120}|OMP_NUM_THREADS")
# NCCL_CONF_FILE and the file that it names are where the others come from; they decide nothing themselves.
HARMLESS = frozenset({"NCCL_CONF_FILE", "NCCL_VERSION"})
# A launch sets these for its run folder, which a plan made without that folder does not know.
_OF_A_RUN = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"})

# Ranks of runs of burst, of this network namespace only: a rehearsal node shares its processes with the machine.
# torchrun and supervisors are no ranks: what they lack says nothing.
LIVE = python_question(
    "env_live",
    30,
    f"ours = re.compile({_OURS.pattern!r})\n"
    r"""
def pick(settings):
    return {name.strip(): value[:4096] for name, value in settings if ours.fullmatch(name.strip())}


def split(lines):
    return [line.partition("=")[::2] for line in lines]


own_file = os.environ.get("NCCL_CONF_FILE") or "~/.nccl.conf"
files = {}
for name, path in (("/etc/nccl.conf", root / "etc/nccl.conf"), (own_file, pathlib.Path(own_file).expanduser())):
    if path.exists():
        files[name] = pick(split(path.read_text(errors="replace").splitlines()))
here = os.readlink("/proc/self/ns/net")
ranks = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        found = (process / "environ").read_bytes() if os.readlink(process / "ns/net") == here else b""
    except OSError:
        continue
    settings = dict(split(found.decode(errors="replace").split("\0")))
    if "BURST_RUN_ID" in settings and "RANK" in settings:
        ranks.append([process.name, settings["BURST_RUN_ID"], settings["RANK"], pick(settings.items())])
print(json.dumps({"login": pick(os.environ.items()), "files": files, "ranks": ranks}))
""",
)


@dataclass(frozen=True)
class LiveSource:
    """One place where variables are set: the ssh session, a file, a process. values: only names of our families.

    is_process: a rank is running with it, so it should be the whole plan.
    """

    place: str
    values: Mapping[str, str]
    is_process: bool = False


@dataclass(frozen=True)
class Difference:
    """One variable that is not as planned. planned, live: None where it is not set."""

    place: str
    name: str
    planned: str | None
    live: str | None

    @property
    def kind(self) -> str:
        """`unknown` to the plan, `missing` in a running process, or it `differs`."""
        return "unknown" if self.planned is None else "missing" if self.live is None else "differs"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with these names as keys."""
        return asdict(self) | {"kind": self.kind}


def read_live(probe: NodeProbe) -> tuple[LiveSource, ...]:
    """Every place where the node sets variables of ours. Raises ClusterError when one could not be looked at."""
    try:
        return probe.section(LIVE.name).read(live_sources)
    except UnreadableError as error:
        why = f"{error}: {error.evidence}" if error.evidence else str(error)
        raise ClusterError(f"{probe.node}: cannot see all that is set: {why}") from error


def reaching_ranks(sources: Iterable[LiveSource], container: ContainerConfig) -> tuple[LiveSource, ...]:
    """The sources that ranks see. In a container neither the session nor files of the node count, but those mounted."""
    if container.runtime != "docker":
        return tuple(sources)
    return tuple(
        one for one in sources if one.is_process or (one.place != SESSION and is_mounted(one.place, container))
    )


def compare_live(environment: NodeEnvironment, live: Iterable[LiveSource]) -> tuple[Difference, ...]:
    """Where what is set is not what is planned.

    A variable that the plan does not know reaches ranks all the same, unless the launch clears it. A planned one that a
    session lacks is fine, since the launch sets it; a running rank that lacks it runs without it.
    """
    planned = {variable.name: variable.value for variable in environment.variables}
    found: list[Difference] = []
    for source in live:
        for name, value in sorted(source.values.items()):
            if value != planned.get(name) and (name in planned or _matters(name, source)):
                found.append(Difference(source.place, name, planned.get(name), value))
        for name, value in planned.items() if source.is_process else ():
            if name not in source.values:
                found.append(Difference(source.place, name, value, None))
    return tuple(found)


def _matters(name: str, source: LiveSource) -> bool:
    """Whether a variable that the plan does not set decides on the network: TORCH_ and OMP_ ones have other users."""
    if name in HARMLESS or (source.is_process and name in _OF_A_RUN):
        return False
    return name.startswith(("NCCL_", "GLOO_"))


def live_sources(told: Any) -> tuple[LiveSource, ...]:
    """Every place, in the answer to LIVE. Raises what `Section.read` makes an UnreadableError of."""
    found = [LiveSource(SESSION, _values(told["login"]))]
    found += [LiveSource(one_line(name, 120), _values(values)) for name, values in told["files"].items()]
    for pid, run, rank, values in told["ranks"]:
        place = f"rank {one_line(rank, 12)} of run {one_line(run, 60)} (process {int(pid)})"
        found.append(LiveSource(place, _values(values), is_process=True))
    return tuple(found)


def _values(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: one_line(value, 4096) for name, value in settings.items() if _OURS.fullmatch(name)}
