"""Compare what NCCL logged about the network with the planned ports and interfaces. Pure: text in, findings out.

Lines as NCCL writes them with NCCL_DEBUG=INFO:

    node1:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>
    node1:4711:4790 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from cluster.checks.check import Check, Finding
from cluster.env.plan import NodeEnvironment
from cluster.remote_text import clean_text, one_line

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
