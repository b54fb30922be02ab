"""`burst launch` on nodes reached by SSH: ask them, judge them, plan, bring them the code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from burst_cli import render
from burst_cli.compose import Composed
from burst_cli.launch_request import LaunchRequest, PreparedLaunch, settle_memory, time_notes, with_policy
from burst_cli.memory_check import with_memory
from cluster.code.archive import build_archive
from cluster.code.upload import Delivery, code_place, shared_place, upload_code
from cluster.facts import probe_local_node
from cluster.image.local import engine_words
from cluster.plan import LaunchPlan
from cluster.plan_nodes import node_folders
from cluster.plan_ssh import Fleet, build_ssh_plan, fleet_warnings, resolve_fleet
from cluster.preflight.facts import RemoteFacts
from cluster.preflight.gate import check_health
from cluster.preflight.judge import check_survey
from cluster.preflight.survey import Question, survey_fleet
from cluster.ssh.hosts import Host
from cluster.ssh.nodes import parse_nodes
from cluster.ssh.pool import SshPool
from cluster.ssh.resolve import resolve_hosts
from engine.config.cluster import SshConfig
from engine.config.settings import RunConfig
from engine.planning.memory.capacity import HOST_RESERVE_SHARE, MIB, Gpu, Hardware


@dataclass(frozen=True)
class ReadyFleet:
    """Nodes that passed, and what they must get before anything starts."""

    hosts: tuple[Host, ...]
    delivery: Delivery

    def lay_code(self) -> None:
        """The code of the ranks on every node. Raises CodeError."""
        with SshPool() as pool, render.stderr().status(f"code of the ranks to {len(self.hosts)} nodes"):
            upload_code(self.hosts, self.delivery, pool.connect)


def prepare_fleet(
    request: LaunchRequest, composed: Composed, run_path: Path, nodes: tuple[str, ...] | None
) -> PreparedLaunch:
    """The launch over SSH that `request` means; nodes: in the order of their ranks, None: that of cluster.nodes."""
    config = at_home(composed.config)
    names = nodes or parse_nodes(config.cluster.nodes or "", "cluster.nodes").names
    hosts = resolve_hosts(names, config.cluster.ssh, request.overrides)
    config = with_shared_checkpoints(config, hosts[0].user)
    fleet, delivery, warnings = survey_nodes(config, hosts, force=request.force)
    resolved, _ = resolve_fleet(config, fleet.nodes)
    memory = settle_memory(request, resolved, least_hardware(fleet.nodes))
    warnings += fleet_warnings(fleet, resolved)
    if not request.skip_checks and not request.dry_run:
        with render.stderr().status(f"checking {len(hosts)} nodes"):
            warnings += check_health(hosts, resolved.cluster, force=request.force)
    plan = with_memory(
        build_ssh_plan(with_policy(config, memory), fleet, run_path, exclusive=not request.force), memory
    )
    ready = ready_fleet(plan, hosts, fleet, delivery)
    notes = composed.notes + time_notes(request, memory.config, probe_local_node(), least_hardware(fleet.nodes))
    return PreparedLaunch(plan, memory, composed.overrides, warnings, ready, notes)


def survey_nodes(config: RunConfig, hosts: Sequence[Host], *, force: bool) -> tuple[Fleet, Delivery, tuple[str, ...]]:
    """(the nodes that passed, the code that they are to get, warnings). Raises UnfitNodesError."""
    archive = build_archive()
    place = code_place(config.cluster.node_folder, config.cluster.shared_folder, hosts[0].user)
    with SshPool() as pool:
        question = Question(config, archive.code_id, place.root if place.is_shared else None, _engine(config))
        with render.stderr().status(f"asking {len(hosts)} nodes"):
            survey = survey_fleet(hosts, question, pool.connect)
    warnings = check_survey(survey, config, force=force)
    fleet = Fleet(tuple(survey.facts[host.name] for host in hosts), archive.code_id)
    return fleet, Delivery(archive, place, width=config.cluster.ssh.fan_out), warnings


def ready_fleet(plan: LaunchPlan, hosts: tuple[Host, ...], fleet: Fleet, delivery: Delivery) -> ReadyFleet:
    """The nodes of `plan` with all that they are to get."""
    folders = {facts.node: node_folders(plan.config, facts.home) for facts in fleet.nodes}
    return ReadyFleet(hosts, replace(delivery, folders=folders))


def at_home(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths: neither nodes nor later commands know the working folder of this one.

    What begins with ~/ stays where a node reads it: its user has a home of its own.
    """
    data = config.data
    is_file, template = data.tokenizer not in ("bytes", "bpe"), data.chat_template
    data = replace(
        data,
        paths=tuple(_absolute(path) for path in data.paths),
        tokenizer=_absolute(data.tokenizer) if is_file else data.tokenizer,
        chat_template=template if template is None or template == "chatml" else _absolute(template),
        prepared_dir=None if data.prepared_dir is None else _absolute(data.prepared_dir),
    )
    blocks = config.attention.blocks_file
    attention = config.attention if blocks is None else replace(config.attention, blocks_file=_absolute(blocks))
    cluster = replace(config.cluster, ssh=_absolute_ssh(config.cluster.ssh))
    return replace(config, data=data, attention=attention, cluster=cluster)


def with_shared_checkpoints(config: RunConfig, user: str) -> RunConfig:
    """The configuration with checkpoints in the folder that all nodes see, if there is one, unless it says where."""
    shared, settings = config.cluster.shared_folder, config.train.checkpoint
    if shared is None or settings.folder is not None:
        return config
    settings = replace(settings, folder=shared_place(shared, user, "checkpoints"))
    return replace(config, train=replace(config.train, checkpoint=settings))


def least_hardware(nodes: Sequence[RemoteFacts]) -> Hardware:
    """What every node has at least: the GPUs of the one with the smallest, the least host memory."""
    smallest = min(nodes, key=lambda facts: min((gpu.memory_mib for gpu in facts.gpus), default=0))
    gpus = tuple(Gpu(gpu.name, gpu.memory_mib * MIB) for gpu in smallest.gpus)
    known = [(facts.memory_bytes, facts.node) for facts in nodes if facts.memory_bytes is not None]
    if not known:
        return Hardware(gpus, None, "unknown")
    size, node = min(known)
    return Hardware(gpus, round(size * (1 - HOST_RESERVE_SHARE)), f"memory of {node}")


def _engine(config: RunConfig) -> tuple[str, ...]:
    container = config.cluster.container
    return () if container.runtime == "bare" else engine_words(container.command)


def _absolute_ssh(ssh: SshConfig) -> SshConfig:
    return replace(
        ssh,
        identity_file=_own_file(ssh.identity_file),
        config_file=_own_file(ssh.config_file),
        known_hosts=_own_file(ssh.known_hosts),
    )


def _own_file(path: str | None) -> str | None:
    return path if path is None else str(Path(path).expanduser().absolute())


def _absolute(path: str) -> str:
    return path if not path or path.startswith(("/", "~")) else str(Path.cwd() / path)
