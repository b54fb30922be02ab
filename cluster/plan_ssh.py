"""The plan of a launch over SSH: a torchrun per node, ranks in the order of the nodes. Pure, from the nodes' facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.access.nodes import fold_nodes
from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.env.formats import Format, render_environment
from cluster.env.plan import plan_environment, plan_fleet
from cluster.errors import ClusterError
from cluster.facts import NodeFacts
from cluster.plan import TRAINER_MODULE, Backend, LaunchPlan, NodePlan, choose_backend, environment_file, with_files
from cluster.plan_container import (
    ContainerRun,
    at_home,
    fixed_part,
    merge_mounts,
    read_mounts,
    state_mounts,
    user_variables,
)
from cluster.plan_torchrun import NodeSeat, RankProgram, Rendezvous, torchrun_argv
from cluster.plan_variables import Threads, backend_variables, recorder_variables, run_variables, with_settings
from cluster.preflight.facts import RemoteFacts
from engine.config.settings import RunConfig, dump_config
from engine.runs.folder import RunFolder


@dataclass(frozen=True)
class Fleet:
    """The nodes of a launch in the order of their ranks, and what they all get.

    code_id: name of the code of the ranks.
    """

    nodes: tuple[RemoteFacts, ...]
    code_id: str

    @property
    def first(self) -> RemoteFacts:
        """The node of rank 0, where the others meet."""
        return self.nodes[0]


def build_ssh_plan(
    config: RunConfig, fleet: Fleet, run_path: Path, *, exclusive: bool = True, module: str = TRAINER_MODULE
) -> LaunchPlan:
    """The plan to run `config` on `fleet`, with `run_path` as the run folder of this machine (not yet there).

    The nodes have passed `cluster.preflight.judge`. Raises ConfigError when the backend does not fit them.
    """
    resolved, backend = resolve_fleet(config, fleet.nodes)
    builder = _Builder(resolved, backend, fleet, run_path, module)
    nodes = tuple(builder.node(rank) for rank in range(len(fleet.nodes)))
    texts = [(node.env_file, builder.environment_text(node)) for node in nodes]
    files = (("config.yaml", dump_config(resolved)), *texts)
    world_size = backend.local_ranks * len(nodes)
    plan = LaunchPlan(str(run_path), resolved, world_size, backend, nodes, files, "ssh", exclusive)
    return with_files(plan)


def resolve_fleet(config: RunConfig, nodes: Sequence[RemoteFacts]) -> tuple[RunConfig, Backend]:
    """(the configuration with all that follows from the nodes, the backend). Raises ConfigError."""
    names = fold_nodes(node.node for node in nodes)
    weakest = NodeFacts(names, min(node.cores for node in nodes), min(len(node.gpus) for node in nodes))
    backend = choose_backend(config, weakest)
    cluster = replace(
        config.cluster,
        launcher="ssh",
        nodes=names,
        num_nodes=len(nodes),
        backend=backend.name,  # type: ignore[arg-type]
        ranks_per_node=backend.local_ranks,
        threads_per_rank=backend.threads_per_rank,
    )
    return replace(config, cluster=cluster), backend


@dataclass(frozen=True)
class _Builder:
    """Builds the nodes of one plan."""

    config: RunConfig
    backend: Backend
    fleet: Fleet
    run_path: Path
    module: str

    def node(self, rank: int) -> NodePlan:
        """The plan of the node with this rank."""
        facts = self.fleet.nodes[rank]
        folder = f"{facts.root}/runs/{self.run_path.name}"
        log_dir = str(RunFolder(Path(folder)).log_dir(facts.node))
        local_ranks = self.backend.local_ranks
        bare = NodePlan(
            name=facts.node,
            node_rank=rank,
            first_rank=rank * local_ranks,
            local_ranks=local_ranks,
            argv=self._torchrun(rank, folder, log_dir),
            environment=self._environment(facts, log_dir),
            cwd=folder,
            folder=folder,
            log_dir=log_dir,
        )
        return bare if self.config.cluster.container.runtime == "bare" else self._contained(bare, facts)

    def environment_text(self, node: NodePlan) -> str:
        """The environment file: for a shell, or for `docker run`, which takes every line as it stands."""
        if node.container is None:
            return environment_file(node)
        return render_environment(NodeEnvironment(node.name, node.environment), Format.dotenv)

    def _torchrun(self, rank: int, folder: str, log_dir: str) -> tuple[str, ...]:
        facts, first = self.fleet.nodes[rank], self.fleet.first
        program = RankProgram(self._python(facts), self.module, self.run_path.name, folder)
        seat = NodeSeat(rank, len(self.fleet.nodes), self.backend.local_ranks, _address(facts), log_dir)
        port = self.config.cluster.master_port or first.port
        assert port is not None, "refused by cluster.preflight.judge"
        meeting = Rendezvous(_address(first), port)
        return torchrun_argv(program, seat, meeting)

    def _python(self, facts: RemoteFacts) -> str:
        if self.config.cluster.container.runtime != "bare":
            return self.config.cluster.python or "python3"
        if facts.python is None:
            raise ClusterError(f"{facts.node}: it has no Python for the ranks")
        return facts.python.executable

    def _environment(self, facts: RemoteFacts, log_dir: str) -> tuple[EnvironmentVariable, ...]:
        cluster, threads = self.config.cluster, self.backend.threads_per_rank
        per_rank = f"{facts.cores} cores for {self.backend.local_ranks} ranks"
        variables = run_variables(self.run_path.name, facts.node, log_dir, Threads(threads, per_rank))
        variables.append(EnvironmentVariable("PYTHONPATH", self._code(facts), "the code of this run, by its content"))
        variables += backend_variables(self.backend.name, share_device=cluster.ranks_share_device)
        variables += recorder_variables(log_dir)
        if facts.environment is not None:
            planned = plan_environment(facts.environment, cluster, log_dir=log_dir)
            ours = {variable.name for variable in variables}
            variables += [variable for variable in planned.variables if variable.name not in ours]
        if cluster.container.runtime != "bare":
            variables += user_variables(facts.home, facts.user, _cache(facts))
        return with_settings(variables, cluster.environment)

    def _code(self, facts: RemoteFacts) -> str:
        return f"{facts.code_root}/{self.fleet.code_id}"

    def _contained(self, bare: NodePlan, facts: RemoteFacts) -> NodePlan:
        container = ContainerRun(
            run_id=self.run_path.name,
            node=facts.node,
            config=self.config.cluster.container,
            owner=f"{facts.uid}:{facts.gid}",
            groups=facts.groups,
            folder=bare.folder,
            env_file=f"{bare.folder}/{bare.env_file}",
            mounts=self._mounts(facts, bare.folder),
            has_gpus=self.backend.name == "nccl",
            has_infiniband=bool(facts.environment and facts.environment.ports) and facts.has_infiniband_devices,
        )
        return replace(bare, argv=container.argv(bare.argv), container=container.name)

    def _mounts(self, facts: RemoteFacts, folder: str) -> tuple[tuple[str, bool], ...]:
        data = [(fixed_part(entry.path), False) for entry in facts.data]
        own = [(folder, True), (self._code(facts), False), (_cache(facts), True)]
        own += [(prepared, True) for prepared in _prepared(self.config, facts)]
        own += state_mounts(self.config, facts.home)
        return merge_mounts([*own, *data, *read_mounts(self.config.cluster.container.mounts)])


def node_folders(plan: LaunchPlan, facts: RemoteFacts) -> tuple[str, ...]:
    """Folders that a container of `plan` mounts; the engine would make them as root if they were not there before."""
    if plan.config.cluster.container.runtime == "bare":
        return ()
    checkpoints = plan.config.train.checkpoint.folder
    own = () if checkpoints is None else (at_home(checkpoints, facts.home),)
    return (_cache(facts), *_prepared(plan.config, facts), *own)


def fleet_warnings(fleet: Fleet, config: RunConfig) -> tuple[str, ...]:
    """What is odd about the network of the nodes, each said once."""
    known = [facts.environment for facts in fleet.nodes if facts.environment is not None]
    planned = plan_fleet(known, config.cluster)
    by_text: dict[str, list[str]] = {}
    for node, environment in planned.items():
        for text in environment.warnings:
            by_text.setdefault(text, []).append(node)
    return tuple(f"{fold_nodes(nodes)}: {text}" for text, nodes in by_text.items())


def _address(facts: RemoteFacts) -> str:
    if facts.address is None:
        raise ClusterError(f"{facts.node}: no address for the other nodes: {facts.interface_problem}")
    return facts.address


def _cache(facts: RemoteFacts) -> str:
    return f"{facts.root}/cache"


def _prepared(config: RunConfig, facts: RemoteFacts) -> tuple[str, ...]:
    """data.prepared_dir on a node, if any."""
    folder = config.data.prepared_dir
    return () if folder is None else (at_home(folder, facts.home),)
