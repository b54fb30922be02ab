"""The part of the run configuration that describes machines: how to reach them, what they should be, how fast they are.

Standard library only; `engine.config` puts it under the key `cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config_schema import note


@dataclass(frozen=True)
class MachineConfig:
    """Speeds that predictions use; null: those of the named machine."""

    name: str = field(
        default="auto",
        metadata=note("a known device, or cpu; auto: by the device, else cpu with gloo, else h100"),
    )
    forward_flops_per_s: float | None = field(
        default=None, metadata=note("attention forward on large tiles, per rank", "FLOP/s", above=0)
    )
    backward_flops_per_s: float | None = field(
        default=None, metadata=note("attention backward on large tiles, per rank", "FLOP/s", above=0)
    )
    intra_bytes_per_s: float | None = field(
        default=None, metadata=note("between ranks of a node, one direction", "bytes/s", above=0)
    )
    inter_bytes_per_s: float | None = field(
        default=None, metadata=note("between nodes, one direction, per rank", "bytes/s", above=0)
    )
    host_bytes_per_s: float | None = field(
        default=None, metadata=note("between device and host memory, one direction", "bytes/s", above=0)
    )
    shared_nic: bool | None = field(default=None, metadata=note("all ranks of a node share one link to other nodes"))


@dataclass(frozen=True)
class SshConfig:
    """How the nodes are reached; null: what `ssh NODE` would do on this machine."""

    user: str | None = field(default=None, metadata=note("login on the nodes; null: as ssh would"))
    port: int | None = field(default=None, metadata=note("port of sshd; null: as ssh would", at_least=1, at_most=65535))
    identity_file: str | None = field(default=None, metadata=note("private key; null: those that ssh would offer"))
    jump: str | None = field(default=None, metadata=note("[USER@]HOST[:PORT] to go through; null: as ssh would"))
    config_file: str | None = field(default=None, metadata=note("OpenSSH client configuration; null: your own"))
    known_hosts: str | None = field(
        default=None, metadata=note("host keys to trust beside those of `burst hosts trust`; null: those of ssh")
    )
    connect_timeout_s: float = field(default=10.0, metadata=note("for connecting and logging in", "seconds", above=0))
    fan_out: int = field(default=64, metadata=note("nodes spoken to at the same time", "nodes", at_least=1))


@dataclass(frozen=True)
class ContainerConfig:
    """Whether ranks run in a container, and which."""

    runtime: Literal["bare", "docker"] = field(
        default="bare", metadata=note("bare: Python on the node itself; docker: the image below")
    )
    image: str | None = field(default=None, metadata=note("NAME:TAG that `burst image push` distributes"))
    command: str = field(default="docker", metadata=note("the engine's command line on every node"))
    run_options: tuple[str, ...] | None = field(
        default=None,
        metadata=note(
            "options of `docker run` in place of those for GPUs, shared and locked memory and InfiniBand; null: those"
        ),
    )
    mounts: tuple[str, ...] = field(
        default=(),
        metadata=note("folders of the node that ranks see at the same path, read-only; PATH:rw: also written"),
    )


@dataclass(frozen=True)
class SlurmConfig:
    """What is asked of Slurm when it starts the nodes; null: its default."""

    partition: str | None = field(default=None, metadata=note("partition"))
    account: str | None = field(default=None, metadata=note("account to charge"))
    qos: str | None = field(default=None, metadata=note("quality of service"))
    time_limit: str | None = field(default=None, metadata=note("[DAYS-]HH:MM:SS"))
    gpus_per_node: int | None = field(default=None, metadata=note("GPUs per node", "devices", at_least=0))
    cpus_per_node: int | None = field(default=None, metadata=note("CPUs per node; null: all", at_least=1))
    constraint: str | None = field(default=None, metadata=note("features that nodes must have"))
    exclude: str | None = field(default=None, metadata=note("nodes to leave out, in NodeSet grammar"))
    options: tuple[str, ...] = field(default=(), metadata=note("further options of sbatch, --NAME=VALUE"))


@dataclass(frozen=True)
class ExpectedHardware:
    """What every node must have; null: what most nodes have."""

    gpus: int | None = field(default=None, metadata=note("GPUs per node", "devices", at_least=0))
    gpu_model: str | None = field(default=None, metadata=note("a part of the name, such as H100"))
    driver: str | None = field(default=None, metadata=note("version of the NVIDIA driver, or how it begins"))
    hcas: int | None = field(
        default=None, metadata=note("InfiniBand or RoCE ports per node that must be up", at_least=0)
    )
    hca_rate_gbps: float | None = field(default=None, metadata=note("rate of each such port", "Gbit/s", above=0))


@dataclass(frozen=True)
class ClusterConfig:
    """The machines: this one, or those that `nodes` names."""

    name: str = field(
        default="local", metadata=note("name of these machines, for tables; the option of the group cluster")
    )
    nodes: str | None = field(
        default=None, metadata=note("names in NodeSet grammar, node[1-4,7]; null: this machine only")
    )
    launcher: Literal["auto", "local", "ssh", "slurm"] = field(
        default="auto", metadata=note("who starts the ranks; auto: ssh where `nodes` names machines, else local")
    )
    num_nodes: int | None = field(
        default=None,
        metadata=note("machines; null: as many as `nodes` names, else 1; with slurm: how many to ask for", at_least=1),
    )
    ranks_per_node: int | None = field(
        default=None, metadata=note("processes per machine; null: one per GPU, or 1 without GPUs", "ranks", at_least=1)
    )
    backend: Literal["auto", "nccl", "gloo"] = field(
        default="auto", metadata=note("transport of torch.distributed; auto: nccl with GPUs, else gloo")
    )
    ranks_share_device: bool = field(
        default=False,
        metadata=note("backend gloo: let several ranks use each GPU, for tests; messages go through host memory"),
    )
    threads_per_rank: int | None = field(
        default=None, metadata=note("CPU threads of one rank; null: cores / local ranks", "threads", at_least=1)
    )
    topology_nodes: int | None = field(
        default=None, metadata=note("treat the ranks as lying on so many nodes; null: as they do", "nodes", at_least=1)
    )
    interface: str | None = field(
        default=None, metadata=note("network interface for rendezvous and sockets; null: that of the default route")
    )
    master_port: int | None = field(
        default=None,
        metadata=note("port of the first node for the rendezvous; null: one that is free", at_least=1, at_most=65535),
    )
    python: str | None = field(
        default=None, metadata=note("Python of the ranks, on every node; null: this one, on other machines python3")
    )
    node_folder: str | None = field(
        default=None, metadata=note("where a node keeps code and runs; null: .burst in its user's home folder")
    )
    environment: tuple[str, ...] = field(
        default=(),
        metadata=note("NAME=VALUE for every rank, stronger than what burst sets; no secrets: it is recorded"),
    )
    lease_s: float = field(
        default=60.0,
        metadata=note("a node that hears nothing of its launcher for so long stops its ranks", "seconds", at_least=5),
    )
    hang_timeout_s: float | None = field(
        default=None,
        metadata=note(
            "a run of which no rank advances for so long is stopped; null: 10 min or 5 steps (1 h where none is made)",
            "seconds",
            above=0,
        ),
    )
    max_restarts: int = field(
        default=0,
        metadata=note(
            "a run that fails begins again from its last checkpoint, so often in a row without a further one",
            "attempts",
            at_least=0,
        ),
    )
    spare_nodes: str | None = field(
        default=None,
        metadata=note("names in NodeSet grammar, which a next attempt takes in place of nodes that are not fit"),
    )
    shared_folder: str | None = field(default=None, metadata=note("a folder that all nodes see; null: none is shared"))
    ssh: SshConfig = field(default_factory=SshConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    expected: ExpectedHardware = field(default_factory=ExpectedHardware)
    machine: MachineConfig = field(default_factory=MachineConfig)

    @property
    def world_size(self) -> int | None:
        """Ranks of a run on these machines; None while it is not known how many machines or ranks on each there are."""
        if self.ranks_per_node is None or (self.num_nodes is None and self.nodes is not None):
            return None
        return self.ranks_per_node * (self.num_nodes or 1)

    @property
    def topology_groups(self) -> int:
        """Nodes that plans reckon with: `topology_nodes`, else the machines."""
        return self.topology_nodes or self.num_nodes or 1
