"""What `burst plan` plans: a configuration, with what it will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from burst_cli import render
from burst_cli.plan.decisions import moving_operand_words
from burst_cli.plan.memory_check import MemoryCheck, with_remedies, without_search
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, PresetName, RunConfig
from engine.planning.methods.presets import PRESETS
from engine.planning.topology import Topology
from engine.predict.attention import AttentionPreview, preview_attention
from engine.predict.flops import StepTime
from engine.predict.machine import Machine, device_bytes, find_machine, machine_of, split_device
from engine.predict.memory import capacity_of, configured_device, find_hardware, missing_library, shared_predictor
from engine.predict.step_time import predict_step
from engine.resolve.attention import MethodCandidate, resolve_attention
from engine.resolve.degrees import world_topology
from engine.resolve.recommend import Adviser, Recommendation
from engine.resolve.run import ResolvedRun, resolve_run


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
    """A run that was resolved, and how long a step of it takes.

    presets   all of them under the same memory policy, where that was asked for
    as_measured   nobody says how many ranks a node has: as many as the machine was measured with
    advice    what would cost less; None: nothing does, or nobody looked
    """

    run: ResolvedRun
    step: StepTime
    memory: MemoryCheck | None = None
    presets: tuple[Preset, ...] = ()
    as_measured: bool = False
    advice: Recommendation | None = None

    @property
    def fits(self) -> bool:
        """As far as is known."""
        return self.memory is None or self.memory.fits

    @property
    def config(self) -> RunConfig:
        """What runs."""
        return self.run.config

    @property
    def world(self) -> Topology:
        """All ranks."""
        return self.run.world

    @property
    def group(self) -> Topology:
        """The ranks that share a sequence."""
        return self.run.group

    @property
    def machine(self) -> Machine:
        """What it is predicted on."""
        return self.run.machine

    @property
    def ranking(self) -> tuple[MethodCandidate, ...]:
        """What attention=auto chose from, best first."""
        return self.run.decision("attention.preset").candidates

    @cached_property
    def preview(self) -> AttentionPreview:
        """Attention's plans; made when somebody looks, which takes longer than the time of a step."""
        return preview_attention(self.config, self.run.method, self.group, self.machine)

    @property
    def moving_operand(self) -> str:
        """What circulates in backward and why, in words."""
        decision = self.run.decision("attention.backward_circulates")
        return moving_operand_words(decision, self.config, self.run.method)

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
            "attention": {**preview.to_dict(), "reason": self.moving_operand},
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
    if has_memory and (problem := missing_library(asked)) is not None:
        render.say(render.stderr(), render.told("warning", problem))
        has_memory = False
    if not has_memory:
        asked = without_search(asked)
    machine = (named or machine_of(asked, capacity.device_name)).shared_by(world.local_ranks)
    if has_memory:
        shared_predictor().start()  # it loads torch meanwhile
    predict = shared_predictor().predict
    if has_memory:
        announce()
    run = resolve_run(asked, world, machine, capacity, predict)
    memory, advice = None, None
    if has_memory:
        memory = with_remedies(MemoryCheck(run, run.prediction or predict(run.config, run.method, world)), predict)
        if memory.fits:
            advice = Adviser(capacity, machine, predict).recommend(asked, run.config, world)
    step = predict_step(run.config, run.method, world, machine)
    plan = Plan(run, step, memory, (), bool(as_measured), advice)
    if not has_presets or not plan.ranking:
        return plan
    return replace(plan, presets=tuple(_preset(name, plan, asked.attention) for name in PRESETS))


def _preset(name: PresetName, plan: Plan, attention: AttentionConfig) -> Preset:
    """The method of that name in the place of the one that auto chose; attention: as it was asked for."""
    config = replace(plan.config, attention=replace(attention, preset=name))
    try:
        method = resolve_attention(config, plan.group, plan.machine)
        found = Preset(name, predict_step(config, method, plan.world, plan.machine).seconds)
        if plan.memory is None or plan.memory.capacity is None:
            return found
        prediction = shared_predictor().predict(config, method, plan.world)
        fits = plan.memory.capacity.fit(*prediction.needs).fits
        return replace(found, needed_bytes=prediction.needed_bytes, fits=fits)
    except ConfigError as error:
        return Preset(name, problems=error.problems)


def _ranks_as_measured(config: RunConfig, machine: Machine | None) -> list[str]:
    """The setting that makes as many ranks of a node as a profile was measured with, where nothing says how many."""
    ranks = (machine or machine_of(config)).local_ranks
    is_said = config.cluster.ranks_per_node or config.cluster.topology_nodes or config.parallel.cp_size
    return [] if is_said or ranks is None else placement_overrides(ranks, None)
