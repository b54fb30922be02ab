"""The plan of a launch through Slurm. Which nodes it gets is told when it gets them, so there are two steps.

`build_slurm_plan`, on the launcher, before: an entry per node under a name that only stands for it, and the batch file.
`NodeBuilder`, on each node, then: its own command and environment, which `cluster.slurm.granted` puts into the plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.access.nodes import parse_nodes, slurm_nodes
from cluster.env.facts import EnvironmentVariable, NodeEnvironment, NodeEnvironmentFacts
from cluster.env.formats import Format, render_environment
from cluster.env.plan import plan_environment
from cluster.facts import NodeFacts
from cluster.plan import (
    TRAINER_MODULE,
    Backend,
    LaunchPlan,
    NodePlan,
    choose_backend,
    environment_file,
    with_files,
)
from cluster.plan_container import (
    ContainerRun,
    at_home,
    fixed_part,
    merge_mounts,
    read_mounts,
    state_mounts,
    text_files,
    user_variables,
)
from cluster.plan_torchrun import NodeSeat, RankProgram, Rendezvous, torchrun_argv
from cluster.plan_variables import Threads, backend_variables, recorder_variables, run_variables, with_settings
from cluster.slurm.sbatch import SCRIPT_FILE, JobRequest, check_slurm_settings, sbatch_text
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, dump_config
from engine.runs.folder import RunFolder
from engine.runs.records import json_text

TASK_FILE = "slurm_task.json"
_STAND_IN = "slurm-node"


def build_slurm_plan(
    config: RunConfig,
    facts: NodeFacts,
    run_path: Path,
    *,
    module: str = TRAINER_MODULE,
    environment: Mapping[str, str] | None = None,
    partition_gpus: int = 0,
) -> LaunchPlan:
    """The plan to run `config` on nodes that Slurm will choose, in the run folder `run_path`, which they see, too.

    facts: of this machine, whose Python and folders the nodes share. environment: of this process; where it shows an
    allocation, its nodes are used. partition_gpus: of a node of the partition, where the settings name none. Raises
    ConfigError when a setting cannot be given to Slurm.
    """
    check_slurm_settings(config.cluster)
    resolved, backend = _resolve(config, os.environ if environment is None else environment, partition_gpus)
    cluster = resolved.cluster
    num_nodes = cluster.num_nodes or 1
    is_bare = cluster.container.runtime == "bare"
    python = facts.python if is_bare else cluster.python or "python3"
    ranks = RankCommand(facts.cwd, python, facts.python_path, module)
    builder = NodeBuilder(resolved, backend, run_path, ranks)
    meeting = Rendezvous("FIRST_ADDRESS", cluster.master_port or 0)
    nodes = tuple(builder.node(rank, num_nodes, stand_in(rank), meeting) for rank in range(num_nodes))
    checkpoint = resolved.train.checkpoint
    # The tasks of the nodes run with the Python of this process, which has what they need.
    request = JobRequest(
        run_path,
        num_nodes,
        sys.executable,
        facts.cwd,
        facts.python_path,
        node_list=cluster.nodes,
        has_containers=not is_bare,
        max_restarts=cluster.max_restarts,
        save_s=checkpoint.stop_grace_s if checkpoint.is_on else None,
        settings=cluster.slurm,
    )
    files = (
        ("config.yaml", dump_config(resolved)),
        (SCRIPT_FILE, sbatch_text(request)),
        (TASK_FILE, json_text(asdict(ranks))),
    )
    world_size = backend.local_ranks * num_nodes
    return with_files(LaunchPlan(str(run_path), resolved, world_size, backend, nodes, files, "slurm", True))


@dataclass(frozen=True)
class RankCommand:
    """What starts ranks on every node, as on the launcher's machine, whose storage the nodes share; in TASK_FILE."""

    cwd: str
    python: str
    python_path: str | None
    module: str


@dataclass(frozen=True)
class NodeOnSite:
    """What a node's task knows of its node. address: for the others. facts: None where the plan is only shown."""

    name: str
    address: str
    facts: NodeEnvironmentFacts | None = None
    owner: str = "0:0"
    groups: tuple[int, ...] = ()
    home: str = "/"
    user: str = "root"
    has_infiniband_devices: bool = False


@dataclass(frozen=True)
class NodeBuilder:
    """Builds the plan of a node."""

    config: RunConfig
    backend: Backend
    run_path: Path
    ranks: RankCommand

    def node(self, rank: int, num_nodes: int, site: NodeOnSite, meeting: Rendezvous) -> NodePlan:
        """The plan of the node with this rank."""
        local_ranks, log_dir = self.backend.local_ranks, str(RunFolder(self.run_path).log_dir(site.name))
        is_bare = self.config.cluster.container.runtime == "bare"
        bare = NodePlan(
            name=site.name,
            node_rank=rank,
            first_rank=rank * local_ranks,
            local_ranks=local_ranks,
            argv=self._torchrun(rank, num_nodes, site, meeting),
            environment=self._environment(site, log_dir),
            cwd=self.ranks.cwd if is_bare else str(self.run_path),
            folder=str(self.run_path),
            log_dir=log_dir,
        )
        return bare if is_bare else self._contained(bare, site)

    def environment_text(self, node: NodePlan) -> str:
        """The environment file: for a shell, or for `docker run`, which takes every line as it stands."""
        if node.container is None:
            return environment_file(node)
        return render_environment(NodeEnvironment(node.name, node.environment), Format.dotenv)

    def _torchrun(self, rank: int, num_nodes: int, site: NodeOnSite, meeting: Rendezvous) -> tuple[str, ...]:
        log_dir = str(RunFolder(self.run_path).log_dir(site.name))
        program = RankProgram(self.ranks.python, self.ranks.module, self.run_path.name, str(self.run_path))
        seat = NodeSeat(rank, num_nodes, self.backend.local_ranks, site.address, log_dir)
        return torchrun_argv(program, seat, meeting)

    def _environment(self, site: NodeOnSite, log_dir: str) -> tuple[EnvironmentVariable, ...]:
        cluster = self.config.cluster
        variables = run_variables(self.run_path.name, site.name, log_dir, self._threads(site))
        if self.ranks.python_path:
            reason = "burst runs from a source tree"
            variables.append(EnvironmentVariable("PYTHONPATH", self.ranks.python_path, reason))
        variables += backend_variables(self.backend.name, share_device=cluster.ranks_share_device)
        variables += recorder_variables(log_dir)
        if site.facts is not None:
            planned = plan_environment(site.facts, cluster, log_dir=log_dir)
            ours = {variable.name for variable in variables}
            variables += [variable for variable in planned.variables if variable.name not in ours]
        if cluster.container.runtime != "bare":
            variables += user_variables(site.home, site.user, self._cache(site))
        return with_settings(variables, cluster.environment)

    def _threads(self, site: NodeOnSite) -> Threads:
        if self.config.cluster.threads_per_rank is not None:
            return Threads(self.config.cluster.threads_per_rank, "cluster.threads_per_rank")
        cores, ranks = (site.facts.cores if site.facts is not None else None), self.backend.local_ranks
        if cores is None:
            return Threads(1, "the number of cores is told on the node")
        return Threads(max(1, cores // ranks), f"{cores} cores for {ranks} {'rank' if ranks == 1 else 'ranks'}")

    def _contained(self, bare: NodePlan, site: NodeOnSite) -> NodePlan:
        container = ContainerRun(
            run_id=self.run_path.name,
            node=site.name,
            config=self.config.cluster.container,
            owner=site.owner,
            groups=site.groups,
            folder=bare.folder,
            env_file=f"{bare.folder}/{bare.env_file}",
            mounts=self._mounts(site),
            has_gpus=self.backend.name == "nccl",
            has_infiniband=bool(site.facts and site.facts.ports) and site.has_infiniband_devices,
        )
        return replace(bare, argv=container.argv(bare.argv), container=container.name)

    def _mounts(self, site: NodeOnSite) -> tuple[tuple[str, bool], ...]:
        data = self.config.data
        wanted = [(str(self.run_path), True), (self._cache(site), True)]
        wanted += [(folder, False) for folder in (self.ranks.python_path or "").split(os.pathsep) if folder]
        wanted += [(fixed, False) for path in data.paths if (fixed := fixed_part(path)).startswith("/")]
        wanted += [(path, False) for path in text_files(data) if path.startswith("/")]
        wanted += [] if data.prepared_dir is None else [(data.prepared_dir, True)]
        wanted += state_mounts(self.config, site.home)
        return merge_mounts([*wanted, *read_mounts(self.config.cluster.container.mounts)])

    def _cache(self, site: NodeOnSite) -> str:
        return cache_folder(self.config, site)


def node_folders(config: RunConfig, site: NodeOnSite) -> tuple[str, ...]:
    """Folders that a container mounts and that must be there before, or the engine would make them as root."""
    if config.cluster.container.runtime == "bare":
        return ()
    given = (config.data.prepared_dir, config.train.checkpoint.folder)
    return (cache_folder(config, site), *(at_home(folder, site.home) for folder in given if folder is not None))


def stand_in(rank: int) -> NodeOnSite:
    """What stands for a node that is not known yet."""
    return NodeOnSite(f"{_STAND_IN}{rank}", "ITS_ADDRESS")


def cache_folder(config: RunConfig, site: NodeOnSite) -> str:
    """Where ranks in containers keep prepared data on a node."""
    root = config.cluster.node_folder or "~/.burst"
    return f"{at_home(root, site.home)}/cache"


def asks_partition(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether Slurm must tell the GPUs of a node: the settings do not say how many, and no allocation is there."""
    cluster = config.cluster
    is_told = cluster.slurm.gpus_per_node is not None or (cluster.backend == "nccl" and cluster.ranks_per_node)
    options = tuple(option.removeprefix("--").partition("=")[0] for option in cluster.slurm.options)
    asks_itself = any(name.startswith(("gpus", "gres")) for name in options)
    return cluster.backend != "gloo" and not is_told and not asks_itself and slurm_nodes(environment) is None


def _resolve(config: RunConfig, environment: Mapping[str, str], partition_gpus: int) -> tuple[RunConfig, Backend]:
    """(the configuration with all that is known before there are nodes, the backend)."""
    cluster, slurm = config.cluster, config.cluster.slurm
    granted = slurm_nodes(environment)
    if cluster.num_nodes is not None:
        num_nodes = cluster.num_nodes
    elif cluster.nodes is not None:
        num_nodes = len(parse_nodes(cluster.nodes, "cluster.nodes").names)
    else:
        num_nodes = 1 if granted is None else len(granted.names)
    if granted is not None and num_nodes > len(granted.names):
        raise ConfigError(f"cluster.num_nodes={num_nodes}, but this allocation of Slurm has {len(granted.names)} nodes")
    asked_gpus = cluster.ranks_per_node or 1 if cluster.backend == "nccl" else 0
    found_gpus = partition_gpus if asks_partition(config, environment) else 0
    gpus = slurm.gpus_per_node if slurm.gpus_per_node is not None else found_gpus or asked_gpus
    backend = choose_backend(config, NodeFacts("a node of Slurm", slurm.cpus_per_node or 1, gpus))
    resolved = replace(
        cluster,
        launcher="slurm",
        num_nodes=num_nodes,
        backend=backend.name,  # type: ignore[arg-type]
        ranks_per_node=backend.local_ranks,
        slurm=replace(slurm, gpus_per_node=found_gpus) if found_gpus and backend.name == "nccl" else slurm,
    )
    return replace(config, cluster=resolved), backend
