"""What runs on one node of several: torchrun, its environment, its container. One builder for SSH and Slurm. Pure.

The rendezvous is static because that of c10d numbers nodes as they come, and plans of attention rely on who lies where.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.env.facts import EnvironmentVariable, NodeEnvironment, NodeEnvironmentFacts
from cluster.env.formats import Format, render_environment
from cluster.env.plan import plan_environment
from cluster.plan import Backend, NodePlan, environment_file
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
from cluster.plan_variables import Threads, backend_variables, recorder_variables, run_variables, with_settings
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of all nodes meet: an address of the first node, and a port that is free there."""

    address: str
    port: int


@dataclass(frozen=True)
class Site:
    """A node as the plan of its ranks needs it. address: for the other nodes. folder: the run folder there.

    python, python_path, cwd: of the ranks. facts: None where the plan is only shown. owner: `UID:GID` of the ranks.
    """

    name: str
    address: str
    folder: str
    python: str
    python_path: str | None
    cwd: str
    facts: NodeEnvironmentFacts | None = None
    cores: int | None = None
    owner: str = "0:0"
    groups: tuple[int, ...] = ()
    home: str = "/"
    user: str = "root"
    has_infiniband_devices: bool = False


@dataclass(frozen=True)
class NodesBuilder:
    """Builds the plans of the nodes of one run, `count` of them. module: what every rank runs."""

    config: RunConfig
    backend: Backend
    run_id: str
    count: int
    module: str

    def node(self, rank: int, site: Site, meeting: Rendezvous) -> NodePlan:
        """The plan of the node with this rank."""
        local_ranks, log_dir = self.backend.local_ranks, str(RunFolder(Path(site.folder)).log_dir(site.name))
        is_bare = self.config.cluster.container.runtime == "bare"
        bare = NodePlan(
            name=site.name,
            node_rank=rank,
            first_rank=rank * local_ranks,
            local_ranks=local_ranks,
            argv=self._torchrun(rank, site, meeting, log_dir),
            environment=self._environment(site, log_dir),
            cwd=site.cwd if is_bare else site.folder,
            folder=site.folder,
            log_dir=log_dir,
        )
        return bare if is_bare else self._contained(bare, site)

    def environment_text(self, node: NodePlan) -> str:
        """The environment file: for a shell, or for `docker run`, which takes every line as it stands."""
        if node.container is None:
            return environment_file(node)
        return render_environment(NodeEnvironment(node.name, node.environment), Format.dotenv)

    def _torchrun(self, rank: int, site: Site, meeting: Rendezvous, log_dir: str) -> tuple[str, ...]:
        """torchrun for the ranks of one node, all of which start once every node is there."""
        return (
            site.python,
            *("-m", "torch.distributed.run"),
            f"--nnodes={self.count}",
            f"--node-rank={rank}",
            f"--nproc-per-node={self.backend.local_ranks}",
            "--max-restarts=0",
            "--rdzv-backend=static",
            f"--rdzv-id={self.run_id}",
            f"--master-addr={meeting.address}",
            f"--master-port={meeting.port}",
            f"--local-addr={site.address}",
            f"--log-dir={log_dir}/torchrun",
            *("-m", self.module),
            f"{site.folder}/config.yaml",
        )

    def _environment(self, site: Site, log_dir: str) -> tuple[EnvironmentVariable, ...]:
        cluster = self.config.cluster
        variables = run_variables(self.run_id, site.name, log_dir, self._threads(site))
        if site.python_path:
            variables.append(EnvironmentVariable("PYTHONPATH", site.python_path, "where the ranks find the engine"))
        variables += backend_variables(self.backend.name, share_device=cluster.ranks_share_device)
        variables += recorder_variables(log_dir)
        if site.facts is not None:
            planned = plan_environment(site.facts, cluster, log_dir=log_dir)
            ours = {variable.name for variable in variables}
            variables += [variable for variable in planned.variables if variable.name not in ours]
        if cluster.container.runtime != "bare":
            variables += user_variables(site.home, site.user, cache_folder(self.config, site.home))
        return with_settings(variables, cluster.environment)

    def _threads(self, site: Site) -> Threads:
        configured, ranks = self.config.cluster.threads_per_rank, self.backend.local_ranks
        if site.cores is None:
            return Threads(configured or 1, "the number of cores is told on the node")
        reason = f"{site.cores} cores for {ranks} {'rank' if ranks == 1 else 'ranks'}"
        return Threads(configured or max(1, site.cores // ranks), reason)

    def _contained(self, bare: NodePlan, site: Site) -> NodePlan:
        container = ContainerRun(
            run_id=self.run_id,
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

    def _mounts(self, site: Site) -> tuple[tuple[str, bool], ...]:
        data = self.config.data
        read = [*(site.python_path or "").split(os.pathsep), *data.paths, *text_files(data)]
        found = (fixed_part(at_home(path, site.home)) for path in read)
        wanted = [(path, False) for path in found if path.startswith("/")]
        wanted += [(path, True) for path in (site.folder, *node_folders(self.config, site.home))]
        wanted += state_mounts(self.config, site.home)
        return merge_mounts([*wanted, *read_mounts(self.config.cluster.container.mounts)])


def node_folders(config: RunConfig, home: str) -> tuple[str, ...]:
    """Folders that a container mounts; the engine would make them as root if they were not there before."""
    if config.cluster.container.runtime == "bare":
        return ()
    given = (config.data.prepared_dir, config.train.checkpoint.folder)
    return (cache_folder(config, home), *(at_home(folder, home) for folder in given if folder is not None))


def cache_folder(config: RunConfig, home: str) -> str:
    """Where ranks in containers keep prepared data on a node."""
    return f"{at_home(config.cluster.node_folder or '~/.burst', home)}/cache"
