"""`Runner` for nodes reached by SSH: all are asked what they have, get the code, and are led over one connection each.

The plan is a torchrun per node, ranks in the order of the nodes; a pure function of the nodes' facts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.agent.messages import code_path
from cluster.checks.groups.host import read_software
from cluster.checks.launch import NodeResources, check_launch, read_resources
from cluster.code import build_archive, code_folder, shared_subfolder, upload_code
from cluster.control.runner import Runner, Survey, SurveyOptions
from cluster.env.plan import plan_fleet
from cluster.plan import TRAINER_MODULE, Backend, LaunchPlan, MachineFacts, assemble_plan, with_ranks
from cluster.plan_nodes import NodesBuilder, NodeTarget, Rendezvous, at_home, node_folders, node_root
from cluster.ssh.hosts import fold_nodes, parse_nodes, resolve_hosts
from cluster.ssh.session import SshPool
from cluster.survey.drivers import Gpu as SmiGpu
from cluster.survey.drivers import Unavailable
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NotApplicableError, UnreadableError
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.predict.memory import HOST_RESERVE_SHARE, MIB, Gpu, Hardware


class SshRunner(Runner):
    """Ranks on nodes that are reached by SSH."""

    takes_nodes = True

    def survey(self, config: RunConfig, asked: SurveyOptions) -> Survey:
        """Nodes that can carry the run; what they must get before anything starts is the code of the ranks."""
        named = config.cluster.nodes
        if asked.nodes is None and named is None:
            raise ConfigError(
                "cluster.launcher=ssh, but no nodes are named: give --hosts node[1-4], --hostfile FILE or cluster=NAME "
                "(a file in conf/cluster/ with `nodes:`); `burst testbed up` makes nodes to try things on"
            )
        config = with_absolute_paths(config)
        names = asked.nodes or parse_nodes(named or "", "cluster.nodes").names
        hosts = resolve_hosts(names, config.cluster, asked.overrides)
        config = with_shared_checkpoints(config, hosts[0].user)
        archive, place = build_archive(), code_folder(config.cluster, hosts[0].user)
        code = code_path(place.root, archive.code_id)
        with asked.busy(f"asking {len(hosts)} nodes"):
            fit = check_launch(hosts, config, health=asked.health, force=asked.force, resumed=asked.resumed)
        nodes = tuple(map(read_node, fit.nodes))

        def prepare(plan: LaunchPlan) -> None:
            folders = {node.name: node_folders(plan.config, node.offer.home) for node in nodes}
            with SshPool() as pool, asked.busy(f"code of the ranks to {len(hosts)} nodes"):
                upload_code(hosts, archive, place, pool.connect, folders, separate_folders(plan.config, hosts[0].user))

        return Survey(
            config,
            lambda config, run_path: build_ssh_plan(config, nodes, code, run_path, module=asked.module),
            least_hardware(nodes),
            fit.warnings + fleet_warnings(nodes, resolve_fleet(config, nodes)[0]),
            prepare=prepare,
        )


RUNNER = SshRunner()


@dataclass(frozen=True)
class SshNode:
    """A node as plans read it. python: of ranks that run on it itself."""

    facts: NodeFacts
    offer: NodeResources
    python: str
    gpus: tuple[Gpu, ...]

    @property
    def name(self) -> str:
        """The node's."""
        return self.facts.node


def read_node(facts: NodeFacts) -> SshNode:
    """What plans need of a node that has passed `check_launch`."""
    software = None if facts.in_containers else read_software(facts)
    python = "" if software is None else software.executable
    return SshNode(facts, read_resources(facts), python, tuple(map(_gpu, facts.gpus)))


def _gpu(gpu: SmiGpu) -> Gpu:
    name, size_mib = gpu.look("product_name"), 0.0
    with contextlib.suppress(NotApplicableError, UnreadableError):
        size_mib = gpu.number("fb_memory_usage/total")
    return Gpu("" if isinstance(name, Unavailable) else name, int(size_mib) * MIB)


def build_ssh_plan(
    config: RunConfig, nodes: Sequence[SshNode], code: str, run_path: Path, *, module: str = TRAINER_MODULE
) -> LaunchPlan:
    """The plan to run `config` on `nodes` in the order of their ranks, which have their code at `code`.

    run_path: the run folder of this machine, not yet there. The nodes have passed `check_launch`. Raises ConfigError
    when the backend does not fit them.
    """
    resolved, backend = resolve_fleet(config, nodes)
    builder = NodesBuilder(resolved, backend, run_path.name, len(nodes), module)
    sites = [_site(node, resolved, run_path.name, code) for node in nodes]
    meeting = Rendezvous(sites[0].address, config.cluster.master_port or nodes[0].offer.port[0])
    planned = [builder.node(rank, site, meeting) for rank, site in enumerate(sites)]
    texts = [(node.env_file, builder.environment_text(node)) for node in planned]
    return assemble_plan("ssh", resolved, run_path, planned, backend, *texts)


def _site(node: SshNode, config: RunConfig, run_id: str, code: str) -> NodeTarget:
    offer, address = node.offer, node.facts.interface.address
    assert address is not None, "refused by `check_launch`"
    folder = f"{at_home(node_root(config.cluster), offer.home)}/runs/{run_id}"
    return NodeTarget(
        name=node.name,
        address=address,
        folder=folder,
        python=node.python if config.cluster.container.runtime == "bare" else config.cluster.python or "python3",
        python_path=at_home(code, offer.home),
        cwd=folder,
        facts=node.facts,
        owner=f"{offer.uid}:{offer.gid}",
        groups=offer.groups,
        home=offer.home,
        user=offer.user,
        has_infiniband_devices=offer.has_infiniband_devices,
    )


def resolve_fleet(config: RunConfig, nodes: Sequence[SshNode]) -> tuple[RunConfig, Backend]:
    """(the configuration with all that follows from the nodes, the backend). Raises ConfigError."""
    names, cores = fold_nodes(node.name for node in nodes), min(node.facts.carriers.cores or 1 for node in nodes)
    weakest = MachineFacts(names, cores, min(len(node.gpus) for node in nodes))
    return with_ranks(config, weakest, launcher="ssh", nodes=names, num_nodes=len(nodes))


def fleet_warnings(nodes: Sequence[SshNode], config: RunConfig) -> tuple[str, ...]:
    """What is odd about the network of the nodes, each said once."""
    by_text: dict[str, list[str]] = {}
    for node, environment in plan_fleet([node.facts for node in nodes], config.cluster).items():
        for text in environment.warnings:
            by_text.setdefault(text, []).append(node)
    return tuple(f"{fold_nodes(names)}: {text}" for text, names in by_text.items())


def least_hardware(nodes: Sequence[SshNode]) -> Hardware:
    """What every node has at least: the GPUs of the one with the smallest, the least host memory."""
    smallest = min(nodes, key=lambda node: min((gpu.total_bytes for gpu in node.gpus), default=0))
    known = [(node.offer.memory_bytes, node.name) for node in nodes if node.offer.memory_bytes is not None]
    if not known:
        return Hardware(smallest.gpus, None, "unknown")
    size, node = min(known)
    return Hardware(smallest.gpus, round(size * (1 - HOST_RESERVE_SHARE)), f"memory of {node}")


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths: neither nodes nor later commands know the working folder of this one.

    What begins with ~/ stays where a node reads it: its user has a home of its own.
    """
    data, ssh, blocks = config.data, config.cluster.ssh, config.attention.blocks_file
    template = data.chat_template
    data = replace(
        data,
        paths=tuple(map(_absolute, data.paths)),
        tokenizer=data.tokenizer if data.tokenizer in ("bytes", "bpe") else _absolute(data.tokenizer),
        chat_template=template if template in (None, "chatml") else _absolute(str(template)),
        prepared_dir=None if data.prepared_dir is None else _absolute(data.prepared_dir),
    )
    attention = config.attention if blocks is None else replace(config.attention, blocks_file=_absolute(blocks))
    ssh = replace(
        ssh,
        identity_file=_local_file(ssh.identity_file),
        config_file=_local_file(ssh.config_file),
        known_hosts=_local_file(ssh.known_hosts),
    )
    return replace(config, data=data, attention=attention, cluster=replace(config.cluster, ssh=ssh))


def _local_file(path: str | None) -> str | None:
    return path and str(Path(path).expanduser().absolute())


def _absolute(path: str) -> str:
    return path if not path or path.startswith(("/", "~")) else str(Path.cwd() / path)


def separate_folders(config: RunConfig, user: str) -> tuple[str, ...]:
    """Folders that burst itself has named where others may write: who can write there could exchange checkpoints."""
    shared, folder = config.cluster.shared_folder, config.train.checkpoint.folder
    return (folder,) if folder and shared and folder == shared_subfolder(shared, user, "checkpoints") else ()


def with_shared_checkpoints(config: RunConfig, user: str) -> RunConfig:
    """The configuration with checkpoints in the folder that all nodes see, if there is one, unless it says where."""
    shared, settings = config.cluster.shared_folder, config.train.checkpoint
    if shared is None or settings.folder is not None:
        return config
    settings = replace(settings, folder=shared_subfolder(shared, user, "checkpoints"))
    return replace(config, train=replace(config.train, checkpoint=settings))
