"""The part of the run configuration that describes machines: how to reach them, what they should be, how fast they are.

Standard library only; `engine.config.settings` puts it under the key `cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.config.schema import setting

Launcher = Literal["auto", "local", "ssh", "slurm", "kubernetes"]
LAUNCHERS = frozenset(get_args(Launcher)) - {"auto"}


@dataclass(frozen=True)
class MachineConfig:
    """The machine whose speeds predictions use."""

    name: str = setting("auto", "a known device, cpu, or a measured FILE.json; auto: by the device, else h100")
    rates: tuple[str, ...] = setting((), "figures of it that differ, FIELD=NUMBER, such as inter_bytes_per_s=25e9")


@dataclass(frozen=True)
class SshConfig:
    """How the nodes are reached; null: what `ssh NODE` would do on this machine."""

    user: str | None = setting(None, "login on the nodes; null: as ssh would")
    port: int | None = setting(None, "port of sshd; null: as ssh would", at_least=1, at_most=65535)
    identity_file: str | None = setting(None, "private key; null: those that ssh would offer")
    jump: str | None = setting(None, "[USER@]HOST[:PORT] to go through; null: as ssh would")
    config_file: str | None = setting(None, "OpenSSH client configuration; null: your own")
    known_hosts: str | None = setting(
        None, "host keys to trust beside those of `burst hosts trust`; null: those of ssh"
    )
    connect_timeout_s: float = setting(10.0, "for connecting and logging in", "seconds", above=0)


@dataclass(frozen=True)
class ContainerConfig:
    """Whether ranks run in a container, and which."""

    runtime: Literal["bare", "docker"] = setting("bare", "bare: Python on the node itself; docker: the image below")
    image: str | None = setting(None, "NAME:TAG that `burst image push` distributes")
    command: str = setting("docker", "the engine's command line on every node")
    run_options: tuple[str, ...] | None = setting(
        None, "options of `docker run` in place of those for GPUs, shared and locked memory and InfiniBand; null: those"
    )
    mounts: tuple[str, ...] = setting(
        (), "folders of the node that ranks see at the same path, read-only; PATH:rw: also written"
    )


@dataclass(frozen=True)
class SlurmConfig:
    """What is asked of Slurm when it starts the nodes; null: its default."""

    time_limit: str | None = setting(None, "[DAYS-]HH:MM:SS")
    gpus_per_node: int | None = setting(
        None,
        "GPUs per node; 0: ranks compute on the CPU; null: with backend=gloo, or nccl and ranks_per_node",
        "devices",
        at_least=0,
    )
    options: tuple[str, ...] = setting(
        (), "further options of sbatch, such as --partition=gpu; --cpus-per-task=N: no whole nodes"
    )

    def option(self, name: str) -> str | None:
        """The value of an option of sbatch; None where it is not given."""
        given = (option.removeprefix("--").partition("=") for option in self.options)
        return next((value for key, _, value in given if key == name), None)


@dataclass(frozen=True)
class KubernetesConfig:
    """What is asked of Kubernetes when it starts the pods, one per node; null: its default."""

    kind: Literal["JobSet", "TrainJob"] = setting("JobSet", "what is created: a JobSet, or Kubeflow Trainer's TrainJob")
    claim: str | None = setting(None, "PersistentVolumeClaim for runs and data, which all pods write")
    context: str | None = setting(None, "context of kubectl")
    namespace: str | None = setting(None, "namespace")
    gpus_per_pod: int = setting(0, "GPUs per pod; 0: ranks compute on the CPU", "devices", at_least=0)
    gpu_resource: str = setting("nvidia.com/gpu", "name of the resource that is counted")
    cpus_per_pod: int | None = setting(None, "CPUs per pod", at_least=1)
    memory_per_pod: str | None = setting(None, "memory per pod, such as 200Gi")
    node_selector: tuple[str, ...] = setting((), "labels that nodes must have, KEY=VALUE")
    queue: str | None = setting(None, "queue of Kueue in which the job waits")
    runtime: str = setting("torch-distributed", "with TrainJob: the ClusterTrainingRuntime")


@dataclass(frozen=True)
class ExpectedHardware:
    """What every node must have; null: what most nodes have."""

    gpus: int | None = setting(None, "GPUs per node", "devices", at_least=0)
    gpu_model: str | None = setting(None, "a part of the name, such as H100")
    hcas: int | None = setting(None, "InfiniBand or RoCE ports per node that must be up", at_least=0)
    hca_rate_gbps: float | None = setting(None, "rate of each such port", "Gbit/s", above=0)


@dataclass(frozen=True)
class ClusterConfig:
    """The machines: this one, or those that `nodes` names."""

    nodes: str | None = setting(None, "names in NodeSet grammar, node[1-4,7]; null: this machine only")
    launcher: Launcher = setting("auto", "who starts the ranks; auto: ssh where `nodes` names machines, else local")
    num_nodes: int | None = setting(
        None,
        "machines; null: as many as `nodes` names, else 1; with a scheduler: how many to ask for",
        at_least=1,
    )
    ranks_per_node: int | None = setting(
        None, "processes per machine; null: one per GPU, or 1 without GPUs", "ranks", at_least=1
    )
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "transport of torch.distributed; auto: nccl with GPUs, else gloo"
    )
    ranks_share_device: bool = setting(
        False, "backend gloo: let several ranks use each GPU, for tests; messages go through host memory"
    )
    threads_per_rank: int | None = setting(
        None, "CPU threads of one rank; null: cores / local ranks", "threads", at_least=1
    )
    topology_nodes: int | None = setting(
        None, "treat the ranks as lying on so many nodes; null: as they do", "nodes", at_least=1
    )
    interface: str | None = setting(
        None, "network interface for rendezvous and sockets; null: that of the default route"
    )
    master_port: int | None = setting(
        None, "port of the first node for the rendezvous; null: one that is free", at_least=1, at_most=65535
    )
    python: str | None = setting(None, "Python of the ranks, on every node; null: this one, on other machines python3")
    node_folder: str | None = setting(None, "where a node keeps code and runs; null: .burst in its user's home folder")
    environment: tuple[str, ...] = setting(
        (), "NAME=VALUE for every rank, stronger than what burst sets; no secrets: it is recorded"
    )
    lease_s: float = setting(
        60.0, "a node that hears nothing of its launcher for so long stops its ranks", "seconds", at_least=5
    )
    hang_timeout_s: float | None = setting(
        None,
        "a run of which no rank advances for so long is stopped; null: 10 min or 5 steps (1 h where none is made)",
        "seconds",
        above=0,
    )
    max_restarts: int = setting(
        0,
        "a run that fails begins again from its last checkpoint, so often in a row without a further one",
        "attempts",
        at_least=0,
    )
    spare_nodes: str | None = setting(
        None, "names in NodeSet grammar, which a next attempt takes in place of nodes that are not fit"
    )
    shared_folder: str | None = setting(None, "a folder that all nodes see; null: none is shared")
    ssh: SshConfig = SshConfig()
    container: ContainerConfig = ContainerConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    expected: ExpectedHardware = ExpectedHardware()
    machine: MachineConfig = MachineConfig()

    @property
    def resolved_launcher(self) -> str:
        """Who starts the ranks, with auto resolved."""
        by_nodes = "local" if self.nodes is None else "ssh"
        return by_nodes if self.launcher == "auto" else self.launcher

    @property
    def runs_elsewhere(self) -> bool:
        """Whether ranks run on machines whose disks are not ours, so that files of this one say nothing of theirs."""
        return self.resolved_launcher in ("ssh", "kubernetes")

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
