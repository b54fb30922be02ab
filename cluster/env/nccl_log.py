"""NCCL's own log against the plan: which adapters it took, which network, and whether they read GPU memory themselves.

Lines as NCCL writes them with NCCL_DEBUG=INFO:

    node1:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>
    node1:4711:4790 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cluster.checks.finding import Finding, Verdict
from cluster.env.facts import NodeEnvironment
from cluster.remote_text import clean_text, one_line

# Before the host may stand what a launcher puts there.
_LINE = re.compile(r"(?<![A-Za-z0-9_.:-])([A-Za-z0-9_][A-Za-z0-9_.-]*):\d+:\d+ \[-?\d+\] NCCL (?:INFO|WARN) (.*)")
# A plugin has a name of its own: NET/IBext_v10.
_USING = re.compile(r"NET/IB\w* : Using")
_NO_DEVICE = re.compile(r"NET/IB\w* : No device found")
_SOCKETS = re.compile(r"NET/Socket : Using")
_PORT = re.compile(r"\[\d+\]([A-Za-z0-9_.-]+:\d+)/(?:IB|RoCE|uIB|uRoCE)")
_INTERFACE = re.compile(r"(?:Bootstrap : Using|Bootstrap: Using) (?:\[\d+\])?([^\s:]+):")
_CHANNEL = re.compile(r"\bvia (NET/\S+)")
_LINE_CHARACTERS = 4000
_CHECK = "env.nccl_log"


@dataclass
class _Seen:
    """What the log says of one node."""

    ports: set[str] = field(default_factory=set)
    names_ports: bool = False
    networks: set[str] = field(default_factory=set)
    interfaces: set[str] = field(default_factory=set)
    channels: Counter[str] = field(default_factory=Counter)
    evidence: dict[str, str] = field(default_factory=dict)

    @property
    def sockets(self) -> str | None:
        """The line by which sockets carry what goes between nodes; None without one."""
        if self.channels["NET/Socket"]:
            return self.evidence["NET/Socket"]
        if self.networks:
            return self.evidence["network"] if any(network.lower() == "socket" for network in self.networks) else None
        return self.evidence.get("sockets")


def sockets_line(text: str) -> str | None:
    """The line of a node's log by which NCCL took sockets for what goes between nodes; None without one."""
    return next((line for one in _read(text).values() if (line := one.sockets)), None)


def check_nccl_log(text: str, environments: Mapping[str, NodeEnvironment]) -> list[Finding]:
    """Findings per planned node that the log speaks of; UNKNOWN where it says nothing about the network.

    Hosts of the log are matched to nodes by name, with or without domain; with one node planned, every line is its own.
    """
    seen = _read(text)
    if len(environments) == 1 and len(seen) == 1:
        node, environment = next(iter(environments.items()))
        return _judge(node, environment, next(iter(seen.values())))
    by_name = {_short(host): one for host, one in seen.items()}
    findings: list[Finding] = []
    for node, environment in environments.items():
        found = by_name.pop(_short(node), None)
        findings += _judge(node, environment, found or _Seen())
    for host in sorted(by_name):
        findings.append(Finding(_CHECK, host, Verdict.UNKNOWN, "a host of the log that is no node of this plan"))
    return findings


def _read(text: str) -> dict[str, _Seen]:
    """What each host of the log says."""
    seen: dict[str, _Seen] = {}
    for raw in text.splitlines():
        line = clean_text(raw[:_LINE_CHARACTERS]) if "NCCL" in raw[:_LINE_CHARACTERS] else ""
        found = _LINE.search(line)
        if found is None:
            continue
        one, words = seen.setdefault(found[1], _Seen()), found[2]
        if _USING.match(words):
            one.names_ports = True
            one.ports |= set(_PORT.findall(words))
            one.evidence.setdefault("ports", one_line(line))
        elif _NO_DEVICE.match(words):
            one.names_ports = True
            one.evidence.setdefault("ports", one_line(line))
        elif _SOCKETS.match(words):
            one.evidence.setdefault("sockets", one_line(line))
        elif words.startswith("Using network "):
            network = words.removeprefix("Using network ").strip()
            one.networks.add(network)
            if network.lower() == "socket" or "network" not in one.evidence:
                one.evidence["network"] = one_line(line)
        elif channel := _CHANNEL.search(words):
            one.channels[_channel_kind(channel[1])] += 1
            one.evidence.setdefault(_channel_kind(channel[1]), one_line(line))
        if interface := _INTERFACE.search(words):
            one.interfaces.add(interface[1])
            one.evidence.setdefault("interface", one_line(line))
    return seen


def _channel_kind(network: str) -> str:
    """`NET/Socket`, `NET/IB`, or `NET/IB GDRDMA`."""
    kind = "NET/IB" if network.startswith("NET/IB") else "/".join(network.split("/")[:2])
    return f"{kind} GDRDMA" if "/GDRDMA" in network else kind


def _judge(node: str, environment: NodeEnvironment, seen: _Seen) -> list[Finding]:
    planned = {port.name for port in environment.kept}
    findings = [
        *_judge_ports(node, planned, seen),
        *_judge_network(node, planned, seen),
        *_judge_interface(node, environment, seen),
    ]
    if not findings:
        advice = "run with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET (`burst env show --run DIR` plans both)"
        findings.append(Finding(_CHECK, node, Verdict.UNKNOWN, "the log does not say what NCCL uses", remedy=advice))
    return findings


def _judge_ports(node: str, planned: set[str], seen: _Seen) -> Iterable[Finding]:
    if not seen.names_ports:
        return
    evidence = seen.evidence.get("ports", "")
    check = f"{_CHECK}.hcas"
    for port in sorted(planned - seen.ports):
        yield Finding(
            check, node, Verdict.FAIL, f"NCCL does not use {port}", "a planned port", "is the link up?", port, evidence
        )
    for port in sorted(seen.ports - planned):
        advice = "is NCCL_IB_HCA set as planned? Without `=` it takes every name that begins so"
        yield Finding(check, node, Verdict.FAIL, f"NCCL uses {port}", "a port the plan drops", advice, port, evidence)
    if planned == seen.ports:
        yield Finding(check, node, Verdict.OK, f"{len(planned)} ports, as planned", evidence=evidence)


def _judge_network(node: str, planned: set[str], seen: _Seen) -> Iterable[Finding]:
    check = f"{_CHECK}.network"
    sockets = seen.channels["NET/Socket"]
    if planned and seen.sockets:
        how = f"{sockets} channels go over NET/Socket" if sockets else "NCCL uses network Socket"
        remedy = "the planned ports are not used"
        yield Finding(check, node, Verdict.FAIL, how, "NET/IB", remedy, evidence=seen.sockets)
    direct, staged = seen.channels["NET/IB GDRDMA"], seen.channels["NET/IB"]
    if planned and staged:
        observed = f"{staged} of {staged + direct} channels over NET/IB without GPUDirect RDMA"
        remedy = "load nvidia_peermem or use the open kernel modules; see `burst check-nodes --only ib`"
        yield Finding(check, node, Verdict.WARN, observed, "GDRDMA", remedy, evidence=seen.evidence["NET/IB"])
    if planned and not seen.sockets and direct and not staged:
        yield Finding(check, node, Verdict.OK, f"all {direct} channels over NET/IB with GPUDirect RDMA")
    for network in sorted(seen.networks):
        if network.lower() != "socket" and not network.startswith("IB"):
            observed = f"NCCL uses network {network}, a plugin that is not compared"
            yield Finding(check, node, Verdict.UNKNOWN, observed, evidence=seen.evidence["network"])
    if not planned and seen.sockets:
        yield Finding(check, node, Verdict.OK, "sockets, as planned")


def _judge_interface(node: str, environment: NodeEnvironment, seen: _Seen) -> Iterable[Finding]:
    odd = sorted(seen.interfaces - {environment.interface})
    if odd and environment.interface is not None:
        yield Finding(
            f"{_CHECK}.interface",
            node,
            Verdict.FAIL,
            f"NCCL meets the other ranks over {', '.join(odd)}",
            environment.interface,
            "is NCCL_SOCKET_IFNAME set as planned?",
            evidence=seen.evidence.get("interface", ""),
        )


def _short(host: str) -> str:
    return host.split(".")[0].lower()
