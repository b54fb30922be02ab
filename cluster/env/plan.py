"""`plan_environment`: facts of a node in, its environment out. Pure: the same facts give the same environment.

Few variables are set, because each one takes a decision away from NCCL. Never set: NCCL_IGNORE_NET_MISMATCH, which
turns a wrong network into a slow or hanging one; NCCL_IB_GID_INDEX, which NCCL has found itself since 2.21, port by
port; CUDA_DEVICE_MAX_CONNECTIONS, which belongs to the training strategy: one connection suits overlap of tensor and
context parallelism and slows FSDP2 (`make gpu` measures 1, 8, 32).

As text it is for a shell, or for `docker run --env-file`. A value that a format cannot say is refused, never changed: a
variable that silently differs on one node is worse than an error.
"""

from __future__ import annotations

import enum
import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.env.hcas import ADAPTER_QUESTIONS, INFINIBAND, HcaDecision, Rail, choose_hcas, map_rails, rail_order
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import node_command
from cluster.survey.drivers import SMI
from cluster.survey.facts import NodeFacts
from cluster.survey.network import LINKS
from cluster.survey.rdma import GPUDIRECT, HcaPort, has_roce_gid
from cluster.survey.section import UnreadableError
from engine.config.cluster import ClusterConfig, ContainerConfig

FACT_QUESTIONS = (*ADAPTER_QUESTIONS, GPUDIRECT, LINKS, SMI)


@dataclass(frozen=True)
class EnvironmentVariable:
    """One environment variable of every rank on a node, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """A variable that was considered and is not set, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class NodeEnvironment:
    """The environment of the ranks on one node, and how it came about.

    hcas: every port of the node, kept ones first, in rail order (by the GPU that they serve). rails: by GPU index.
    """

    node: str
    variables: tuple[EnvironmentVariable, ...]
    left_out: tuple[LeftOut, ...] = ()
    hcas: tuple[HcaDecision, ...] = ()
    rails: tuple[Rail, ...] = ()
    interface: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[HcaPort, ...]:
        """The ports that NCCL shall use, in rail order."""
        return tuple(decision.port for decision in self.hcas if decision.kept)

    def value(self, name: str) -> str | None:
        """The value of a variable; None when the plan does not set it."""
        return next((variable.value for variable in self.variables if variable.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with these names as keys."""
        return {
            "node": self.node,
            "interface": self.interface,
            "variables": {variable.name: variable.value for variable in self.variables},
            "reasons": {variable.name: variable.reason for variable in self.variables},
            "left_out": {variable.name: variable.reason for variable in self.left_out},
            "hcas": [
                {
                    "port": decision.port.name,
                    "kept": decision.kept,
                    "reason": decision.reason,
                    "link_layer": decision.port.link_layer,
                    "rate_gbps": decision.port.rate_gbps,
                    "netdev": decision.port.netdev,
                }
                for decision in self.hcas
            ],
            "rails": [{"gpu": rail.gpu, "port": rail.port.name, "found_by": rail.found_by} for rail in self.rails],
            "warnings": list(self.warnings),
        }


_Choice = EnvironmentVariable | LeftOut


def check_network(facts: NodeFacts, overrides: Sequence[str] = ()) -> None:
    """Raise ClusterError when adapters or interfaces cannot be read: a plan made without them would switch InfiniBand
    off on a node that has it. overrides: see `node_command`.
    """
    try:
        _ = facts.adapters, facts.interface
    except UnreadableError as error:
        look = node_command(facts.node, "check-nodes", "--only", "ib,net", overrides=overrides)
        trouble = f" ({facts.probe.trouble})" if facts.probe.trouble else ""
        raise ClusterError(
            f"{facts.node}: cannot tell what network it has: {error}{trouble}. Look at it with `{look}`"
        ) from error


def plan_environment(facts: NodeFacts, config: ClusterConfig, *, log_dir: str | None = None) -> NodeEnvironment:
    """The environment of the ranks on one node, with a reason for every variable and for every port kept or dropped.

    `log_dir`: an existing folder on the node for what NCCL and the flight recorder write; None: they write no files.
    """
    decisions, warnings = choose_hcas(facts, config)
    kept = [decision.port for decision in decisions if decision.kept]
    rails = map_rails(facts.gpu_addresses, kept)
    ordered = rail_order(rails, kept)
    position = {port.name: number for number, port in enumerate(ordered)}
    hcas = tuple(sorted(decisions, key=lambda decision: position.get(decision.port.name, len(position))))
    choices = _choices(facts, config, hcas, ordered)
    if log_dir is not None:
        choices += _debug_choices(log_dir, uses_nccl(facts, config))
    choices += [*_topology_choices(facts, config), _threads(facts, config)]
    return NodeEnvironment(
        node=facts.node,
        variables=tuple(choice for choice in choices if isinstance(choice, EnvironmentVariable)),
        left_out=tuple(choice for choice in choices if isinstance(choice, LeftOut)),
        hcas=hcas,
        rails=rails,
        interface=interface.name if (interface := facts.interface.interface) is not None else None,
        warnings=(*filter(None, [facts.carriers.trouble]), *warnings, *_network_warnings(facts, config, ordered)),
    )


def plan_fleet(
    facts: Iterable[NodeFacts], config: ClusterConfig, *, log_dir: str | None = None
) -> dict[str, NodeEnvironment]:
    """The environment of every node by its name, with warnings where the rails of nodes do not fit together."""
    environments = {one.node: plan_environment(one, config, log_dir=log_dir) for one in facts}
    odd = _align_rails(environments)
    return environments | {
        node: replace(environments[node], warnings=(*environments[node].warnings, text)) for node, text in odd.items()
    }


def _align_rails(environments: Mapping[str, NodeEnvironment]) -> dict[str, str]:
    """Warnings by node whose number of rails differs from that of most. NCCL joins rail k of one with rail k of the
    next; names may differ, as they do on sister machines with another order of slots."""
    counts = {node: len(environment.kept) for node, environment in environments.items()}
    votes = Counter(counts.values())
    usual = max(votes, key=lambda count: votes[count], default=0)
    is_usual = 2 * votes[usual] > votes.total()
    others = f"{usual} on most nodes" if is_usual else f"the nodes have {', '.join(map(str, sorted(votes)))}"
    return {
        node: f"{count} {'rail' if count == 1 else 'rails'}, {others}: a ring is as fast as its node with the fewest"
        for node, count in counts.items()
        if not is_usual or count != usual
    }


def uses_nccl(facts: NodeFacts, config: ClusterConfig) -> bool:
    """Whether ranks on this node talk by NCCL: asked for, or there are GPUs."""
    return config.backend == "nccl" or (config.backend == "auto" and bool(facts.gpu_addresses))


def _choices(
    facts: NodeFacts, config: ClusterConfig, hcas: Sequence[HcaDecision], ordered: Sequence[HcaPort]
) -> list[_Choice]:
    choices = _interface_choices(facts, nccl=uses_nccl(facts, config))
    if not uses_nccl(facts, config):
        why = f"cluster.backend={config.backend}" if facts.gpu_addresses else "the node has no GPU"
        return [*choices, LeftOut("NCCL_*", f"{why}: ranks talk by gloo")]
    choices += [communicator_order(), *_hca_choices(hcas, ordered)]
    if ordered:
        choices.append(_cross_nic_choice(facts, ordered))
    return choices


def communicator_order() -> EnvironmentVariable:
    """What a rank with several communicators needs: attention has one per channel beside those of FSDP.

    Source: NCCL's user guide, "Using multiple NCCL communicators concurrently".
    """
    reason = (
        "NCCL 2.26 and newer: several communicators at once run in the order in which a rank starts them, no deadlock"
    )
    return EnvironmentVariable("NCCL_LAUNCH_ORDER_IMPLICIT", "1", reason)


def _interface_choices(facts: NodeFacts, *, nccl: bool) -> list[_Choice]:
    interface = facts.interface.interface
    if interface is None:
        reason = f"no interface is chosen: {facts.interface.reason}"
        return [LeftOut("NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME", reason)]
    why = f"sockets and rendezvous: {facts.interface.reason}"
    exact = f"{why}; `=`: this name exactly, not all that begin with it"
    gloo = EnvironmentVariable("GLOO_SOCKET_IFNAME", interface.name, why)
    return [EnvironmentVariable("NCCL_SOCKET_IFNAME", f"={interface.name}", exact), gloo] if nccl else [gloo]


def _hca_choices(hcas: Sequence[HcaDecision], ordered: Sequence[HcaPort]) -> list[_Choice]:
    if not ordered:
        dropped = "; ".join(f"{decision.port.name}: {decision.reason}" for decision in hcas)
        reason = f"none of its ports will do: {dropped}" if hcas else "the node has no InfiniBand or RoCE port"
        return [EnvironmentVariable("NCCL_IB_DISABLE", "1", f"{reason}; NCCL uses sockets")]
    names = ",".join(port.name for port in ordered)
    one = ordered[0]
    count = (
        f"{len(ordered)} of {len(hcas)} ports: {one.link_layer}, {one.rate_gbps or 0:g} Gbit/s, in the order of GPUs"
    )
    return [
        EnvironmentVariable(
            "NCCL_IB_HCA", f"={names}", f"{count}; `=`: these names exactly (without it mlx5_1 also takes mlx5_10)"
        ),
    ]


def _topology_choices(facts: NodeFacts, config: ClusterConfig) -> list[_Choice]:
    """NCCL_TOPO_FILE as the node sets it, where ranks can read the file: containers lack the node's /etc/nccl.conf."""
    name, path = "NCCL_TOPO_FILE", facts.carriers.topology
    if not path or not uses_nccl(facts, config):
        return []
    if not facts.carriers.has_topology:
        return [LeftOut(name, f"the node sets it to {path}, and has no such file")]
    if config.container.runtime == "docker" and not is_mounted(path, config.container):
        return [LeftOut(name, _unmounted(path))]
    return [
        EnvironmentVariable(name, path, "set on the node: its virtual machine does not show which ports are near GPUs")
    ]


def _unmounted(path: str) -> str:
    folder = path.rpartition("/")[0] or path
    return f"the node sets it to {path}, which containers do not see: add {folder} to cluster.container.mounts"


def is_mounted(path: str, container: ContainerConfig) -> bool:
    """Whether ranks in the container see this file of the node, at the same path."""
    folders = (mount.removesuffix(":rw").rstrip("/") for mount in container.mounts)
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _cross_nic_choice(facts: NodeFacts, ordered: Sequence[HcaPort]) -> _Choice:
    """NCCL_CROSS_NIC=0 only where a packet from one rail cannot reach another one."""
    name = "NCCL_CROSS_NIC"
    if len(ordered) < 2:
        return LeftOut(name, "one rail: there is nothing to cross")
    if ordered[0].link_layer == INFINIBAND:
        prefixes = {gid[1][:19] for port in ordered if (gid := port.gids.get(0)) is not None}
        if len(prefixes) > 1 and all(0 in port.gids for port in ordered):
            return EnvironmentVariable(
                name, "0", f"the ports lie in {len(prefixes)} InfiniBand subnets: rails cannot cross"
            )
        return LeftOut(name, "all ports lie in one InfiniBand subnet, as far as their GIDs tell: rails may cross")
    networks = _rail_networks(facts, ordered)
    if networks is None:
        return LeftOut(name, "whether rails reach each other is not known (no IPv4 addresses); NCCL decides")
    if len(set(networks.values())) < len(networks):
        return LeftOut(name, "rails share IPv4 networks: they may cross")
    gateways = sorted(facts.network.gateways & networks.keys())
    if gateways:
        return LeftOut(name, f"rails have gateways ({', '.join(gateways)}): they may cross")
    return EnvironmentVariable(
        name, "0", "every rail is an IPv4 network of its own without a gateway: rails cannot cross"
    )


def _rail_networks(facts: NodeFacts, ordered: Sequence[HcaPort]) -> Mapping[str, str] | None:
    """The IPv4 network of every rail by its interface; None when one has none."""
    by_name = {interface.name: interface for interface in facts.network.interfaces}
    found: dict[str, str] = {}
    for port in ordered:
        interface = by_name.get(port.netdev or "")
        if interface is None or interface.address is None:
            return None
        found[interface.name] = str(ipaddress.ip_interface(interface.address).network)
    return found


def _debug_choices(log_dir: str, nccl: bool) -> Sequence[_Choice]:
    """What shows afterwards why a run was slow or stuck."""
    if not nccl:
        return recorder_variables(log_dir)
    return [
        EnvironmentVariable("NCCL_DEBUG", "INFO", "NCCL says which network it uses; `burst status` compares"),
        EnvironmentVariable("NCCL_DEBUG_SUBSYS", "INIT,NET", "no more than start-up and network"),
        EnvironmentVariable(
            "NCCL_DEBUG_FILE", f"{log_dir}/nccl.%h.%p.log", "beside the ranks' output, one file per process"
        ),
        *recorder_variables(log_dir),
    ]


def recorder_variables(log_dir: str) -> list[EnvironmentVariable]:
    """The flight recorder, which works with gloo, too, once its size is set."""
    path = f"{log_dir}/flight_recorder_rank"
    return [
        EnvironmentVariable("TORCH_FR_BUFFER_SIZE", "2000", "the last collectives of a rank tell who hangs"),
        EnvironmentVariable("TORCH_FR_DUMP_TEMP_FILE", path, "where NCCL's watchdog leaves them, by rank"),
    ]


def _threads(facts: NodeFacts, config: ClusterConfig) -> _Choice:
    name = "OMP_NUM_THREADS"
    if config.threads_per_rank is not None:
        why = f"cluster.threads_per_rank={config.threads_per_rank}"
        return EnvironmentVariable(name, str(config.threads_per_rank), why)
    ranks = config.ranks_per_node or len(facts.gpu_addresses) or 1
    cores = facts.carriers.cores
    if cores is None:
        return LeftOut(name, "the number of cores is not known")
    threads = max(1, cores // ranks)
    return EnvironmentVariable(name, str(threads), f"{cores} cores for {ranks} {'rank' if ranks == 1 else 'ranks'}")


def _network_warnings(facts: NodeFacts, config: ClusterConfig, ordered: Sequence[HcaPort]) -> Iterable[str]:
    if facts.interface.interface is None:
        why = f"no network interface is chosen: {facts.interface.reason}"
        yield f"{why}; set cluster.interface to the one that reaches the other nodes"
    expected = config.expected.hcas
    if expected is not None and len(ordered) != expected:
        yield f"{len(ordered)} ports kept, cluster.expected.hcas={expected}"
    if not ordered or not uses_nccl(facts, config):
        return
    if any(isinstance(one, LeftOut) for one in _topology_choices(facts, config)):
        yield f"NCCL_TOPO_FILE is lost: {_topology_choices(facts, config)[0].reason}"
    if facts.gpu_addresses and facts.reaches_gpus is False:
        yield "no GPUDirect RDMA (neither nvidia_peermem nor DMA-BUF): NCCL copies through host memory"
    if ordered[0].link_layer != INFINIBAND:
        for port in ordered:
            if not has_roce_gid(port):
                yield f"{port.name} has no GID of RoCE v2 over IPv4: give {port.netdev or 'it'} an address"


class Format(enum.StrEnum):
    """How an environment is written."""

    sh = "sh"
    dotenv = "dotenv"


def render_environment(environment: NodeEnvironment, form: Format) -> str:
    """The text of the environment of one node. Raises ClusterError for what the format cannot say."""
    lines = [f"# Environment of the ranks on {one_line(environment.node)}."]
    for variable in environment.variables:
        _check(variable, form)
        lines += [f"# {one_line(variable.reason, 2000)}", _line(variable, form)]
    return "\n".join(lines) + "\n"


def _line(variable: EnvironmentVariable, form: Format) -> str:
    if form is Format.dotenv:
        # As `docker run --env-file` reads it: everything after the first `=`, nothing quoted, nothing escaped.
        return f"{variable.name}={variable.value}"
    return f"export {variable.name}={shlex.quote(variable.value)}"


def _check(variable: EnvironmentVariable, form: Format) -> None:
    shown = f"{one_line(variable.name)}={one_line(repr(variable.value), 60)}"
    if re.search("[\0\ud800-\udfff]", variable.value):
        raise ClusterError(f"{shown}: NUL characters and broken Unicode cannot be in an environment file")
    if form is Format.dotenv and re.search(r"[\r\n]", variable.value):
        raise ClusterError(
            f"--format dotenv cannot say {shown}: its lines have no way to write a line end. Change what leads to this "
            "value, or use --format sh"
        )
