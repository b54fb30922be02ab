"""The plan of a launch over SSH: a torchrun per node, ranks in the order of the nodes. Pure, from the nodes' facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.env.plan import plan_fleet
from cluster.errors import ClusterError
from cluster.facts import NodeFacts
from cluster.plan import TRAINER_MODULE, Backend, LaunchPlan, choose_backend, with_files
from cluster.plan_nodes import NodesBuilder, Rendezvous, Site
from cluster.preflight.facts import RemoteFacts
from cluster.ssh.nodes import fold_nodes
from engine.config.settings import RunConfig, dump_config


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
    builder = NodesBuilder(resolved, backend, run_path.name, len(fleet.nodes), module)
    port = config.cluster.master_port or fleet.first.port
    assert port is not None, "refused by cluster.preflight.judge"
    meeting = Rendezvous(_address(fleet.first), port)
    sites = [_site(facts, resolved, run_path.name, fleet.code_id) for facts in fleet.nodes]
    nodes = tuple(builder.node(rank, site, meeting) for rank, site in enumerate(sites))
    texts = [(node.env_file, builder.environment_text(node)) for node in nodes]
    files = (("config.yaml", dump_config(resolved)), *texts)
    world_size = backend.local_ranks * len(nodes)
    plan = LaunchPlan(str(run_path), resolved, world_size, backend, nodes, files, "ssh", exclusive)
    return with_files(plan)


def _site(facts: RemoteFacts, config: RunConfig, run_id: str, code_id: str) -> Site:
    folder = f"{facts.root}/runs/{run_id}"
    return Site(
        name=facts.node,
        address=_address(facts),
        folder=folder,
        python=_python(facts, config),
        python_path=f"{facts.code_root}/{code_id}",
        cwd=folder,
        facts=facts.environment,
        cores=facts.cores,
        owner=f"{facts.uid}:{facts.gid}",
        groups=facts.groups,
        home=facts.home,
        user=facts.user,
        has_infiniband_devices=facts.has_infiniband_devices,
    )


def _python(facts: RemoteFacts, config: RunConfig) -> str:
    if config.cluster.container.runtime != "bare":
        return config.cluster.python or "python3"
    if facts.python is None:
        raise ClusterError(f"{facts.node}: it has no Python for the ranks")
    return facts.python.executable


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
