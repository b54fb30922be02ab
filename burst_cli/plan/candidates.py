"""What `burst plan` plans: configurations, one per attention method, with what each will do or why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burst_cli.compose import compose
from burst_cli.config.conf_dirs import list_options, search_path
from burst_cli.plan.memory import MemoryReport, report_memory
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.planning.memory.auto import settle_run
from engine.planning.memory.capacity import Capacity, capacity_of
from engine.planning.memory.cost import planned_flops
from engine.planning.memory.fit import sequence_topology
from engine.planning.memory.predictor import Predict, shared_predictor
from engine.planning.methods.auto import Candidate as RankedMethod
from engine.planning.methods.degrees import known_cp_size
from engine.planning.methods.presets import legal_attention
from engine.planning.methods.preview import AttentionPreview, preview_attention
from engine.planning.methods.topology import Topology
from engine.planning.time.flops import Flops
from engine.planning.time.machine import Machine
from engine.planning.time.step_time import StepTime, predict_step


@dataclass(frozen=True)
class MemoryRequest:
    """How memory is planned.

    device      as in `engine.planning.memory.capacity.capacity_of`
    predicted   False: memory is left out, and memory=auto counts as a policy that costs nothing
    predict     None: in a process of its own
    """

    device: str | None = None
    predicted: bool = True
    predict: Predict | None = None


ONE_RANK = Topology(1, 1)


@dataclass(frozen=True)
class Candidate:
    """A method by the name that was asked for: a preview with its configuration, or the rules that it violates.

    world      all ranks of the run; `group` those that share a sequence
    preview    of the group
    """

    name: str
    config: RunConfig | None = None
    world: Topology = ONE_RANK
    group: Topology = ONE_RANK
    preview: AttentionPreview | None = None
    memory: MemoryReport | None = None
    problems: tuple[str, ...] = ()
    ranking: tuple[RankedMethod, ...] = ()  # what attention=auto chose from, best first
    step: StepTime | None = None  # with a machine

    @property
    def legal_preview(self) -> AttentionPreview:
        """The preview of a candidate that is legal."""
        assert self.preview is not None, self.problems
        return self.preview

    @property
    def legal_config(self) -> RunConfig:
        """The configuration of a candidate that is legal."""
        assert self.config is not None, self.problems
        return self.config

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.world.size

    def flops(self) -> Flops:
        """FLOPs of one optimizer step over all ranks, pairs as the masks count them."""
        return flops_of(self.legal_config, self.group)

    def to_dict(self) -> dict[str, Any]:
        """The document of `burst plan --json`."""
        if self.preview is None:
            return {"preset": self.name, "legal": False, "problems": list(self.problems)}
        flops = self.flops()
        return {
            "preset": self.preview.method.preset,
            "legal": True,
            "problems": [],
            "warnings": self.preview.warnings,
            "exp": self.legal_config.exp,
            "seq_len": self.legal_config.train.seq_len,
            "world_size": self.world_size,
            "cp_size": self.group.size,
            "topology": {"nodes": self.group.nodes, "local_ranks": self.group.local_ranks},
            "planned_ranks": list(self.preview.planned_ranks),
            "attention": self.preview.to_dict(),
            "candidates": [method.to_dict() for method in self.ranking],
            "memory": self.memory.to_dict() if self.memory else None,
            "flops": {
                "model": flops.model,
                "model_full_attention": flops.model_full_attention,
                "hardware": flops.hardware,
            },
            "time": self.preview.time_to_dict(),
            "step_time": self.step.to_dict() if self.step else None,
        }


def flops_of(config: RunConfig, group: Topology) -> Flops:
    """FLOPs of one optimizer step over all ranks; `group`: the ranks that share a sequence. Pairs by the masks."""
    groups = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
    return planned_flops(config, legal_attention(config, group), groups)


def placement_overrides(ranks: int | None, nodes: int | None) -> list[str]:
    """--ranks and --nodes as settings."""
    chosen = {"cluster.ranks_per_node": ranks, "cluster.topology_nodes": nodes}
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def names_to_compare(
    compare: str | None, compare_all: bool, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> list[str]:
    """Options of the group attention, as --compare lists them or (--all) all of them; empty without either."""
    if compare is None and not compare_all:
        return []
    options = list(list_options(search_path(config_dirs)).get("attention", {}))
    names = options if compare is None else list(dict.fromkeys(name.strip() for name in compare.split(",")))
    problems = [f"--compare and --all exclude each other; leave out --all or --compare {compare}"] * (
        compare is not None and compare_all
    )
    problems += [f"--compare: no option {name!r} of attention; there are {', '.join(options)}"
                 for name in names if name not in options]  # fmt: skip
    problems += [f"{override}: --compare and --all choose the attention themselves; leave it out"
                 for override in overrides if override.startswith("attention=")]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return names


def plan_one(
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    machine: Machine | None,
    memory: MemoryRequest,
) -> Candidate:
    """The plan of the configuration that these overrides spell. Raises ConfigError when it is not legal."""
    config = compose(overrides, config_dirs).config
    world = world_topology(config)
    machine = machine and machine.shared_by(world.local_ranks)
    capacity = capacity_of(config, world.local_ranks, device=memory.device)
    config = _computing_on(config, capacity)
    if not memory.predicted and config.memory.activation_checkpoint == "auto":
        config = replace(config, memory=replace(config.memory, activation_checkpoint="none"))
    predict = memory.predict or shared_predictor().predict
    attention, choice = settle_run(config, world, capacity, predict, machine)
    group = sequence_topology(choice.config, world)
    preview = preview_attention(choice.config, group, machine)
    report = report_memory(choice, world, capacity, predict, machine) if memory.predicted else None
    name = preview.method.preset
    step = None if machine is None else predict_step(choice.config, world, machine)
    return Candidate(name, choice.config, world, group, preview, report, ranking=attention.candidates, step=step)


def _computing_on(config: RunConfig, capacity: Capacity) -> RunConfig:
    """The configuration with the backend that the ranks of such a device take."""
    on_cpu = config.cluster.backend == "gloo" and not config.cluster.ranks_share_device
    if on_cpu == capacity.host_is_device:
        return config
    return replace(config, cluster=replace(config.cluster, backend="gloo" if capacity.host_is_device else "auto"))


def plan_each(
    names: Sequence[str],
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    machine: Machine | None,
    memory: MemoryRequest,
) -> list[Candidate]:
    """One candidate per option of attention, in that order.

    Raises ConfigError when none is legal: then the mistake is not in the method.
    """
    candidates = []
    for name in names:
        try:
            planned = plan_one([*overrides, f"attention={name}"], config_dirs, machine, memory)
            candidates.append(replace(planned, name=name))
        except ConfigError as error:
            candidates.append(Candidate(name, problems=error.problems))
    if all(candidate.preview is None for candidate in candidates):
        raise ConfigError(list(dict.fromkeys(text for candidate in candidates for text in candidate.problems)))
    return candidates


def world_topology(config: RunConfig) -> Topology:
    """Where all ranks of the run lie. Raises ConfigError while their number is unknown."""
    cp_size, cluster = known_cp_size(config.parallel, config.cluster.world_size), config.cluster
    if cp_size is None:
        raise ConfigError(
            "the number of ranks is unknown: cluster.ranks_per_node is null, which means one per GPU of the machine "
            "that trains; add --ranks N (and --nodes M), such as --ranks 16 --nodes 2"
        )
    world_size, nodes = cluster.world_size or cp_size * _model_copies(config), cluster.topology_groups
    if world_size % nodes:
        raise ConfigError(f"cluster.topology_nodes: {nodes} nodes cannot share {world_size} ranks evenly; see --nodes")
    return Topology(nodes, world_size // nodes)


def group_topology(config: RunConfig) -> Topology:
    """Where the ranks that share one sequence lie. Raises ConfigError while their number is unknown."""
    return sequence_topology(config, world_topology(config))


def _model_copies(config: RunConfig) -> int:
    """Ranks of the world for every rank that shares a given sequence."""
    parallel = config.parallel
    return parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
