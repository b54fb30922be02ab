"""What to change about a run that fits: whatever else could be run is predicted, the best that fits is told. No torch.

Changes are compared by device seconds per token, what a run costs on devices that are paid by the hour: by them a
faster method and fewer ranks can be weighed against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig
from engine.planning.memory.auto import settle_memory
from engine.planning.memory.capacity import Capacity
from engine.planning.memory.cost import policy_cost
from engine.planning.memory.fit import method_on, predicted_fit, sequence_topology, with_ranks
from engine.planning.memory.predictor import Predict
from engine.planning.methods.auto import rank_methods
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import Machine
from engine.planning.time.step_time import StepTime, predict_step

LEAST_SAVING = 0.02  # below it predictions say nothing


@dataclass(frozen=True)
class Recommendation:
    """A change of method, memory policy or ranks, as it is typed; `saving`: of the device seconds of a token."""

    change: str
    step: StepTime
    saving: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"change": self.change, "saving": self.saving, "step_time": self.step.to_dict()}


@dataclass(frozen=True)
class _Option:
    """Something else to run; its memory policy may be open, and the change is then told by the one that is found."""

    change: str
    config: RunConfig
    world: Topology


@dataclass(frozen=True)
class Adviser:
    """What there is to run on, and how memory is predicted."""

    capacity: Capacity
    machine: Machine
    predict: Predict

    def recommend(self, asked: RunConfig, settled: RunConfig, world: Topology) -> Recommendation | None:
        """What saves most of a run that fits; None: nothing saves LEAST_SAVING.

        asked     the configuration as it was given, with what is `auto` in it
        settled   what runs
        """
        now_s = predict_step(settled, world, self.machine).device_s_per_token
        best: Recommendation | None = None
        hopeful = [(self._saving(option, now_s), option) for option in self._options(asked, settled, world)]
        for most, option in sorted(hopeful, key=lambda one: -one[0]):
            if most < LEAST_SAVING or (best is not None and best.saving >= most):
                break
            found = self._settled(option, now_s)
            if found is not None and found.saving >= max(LEAST_SAVING, best.saving if best else 0.0):
                best = found
        return best

    def _saving(self, option: _Option, now_s: float) -> float:
        """The most that it can save: an open policy might keep everything."""
        config = option.config
        if config.memory.activation_checkpoint == "auto":
            config = replace(config, memory=replace(config.memory, activation_checkpoint="none"))
        try:
            return 1 - self._step(config, option.world).device_s_per_token / now_s
        except ConfigError:  # such ranks cannot divide it
            return 0.0

    def _settled(self, option: _Option, now_s: float) -> Recommendation | None:
        """The option with the best policy that fits, and what it really saves; None: none fits."""
        config, world = option.config, option.world
        capacity = replace(self.capacity, local_ranks=world.local_ranks)
        try:
            choice = settle_memory(config, world, capacity, self.predict, self.machine, advised=False)
            prediction = choice.prediction or self.predict(config, world)
        except ConfigError:
            return None
        if not predicted_fit(prediction, capacity).fits:
            return None
        step = self._step(choice.config, world)
        change = option.change or choice.candidates[0].settings
        return Recommendation(change, step, 1 - step.device_s_per_token / now_s)

    def _step(self, config: RunConfig, world: Topology) -> StepTime:
        return predict_step(config, world, self.machine.shared_by(world.local_ranks))

    def _options(self, asked: RunConfig, settled: RunConfig, world: Topology) -> Iterator[_Option]:
        if asked.attention.preset != "auto":
            try:
                best = rank_methods(settled, sequence_topology(settled, world), self.machine)[0].attention
                yield _Option(_changes(settled.attention, best), replace(settled, attention=best), world)
            except ConfigError:
                pass
        if asked.memory.activation_checkpoint != "auto":
            yield _Option("", replace(settled, memory=_open(settled.memory)), world)
        if not self.capacity.host_is_device:  # more ranks add no cores
            cost = policy_cost(settled, method_on(settled, world))
            for other in _other_ranks(world, more=cost.recompute_flops + cost.moved_bytes > 0):
                nodes = f" --nodes {other.nodes}" if max(other.nodes, world.nodes) > 1 else ""
                config = replace(with_ranks(settled, world, other), memory=asked.memory)
                yield _Option(f"--ranks {other.size}{nodes}", config, other)


def _changes(before: AttentionConfig, after: AttentionConfig) -> str:
    """What differs, as overrides."""
    old, new = asdict(before), asdict(after)
    names = [name for name in new if new[name] != old[name]]
    return " ".join(f"attention{'' if name == 'preset' else f'.{name}'}={new[name]}" for name in names)


def _open(memory: MemoryConfig) -> MemoryConfig:
    """The same with the policy, and where and how layers keep, to be found; what the optimizer does is kept."""
    plain = MemoryConfig()
    return replace(
        memory, activation_checkpoint="auto", checkpoint_layers=(), activation_store=None, host_layers=None,
        tile_tokens=None, kept_fraction=plain.kept_fraction, every_layers=plain.every_layers,
    )  # fmt: skip


def _other_ranks(world: Topology, *, more: bool) -> Iterator[Topology]:
    """Half as many and, where a policy could then keep `more`, twice: nodes, of a single one ranks up to eight."""
    nodes, local_ranks = world.nodes, world.local_ranks
    if nodes % 2 == 0:
        yield Topology(nodes // 2, local_ranks)
    elif nodes == 1 and local_ranks % 2 == 0:
        yield Topology(1, local_ranks // 2)
    if more:
        fills_node = nodes == 1 and 2 * local_ranks <= 8
        yield Topology(1, 2 * local_ranks) if fills_node else Topology(2 * nodes, local_ranks)
