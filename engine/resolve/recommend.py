"""What to change about a run: whatever else could be run is predicted, and the best that fits is told. No torch.

Changes are compared by device seconds per token, what a run costs on devices that are paid by the hour: by them a
faster method and fewer ranks can be weighed against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig
from engine.planning.topology import Topology
from engine.predict.flops import StepTime
from engine.predict.machine import Machine
from engine.predict.memory import Capacity, MemoryPrediction, Predict
from engine.predict.policy_cost import policy_cost, rank_parameters, state_bytes
from engine.predict.step_time import predict_step
from engine.resolve.attention import rank_methods, resolve_attention
from engine.resolve.degrees import sequence_topology, tensor_parallel_problems
from engine.resolve.legality import method_on
from engine.resolve.memory import MemoryChoice, resolve_memory

LEAST_SAVING = 0.02  # below it predictions say nothing
MOST_TIMES = 16  # as many ranks, or as few tokens, at most
_NODE_RANKS = 8
_GIB = 2**30
_AMPLE_HOST_BYTES = 4096 * _GIB  # of the largest servers


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

    def recommend(self, requested: RunConfig, resolved: RunConfig, world: Topology) -> Recommendation | None:
        """What saves most of a run that fits; None: nothing saves LEAST_SAVING.

        requested     the configuration as it was given, with what is `auto` in it
        resolved   what runs
        """
        now_s = self._step(resolved, world).device_s_per_token
        best: Recommendation | None = None
        hopeful = [(self._saving(option, now_s), option) for option in self._options(requested, resolved, world)]
        for most, option in sorted(hopeful, key=lambda pair: -pair[0]):
            if most < LEAST_SAVING or (best is not None and best.saving >= most):
                break
            found = self._resolved(option, now_s)
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

    def _resolved(self, option: _Option, now_s: float) -> Recommendation | None:
        """The option with the best policy that fits, and what it really saves; None: none fits."""
        config, world = option.config, option.world
        capacity = replace(self.capacity, local_ranks=world.local_ranks)
        try:
            choice = resolve_memory(config, world, self.machine, capacity, self.predict)
            config = replace(config, memory=choice.memory)
            prediction = choice.prediction or self._memory(config, world)
        except ConfigError:
            return None
        if not capacity.fit(*prediction.needs).fits:
            return None
        step = self._step(config, world)
        change = option.change or choice.candidates[0].settings
        return Recommendation(change, step, 1 - step.device_s_per_token / now_s)

    def _step(self, config: RunConfig, world: Topology) -> StepTime:
        machine = self.machine.shared_by(world.local_ranks)
        method = resolve_attention(config, sequence_topology(config, world), machine)
        return predict_step(config, method, world, machine)

    def _memory(self, config: RunConfig, world: Topology) -> MemoryPrediction:
        method = resolve_attention(config, sequence_topology(config, world), self.machine)
        return self.predict(config, method, world)

    def remedies(self, config: RunConfig, world: Topology) -> list[str]:
        """What makes a run fit that does not: another policy; else more ranks, tensor parallelism, 8-bit moments, or a
        shorter sequence, each with the policy that lacks least. One sentence each, all predicted.
        """
        opened = replace(config, memory=_open(config.memory))
        choice = resolve_memory(opened, world, self.machine, self.capacity, self.predict)
        best = choice.candidates[0]
        if choice.fits and choice.prediction is not None:
            needs = f"{choice.prediction.needed_bytes / 2**30:.3g} GiB on the device"
            return [f"memory=auto would fit with {needs}, at {best.step_s:.3g} s a step: {best.settings}"]
        nearest = replace(config, memory=choice.memory)
        on_host = self._host_memory(config, world)
        found = [] if on_host is None else [on_host]
        directions = [self._more_ranks(nearest, world), _more_tp(nearest, world), _small_moments(nearest, world)]
        too_large = self._smaller_model(nearest, world)
        directions += [] if too_large else [_shorter_sequences(nearest, world)]
        first = (next(filter(self._fits, options), None) for options in directions)
        found += [f"{option.change}, with {best.name}" for option in first if option is not None]
        return found + ([too_large] if too_large and on_host is None else [])

    def _host_memory(self, config: RunConfig, world: Topology) -> str | None:
        """What would fit with more host memory, or with that which is not known: its optimizer there, updated inside
        backward where only that helps, and the longest sequence of those halved that fits. All predicted.
        """
        if self.capacity.host_is_device:
            return None
        ample = replace(self, capacity=replace(self.capacity, host_bytes_per_node=_AMPLE_HOST_BYTES))
        for in_backward in (False, True):
            changed = _on_host(config, in_backward=in_backward)
            for option in (_Option("", changed, world), *_shorter_sequences(changed, world)):
                trial = option.config
                trial = replace(trial, memory=replace(_open(trial.memory), activation_checkpoint="auto"))
                try:
                    choice = resolve_memory(trial, world, self.machine, ample.capacity, self.predict)
                except ConfigError:
                    break
                if choice.fits and choice.prediction is not None:
                    seq_len = trial.train.seq_len
                    return _host_words(config, choice, world, seq_len, in_backward=in_backward)
        return None

    def _fits(self, option: _Option) -> bool:
        """What cannot run does not; what keeps too much is not predicted."""
        config, world = option.config, option.world
        capacity = replace(self.capacity, local_ranks=world.local_ranks)
        try:
            least = policy_cost(config, method_on(config, world)).least
            return capacity.fit(*least).fits and capacity.fit(*self._memory(config, world).needs).fits
        except ConfigError:
            return False

    def _more_ranks(self, config: RunConfig, world: Topology) -> Iterator[_Option]:
        """Twice as many that share the sequence, and again; ranks of a CPU share the node's memory."""
        larger = _doubled(world, fills_node=not self.capacity.host_is_device)
        while larger.size <= MOST_TIMES * world.size:
            changed = with_ranks(config, world, larger)
            share = f"{-(-config.train.seq_len // sequence_topology(changed, larger).size):,}"
            nodes = f" ({larger.nodes} nodes of {larger.local_ranks})" if larger.nodes > 1 else ""
            text = f"{larger.size} ranks{nodes} instead of {world.size} would fit: each then holds {share} tokens"
            yield _Option(text, changed, larger)
            larger = _doubled(larger, fills_node=not self.capacity.host_is_device)

    def _smaller_model(self, config: RunConfig, world: Topology) -> str | None:
        """What to say where the model's own states leave no room for a single token."""
        states = state_bytes(config.memory, rank_parameters(config, method_on(config, world)))
        on_device = config.memory.optimizer_store == "device" or self.capacity.host_is_device
        if not on_device or states <= self.capacity.device_bytes:
            return None
        return (
            f"a smaller model: weights, gradients and optimizer states alone take {states / 2**30:.3g} GiB of a rank, "
            "whatever train.seq_len is"
        )

    def _options(self, requested: RunConfig, resolved: RunConfig, world: Topology) -> Iterator[_Option]:
        if requested.attention.preset != "auto":
            try:
                best = rank_methods(resolved, sequence_topology(resolved, world), self.machine)[0].attention
                yield _Option(_changes(resolved.attention, best), replace(resolved, attention=best), world)
            except ConfigError:
                pass
        if requested.memory.activation_checkpoint != "auto":
            yield _Option("", replace(resolved, memory=_open(resolved.memory)), world)
        if not self.capacity.host_is_device:  # more ranks add no cores
            cost = policy_cost(resolved, method_on(resolved, world))
            for other in _other_ranks(world, more=cost.recompute_flops + cost.moved_bytes > 0):
                nodes = f" --nodes {other.nodes}" if max(other.nodes, world.nodes) > 1 else ""
                config = replace(with_ranks(resolved, world, other), memory=requested.memory)
                yield _Option(f"--ranks {other.size}{nodes}", config, other)


def _on_host(config: RunConfig, *, in_backward: bool) -> RunConfig:
    """The optimizer in host memory; in_backward: and each layer's gradient freed as soon as it is there."""
    memory = replace(
        config.memory, optimizer_store="host", optimizer_in_backward=in_backward or config.memory.optimizer_in_backward
    )
    if not in_backward:
        return replace(config, memory=memory)
    optimizer = replace(config.optimizer, max_grad_norm=None)
    return replace(config, memory=memory, optimizer=optimizer, train=replace(config.train, grad_accum_steps=1))


def _host_words(config: RunConfig, choice: MemoryChoice, world: Topology, seq_len: int, *, in_backward: bool) -> str:
    """What to type, and how much host memory it takes."""
    assert choice.prediction is not None
    node_bytes = choice.prediction.host_peak_bytes * world.local_ranks
    host = -(-node_bytes // _GIB)
    words = [f"memory.host_bytes={host * _GIB}", choice.candidates[0].settings, "memory.optimizer_store=host"]
    if in_backward:
        words += ["memory.optimizer_in_backward=true", "optimizer.max_grad_norm=null"]
        words += ["train.grad_accum_steps=1"] if config.train.grad_accum_steps > 1 else []
    if seq_len != config.train.seq_len:
        words.append(f"train.seq_len={seq_len}")
    typed = " ".join(dict.fromkeys(" ".join(words).split()))
    return f"{host} GiB of host memory per node or more would do: {typed}; {choice.candidates[0].step_s:.3g} s a step"


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
        tile_tokens=None, saved_fraction=plain.saved_fraction, every_layers=plain.every_layers,
    )  # fmt: skip


def _other_ranks(world: Topology, *, more: bool) -> Iterator[Topology]:
    """Half as many and, where a policy could then keep `more`, twice."""
    nodes, local_ranks = world.nodes, world.local_ranks
    if nodes % 2 == 0:
        yield Topology(nodes // 2, local_ranks)
    elif nodes == 1 and local_ranks % 2 == 0:
        yield Topology(1, local_ranks // 2)
    if more:
        yield _doubled(world, fills_node=True)


def _doubled(world: Topology, *, fills_node: bool) -> Topology:
    """Twice as many nodes; of a single one, where that helps, twice as many ranks up to eight."""
    fills_node = fills_node and world.nodes == 1 and 2 * world.local_ranks <= _NODE_RANKS
    return Topology(1, 2 * world.local_ranks) if fills_node else Topology(2 * world.nodes, world.local_ranks)


def _more_tp(config: RunConfig, world: Topology) -> Iterator[_Option]:
    """Higher tensor parallel degrees inside a node, on the same ranks."""
    for size in (2, 4, 8):
        if size > config.parallel.tp_size and world.local_ranks % size == 0:
            changed = replace(
                config,
                attention=without_shape(config.attention),
                parallel=replace(config.parallel, tp_size=size, cp_size=None),
                memory=replace(config.memory, tile_tokens=None),
            )
            if not list(tensor_parallel_problems(config.model, size)):
                yield _Option(
                    f"parallel.tp_size={size} parallel.cp_size=null would fit on the same ranks", changed, world
                )


def _small_moments(config: RunConfig, world: Topology) -> Iterator[_Option]:
    if config.memory.moments_dtype != "int8":
        changed = replace(config, memory=replace(config.memory, moments_dtype="int8"))
        yield _Option("memory.moments_dtype=int8 would fit on the same ranks", changed, world)


def _shorter_sequences(config: RunConfig, world: Topology) -> Iterator[_Option]:
    """Half of the tokens, or a quarter, and so on."""
    tokens = config.train.seq_len // 2
    while tokens and MOST_TIMES * tokens >= config.train.seq_len:
        changed = replace(config, train=replace(config.train, seq_len=tokens))
        yield _Option(f"train.seq_len={tokens} would fit on the same ranks", changed, world)
        tokens //= 2


def with_ranks(config: RunConfig, world: Topology, larger: Topology) -> RunConfig:
    """The same run on more ranks, which all share the sequence."""
    parallel = config.parallel
    if parallel.cp_size is not None:
        cp_size = parallel.cp_size * larger.size // world.size
        parallel = replace(parallel, cp_size=cp_size)
    attention = without_shape(config.attention)
    attention = replace(attention, preset="burst") if attention.preset == "single" else attention
    return replace(config, parallel=parallel, attention=attention)


def without_shape(attention: AttentionConfig) -> AttentionConfig:
    """A shape given for other ranks would be illegal: the preset's own is taken."""
    return replace(attention, head_parallel_size=None, ring_inner_size=None, ring_outer_size=None)
