"""What is in force on a node, against the plan: variables that are set, and what NCCL's own log says that it took.

Pure: sections of a probe and text in, differences and findings out.

Only variables of the families below are read and shown: an environment also holds secrets. Lines of the log as NCCL
writes them with NCCL_DEBUG=INFO:

    node1:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>
    node1:4711:4790 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.checks.check import Check, Finding
from cluster.env.plan import NodeEnvironment, is_mounted
from cluster.errors import ClusterError
from cluster.remote_text import clean_text, one_line
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


# --- NCCL's log -------------------------------------------------------------------------------------------------------


# Before the host may stand what a launcher puts there.
_LINE = re.compile(r"(?<![A-Za-z0-9_.:-])([A-Za-z0-9_][A-Za-z0-9_.-]*):\d+:\d+ \[-?\d+\] NCCL (?:INFO|WARN) (.*)")
_PORT = re.compile(r"\[\d+\]([A-Za-z0-9_.-]+:\d+)/(?:IB|RoCE|uIB|uRoCE)")
# What a line may say. A plugin has a name of its own: NET/IBext_v10.
_SAYINGS = {
    "ports": re.compile(r"NET/IB\w* : (?:Using|No device found)(.*)"),
    "socket": re.compile(r"NET/Socket : (Using)"),
    "network": re.compile(r"Using network (.*)"),
    "channel": re.compile(r".*?\bvia NET/(\S+)"),
    "interface": re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([^\s:]+):"),
}
_LINE_CHARACTERS = 4000
_CHECK = "env.nccl_log"

# kind of saying -> what it says -> (how often, the first line that says so)
_Seen = dict[str, dict[str, tuple[int, str]]]


def sockets_line(text: str) -> str | None:
    """The line of a node's log by which NCCL took sockets for what goes between nodes; None without one."""
    return next((line for one in _read(text).values() if (line := _sockets(one))), None)


def check_nccl_log(text: str, environments: Mapping[str, NodeEnvironment]) -> list[Finding]:
    """Findings per planned node that the log speaks of; UNKNOWN where it says nothing about the network.

    Hosts of the log are matched to nodes by name, with or without domain; with one node planned, every line is its own.
    """
    seen = _read(text)
    if len(environments) == 1 and len(seen) == 1:
        return [one for node, plan in environments.items() for one in _judge(node, plan, *seen.values())]
    by_name = {_short(host): one for host, one in seen.items()}
    found = [
        finding
        for node, environment in environments.items()
        for finding in _judge(node, environment, by_name.pop(_short(node), {}))
    ]
    return found + [Check(host, _CHECK).unknown("a host of the log that is no node of this plan") for host in by_name]


def _read(text: str) -> dict[str, _Seen]:
    """What each host of the log says."""
    seen: dict[str, _Seen] = {}
    for raw in text.splitlines():
        line = clean_text(raw[:_LINE_CHARACTERS]) if "NCCL" in raw[:_LINE_CHARACTERS] else ""
        host = _LINE.search(line)
        for kind, pattern in _SAYINGS.items() if host is not None else ():
            assert host is not None
            one, said = seen.setdefault(host[1], {}), pattern.match(host[2])
            if said is None:
                continue
            values = one.setdefault(kind, {})
            for value in ["", *_PORT.findall(said[1])] if kind == "ports" else [_value(kind, said[1])]:
                count, first = values.get(value, (0, one_line(line)))
                values[value] = count + 1, first
    return seen


def _value(kind: str, word: str) -> str:
    """`Socket`, `IB`, or `IB GDRDMA` of a channel; else the word."""
    if kind != "channel":
        return word.strip()
    network = "IB" if word.startswith("IB") else word.split("/")[0]
    return f"{network} GDRDMA" if "/GDRDMA" in word else network


def _sockets(seen: _Seen) -> str | None:
    """The line by which sockets carry what goes between nodes; None without one."""
    networks = {name.lower(): line for name, (_, line) in seen.get("network", {}).items()}
    if "Socket" in seen.get("channel", {}):
        return seen["channel"]["Socket"][1]
    return networks.get("socket") if networks else seen.get("socket", {}).get("Using", (0, None))[1]


def _judge(node: str, environment: NodeEnvironment, seen: _Seen) -> list[Finding]:
    planned = {port.name for port in environment.kept}
    found = [*_judge_ports(node, planned, seen), *_judge_network(node, planned, seen)]
    check, remedy = (
        Check(node, f"{_CHECK}.interface", environment.interface or ""),
        "is NCCL_SOCKET_IFNAME set as planned?",
    )
    for name, (_, line) in seen.get("interface", {}).items() if environment.interface else ():
        if name != environment.interface:
            found.append(check.fail(f"NCCL meets the other ranks over {name}", remedy, line))
    advice = "run with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET (`burst env show --run DIR` plans both)"
    return found or [Check(node, _CHECK).unknown("the log does not say what NCCL uses", advice)]


def _judge_ports(node: str, planned: set[str], seen: _Seen) -> Iterable[Finding]:
    if "ports" not in seen:
        return
    check, named = Check(node, f"{_CHECK}.hcas"), {name: line for name, (_, line) in seen["ports"].items() if name}
    evidence = seen["ports"][""][1]
    for port in sorted(planned - named.keys()):
        yield check.on(port).expecting("a planned port").fail(f"NCCL does not use {port}", "is the link up?", evidence)
    for port in sorted(named.keys() - planned):
        advice = "is NCCL_IB_HCA set as planned? Without `=` it takes every name that begins so"
        yield check.on(port).expecting("a port the plan drops").fail(f"NCCL uses {port}", advice, named[port])
    if planned == named.keys():
        yield check.ok(f"{len(planned)} ports, as planned", evidence)


def _judge_network(node: str, planned: set[str], seen: _Seen) -> Iterable[Finding]:
    check, channels, sockets = Check(node, f"{_CHECK}.network"), seen.get("channel", {}), _sockets(seen)
    if not planned:
        yield from [check.ok("sockets, as planned")] if sockets else []
        return
    direct, staged = (channels.get(name, (0, "")) for name in ("IB GDRDMA", "IB"))
    if sockets:
        count = channels.get("Socket", (0, ""))[0]
        how = f"{count} channels go over NET/Socket" if count else "NCCL uses network Socket"
        yield check.expecting("NET/IB").fail(how, "the planned ports are not used", sockets)
    if staged[0]:
        observed = f"{staged[0]} of {staged[0] + direct[0]} channels over NET/IB without GPUDirect RDMA"
        remedy = "load nvidia_peermem or use the open kernel modules; see `burst check-nodes --only ib`"
        yield check.expecting("GDRDMA").warn(observed, remedy, staged[1])
    elif direct[0] and not sockets:
        yield check.ok(f"all {direct[0]} channels over NET/IB with GPUDirect RDMA")
    for name, (_, line) in seen.get("network", {}).items():
        if name.lower() != "socket" and not name.startswith("IB"):
            yield check.unknown(f"NCCL uses network {name}, a plugin that is not compared", evidence=line)


def _short(host: str) -> str:
    return host.split(".")[0].lower()
