"""What `burst plan` plans: a configuration, with what it will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from burst_cli.plan.memory_check import MemoryCheck, with_remedies, world_topology
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, PresetName, RunConfig
from engine.planning.methods.presets import PRESETS
from engine.planning.topology import Topology, sequence_topology
from engine.predict.attention import AttentionPreview, preview_attention
from engine.predict.flops import StepTime
from engine.predict.machine import Machine, device_bytes, find_machine, machine_of, split_device
from engine.predict.memory import capacity_of, configured_device, find_hardware, shared_predictor
from engine.predict.step_time import predict_step
from engine.resolve.auto import Candidate as RankedMethod
from engine.resolve.auto import resolve_auto
from engine.resolve.memory import resolve_memory
from engine.resolve.recommend import Adviser, Recommendation


@dataclass(frozen=True)
class Preset:
    """A method with all else as planned: seconds of a step, bytes of a rank; problems: the rules that it violates."""

    preset: str
    step_s: float | None = None
    needed_bytes: int | None = None
    fits: bool | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A configuration that can run, resolved; `world`: all its ranks.

    ranking   what attention=auto chose from, best first
    presets   all of them under the same memory policy, where that was asked for
    as_measured   nobody says how many ranks a node has: as many as the machine was measured with
    advice    what would cost less; None: nothing does, or nobody looked
    """

    config: RunConfig
    world: Topology
    machine: Machine
    step: StepTime
    memory: MemoryCheck | None = None
    ranking: tuple[RankedMethod, ...] = ()
    presets: tuple[Preset, ...] = ()
    as_measured: bool = False
    advice: Recommendation | None = None

    @property
    def fits(self) -> bool:
        """As far as is known."""
        return self.memory is None or self.memory.fits

    @property
    def group(self) -> Topology:
        """The ranks that share a sequence."""
        return sequence_topology(self.config, self.world)

    @cached_property
    def preview(self) -> AttentionPreview:
        """Attention's plans; made when somebody looks, which takes longer than the time of a step."""
        return preview_attention(self.config, self.group, self.machine)

    def run_to_dict(self, price: float | None) -> dict[str, Any]:
        """All steps of the run; `price`: of a device hour."""
        steps = self.config.train.steps
        hours = steps * self.step.seconds / 3600
        device_hours = hours * self.world.size
        cost = None if price is None else price * device_hours
        tokens = steps * self.step.tokens
        return {"steps": steps, "tokens": tokens, "hours": hours, "device_hours": device_hours, "cost": cost}

    def to_dict(self, price: float | None = None) -> dict[str, Any]:
        """The document of `burst plan --json`."""
        preview = self.preview
        return {
            "preset": preview.method.preset,
            "warnings": preview.warnings,
            "exp": self.config.exp,
            "seq_len": self.config.train.seq_len,
            "world_size": self.world.size,
            "cp_size": self.group.size,
            "topology": {"nodes": self.group.nodes, "local_ranks": self.group.local_ranks},
            "planned_ranks": list(preview.planned_ranks),
            "attention": preview.to_dict(),
            "candidates": [method.to_dict() for method in self.ranking],
            "presets": [asdict(one) for one in self.presets],
            "memory": self.memory.to_dict() if self.memory else None,
            "flops": asdict(self.step.flops),
            "time": preview.time_to_dict(),
            # What does not fit takes no time: figures of a step that cannot be would be read as an answer.
            "step_time": self.step.to_dict() if self.fits else None,
            "run": self.run_to_dict(price) if self.fits else None,
            "recommendation": self.advice.to_dict() if self.advice else None,
        }


def placement_overrides(ranks: int | None, nodes: int | None) -> list[str]:
    """--ranks and --nodes as settings."""
    chosen = {"cluster.ranks_per_node": ranks, "cluster.topology_nodes": nodes}
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def placement(device: str | None, ranks: int | None, nodes: int | None) -> tuple[str | None, list[str]]:
    """(the device, --ranks and --nodes as settings); `h100x8` says that a node has eight ranks.

    Raises ConfigError for a number of ranks that such nodes do not have.
    """
    name, per_node = (None, None) if device is None else split_device(device)
    if per_node is not None:
        if ranks is not None and ranks != per_node * (nodes or 1):
            text = f"--device {device} means {per_node} ranks on each of {nodes or 1} nodes, but --ranks is {ranks}"
            raise ConfigError(f"{text}; leave --ranks out, or write --device {name} --ranks {ranks} --nodes N")
        ranks = per_node * (nodes or 1)
    return name, placement_overrides(ranks, nodes)


def assumes_device(config: RunConfig) -> bool:
    """Whether neither `config` nor this machine says what the ranks run on."""
    return configured_device(config) is None and not find_hardware().gpus


def plan_one(
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    *,
    device: str | None,
    has_memory: bool,
    has_presets: bool,
    announce: Callable[[], None] = lambda: None,
) -> Plan:
    """The plan of the configuration that these overrides spell. Raises ConfigError when it is not legal.

    device: a machine or a size, as in `engine.predict.memory.capacity_of`; None: as configured, else this
    machine. has_memory: without it memory is left out, and memory=auto counts as a policy that costs nothing.
    has_presets: of attention=auto all of them, a second or more each. announce: called once the configuration is found
    legal, before memory is predicted.
    """
    from burst_cli.compose import compose  # loads Hydra, which `--help` need not

    named = None if device is None or device_bytes(device) is not None else find_machine(device)
    asked = compose(overrides, config_dirs).config
    as_measured = _ranks_as_measured(asked, named)
    if as_measured:
        asked = compose([*overrides, *as_measured], config_dirs).config
    world = world_topology(asked)
    capacity = capacity_of(asked, world.local_ranks, device=device)
    on_cpu = asked.cluster.backend == "gloo" and not asked.cluster.ranks_share_device
    if on_cpu != capacity.host_is_device:  # the backend is that of the ranks of such a device
        asked = replace(asked, cluster=replace(asked.cluster, backend="gloo" if capacity.host_is_device else "auto"))
    if not has_memory and asked.memory.activation_checkpoint == "auto":
        asked = replace(asked, memory=replace(asked.memory, activation_checkpoint="none"))
    machine = (named or machine_of(asked, capacity.device_name)).shared_by(world.local_ranks)
    if has_memory:
        shared_predictor().start()  # it loads torch meanwhile
    predict = shared_predictor().predict
    attention = resolve_auto(asked, sequence_topology(asked, world), machine)
    if has_memory:
        announce()
    choice = resolve_memory(attention.config, world, capacity, predict, machine)
    memory, advice = None, None
    if has_memory:
        memory = MemoryCheck(choice.config, capacity, choice.prediction or predict(choice.config, world), choice)
        memory = with_remedies(memory, world, predict, machine)
        if memory.fits:
            advice = Adviser(capacity, machine, predict).recommend(asked, choice.config, world)
    step = predict_step(choice.config, world, machine)
    plan = Plan(choice.config, world, machine, step, memory, attention.candidates, (), bool(as_measured), advice)
    if not has_presets or not plan.ranking:
        return plan
    return replace(plan, presets=tuple(_preset(name, plan, asked.attention) for name in PRESETS))


def _preset(name: PresetName, plan: Plan, attention: AttentionConfig) -> Preset:
    """The method of that name in the place of the one that auto chose; attention: as it was asked for."""
    config = replace(plan.config, attention=replace(attention, preset=name))
    try:
        found = Preset(name, predict_step(config, plan.world, plan.machine).seconds)
        if plan.memory is None or plan.memory.capacity is None:
            return found
        prediction = shared_predictor().predict(config, plan.world)
        fits = plan.memory.capacity.fit(*prediction.needs).fits
        return replace(found, needed_bytes=prediction.needed_bytes, fits=fits)
    except ConfigError as error:
        return Preset(name, problems=error.problems)


def _ranks_as_measured(config: RunConfig, machine: Machine | None) -> list[str]:
    """The setting that makes as many ranks of a node as a profile was measured with, where nothing says how many."""
    ranks = (machine or machine_of(config)).local_ranks
    is_said = config.cluster.ranks_per_node or config.cluster.topology_nodes or config.parallel.cp_size
    return [] if is_said or ranks is None else placement_overrides(ranks, None)
