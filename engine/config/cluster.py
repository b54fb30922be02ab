"""The part of the run configuration about machines: how to reach them, expected hardware, and their speed.

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
    """The machine that predictions are for."""

    name: str = setting("auto", "a known device, cpu, or a measured FILE.json; auto: that of the device, else h100")
    rates: tuple[str, ...] = setting((), "figures to override, FIELD=NUMBER, such as inter_bytes_per_s=25e9")


@dataclass(frozen=True)
class SshConfig:
    """How to reach the nodes; null: as `ssh NODE` on this machine."""

    user: str | None = setting(None, "user name on the nodes; null: as ssh")
    port: int | None = setting(None, "port of sshd; null: as ssh", at_least=1, at_most=65535)
    identity_file: str | None = setting(None, "private key; null: as ssh")
    jump: str | None = setting(None, "jump host, [USER@]HOST[:PORT]; null: as ssh")
    config_file: str | None = setting(None, "OpenSSH client configuration; null: ~/.ssh/config")
    known_hosts: str | None = setting(
        None, "host keys to trust besides those of `burst hosts trust`; null: those of ssh"
    )
    connect_timeout_s: float = setting(10.0, "time limit for connecting and authenticating", "seconds", above=0)


@dataclass(frozen=True)
class ContainerConfig:
    """The container in which ranks run, if any."""

    runtime: Literal["bare", "docker"] = setting("bare", "bare: Python on the node; docker: in a container")
    image: str | None = setting(None, "NAME:TAG that `burst image push` distributes")
    command: str = setting("docker", "command of the container engine on every node")
    run_options: tuple[str, ...] | None = setting(
        None, "options of `docker run` instead of the default ones for GPUs, shared and locked memory and InfiniBand"
    )
    mounts: tuple[str, ...] = setting((), "folders of the node to mount at the same path, read-only; PATH:rw: writable")


@dataclass(frozen=True)
class SlurmConfig:
    """Request to Slurm; null: its default."""

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
        """Return the value of an option of sbatch, None if it is not given."""
        given = (option.removeprefix("--").partition("=") for option in self.options)
        return next((value for key, _, value in given if key == name), None)


@dataclass(frozen=True)
class KubernetesConfig:
    """Request to Kubernetes, one pod per node; null: its default."""

    kind: Literal["JobSet", "TrainJob"] = setting(
        "JobSet", "kind of object to create: a JobSet, or Kubeflow Trainer's TrainJob"
    )
    claim: str | None = setting(None, "PersistentVolumeClaim for runs and data, writable by all pods")
    context: str | None = setting(None, "context of kubectl")
    namespace: str | None = setting(None, "namespace")
    gpus_per_pod: int = setting(0, "GPUs per pod; 0: ranks compute on the CPU", "devices", at_least=0)
    gpu_resource: str = setting("nvidia.com/gpu", "name of the GPU resource")
    cpus_per_pod: int | None = setting(None, "CPUs per pod", at_least=1)
    memory_per_pod: str | None = setting(None, "memory per pod, such as 200Gi")
    node_selector: tuple[str, ...] = setting((), "required node labels, KEY=VALUE")
    queue: str | None = setting(None, "queue of Kueue")
    runtime: str = setting("torch-distributed", "with TrainJob: the ClusterTrainingRuntime")


@dataclass(frozen=True)
class ExpectedHardware:
    """Hardware that every node must have; null: that of most nodes."""

    gpus: int | None = setting(None, "GPUs per node", "devices", at_least=0)
    gpu_model: str | None = setting(None, "part of the name, such as H100")
    hcas: int | None = setting(None, "InfiniBand or RoCE ports per node that must be up", at_least=0)
    hca_rate_gbps: float | None = setting(None, "rate of each such port", "Gbit/s", above=0)


@dataclass(frozen=True)
class ClusterConfig:
    """The machines: this one, or those in `nodes`."""

    nodes: str | None = setting(None, "names in NodeSet grammar, node[1-4,7]; null: this machine only")
    launcher: Launcher = setting("auto", "how ranks are started; auto: ssh if `nodes` is set, else local")
    num_nodes: int | None = setting(
        None,
        "number of machines; null: those of `nodes`, else 1; with a scheduler: how many to request",
        at_least=1,
    )
    ranks_per_node: int | None = setting(
        None, "processes per machine; null: one per GPU, or 1 without GPUs", "ranks", at_least=1
    )
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "transport of torch.distributed; auto: nccl with GPUs, else gloo"
    )
    ranks_share_device: bool = setting(
        False, "backend gloo: let ranks share GPUs, for tests; messages go through host memory"
    )
    threads_per_rank: int | None = setting(
        None, "CPU threads of one rank; null: cores / local ranks", "threads", at_least=1
    )
    topology_nodes: int | None = setting(
        None, "assume that the ranks are on this many nodes; null: the real number", "nodes", at_least=1
    )
    interface: str | None = setting(
        None, "network interface for rendezvous and sockets; null: that of the default route"
    )
    master_port: int | None = setting(
        None, "port of the first node for the rendezvous; null: a free one", at_least=1, at_most=65535
    )
    python: str | None = setting(None, "Python of the ranks on every node; null: this one, on other machines python3")
    node_folder: str | None = setting(None, "folder of code and runs on a node; null: .burst in the user's home folder")
    environment: tuple[str, ...] = setting(
        (), "NAME=VALUE for every rank, overriding variables set by burst; no secrets, since it is recorded"
    )
    lease_s: float = setting(
        60.0, "a node without contact to its launcher for this long stops its ranks", "seconds", at_least=5
    )
    hang_timeout_s: float | None = setting(
        None,
        "stop a run in which no rank advances for this long; null: 10 min or 5 steps (1 h where no step is made)",
        "seconds",
        above=0,
    )
    max_restarts: int = setting(
        0,
        "restarts of a failed run from its last checkpoint, in a row without a new checkpoint",
        "attempts",
        at_least=0,
    )
    spare_nodes: str | None = setting(None, "names in NodeSet grammar, which replace unfit nodes in the next attempt")
    shared_folder: str | None = setting(None, "a folder shared by all nodes; null: none")
    ssh: SshConfig = SshConfig()
    container: ContainerConfig = ContainerConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    expected: ExpectedHardware = ExpectedHardware()
    machine: MachineConfig = MachineConfig()

    @property
    def resolved_launcher(self) -> str:
        """The launcher, with auto resolved."""
        by_nodes = "local" if self.nodes is None else "ssh"
        return by_nodes if self.launcher == "auto" else self.launcher

    @property
    def runs_elsewhere(self) -> bool:
        """Whether ranks run on machines with other disks, so that local files cannot be checked for them."""
        return self.resolved_launcher in ("ssh", "kubernetes")

    @property
    def world_size(self) -> int | None:
        """Ranks of a run on these machines; None while the number of machines or ranks per machine is unknown."""
        if self.ranks_per_node is None or (self.num_nodes is None and self.nodes is not None):
            return None
        return self.ranks_per_node * (self.num_nodes or 1)

    @property
    def topology_groups(self) -> int:
        """Nodes that plans assume: `topology_nodes`, else the machines."""
        return self.topology_nodes or self.num_nodes or 1
